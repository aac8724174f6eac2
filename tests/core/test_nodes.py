"""Reading what users wrote: every historic form, and every misspelling that flax ignores."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

import nnx_parallel as nxp
from layout.models import LM, named
from nnx_parallel.core.nodes import aliases, iter_nodes, names_of, plain_path, variables
from nnx_parallel.create.constructor import unsharded
from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.constrain import scope_of
from training import other_notes

RULES = nxp.LogicalRules(embed="fsdp", mlp="tensor")


def test_keys_of_a_tree_that_are_plain_strings():
  assert plain_path((jax.tree_util.GetAttrKey("a"), "b", jax.tree_util.SequenceKey(0))) == ("a", "b", 0)


mesh = lambda: nxp.make_mesh(fsdp=2, tensor=4)


def spec_of(**metadata):
  init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=metadata)
  return nxp.plan(init, mesh(), RULES)["kernel"].spec


@pytest.mark.parametrize("key", ["out_sharding", "sharding", "sharding_names"])
@pytest.mark.filterwarnings("ignore:.*(sharding|deprecated).*:DeprecationWarning")
def test_every_historic_key_is_read(key):
  assert spec_of(**{key: ("embed", "mlp")}) == Spec("fsdp", "tensor")


@pytest.mark.parametrize(("value", "spec"), [
  (("embed", "mlp"), Spec("fsdp", "tensor")), (["embed", None], Spec("fsdp", None)),
  (Spec("fsdp"), Spec("fsdp", None)),
  (Spec(None, ("fsdp", "tensor")), Spec(None, ("fsdp", "tensor"))), (Spec(), Spec(None, None)),
  ((), Spec(None, None)), (("embed",), Spec("fsdp", None)),
  ((("embed", "mlp"), None), Spec(("fsdp", "tensor"), None)), (None, Spec(None, None)),
])  # fmt: skip
def test_every_form_of_value_is_read(value, spec):
  assert spec_of(out_sharding=value) == spec


def test_a_named_sharding_is_read_by_its_spec():
  assert spec_of(out_sharding=NamedSharding(mesh(), Spec("fsdp"))) == Spec("fsdp", None)


def test_with_partitioning_is_read():
  def init():
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    return nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_init=kernel_init)

  plan = nxp.plan(init, mesh(), RULES)
  assert (plan["kernel"].spec, plan["kernel"].names) == (Spec("fsdp", "tensor"), ("embed", "mlp"))


def test_rules_on_the_variable_win_and_are_told():
  def init():
    metadata = {**named("embed", "mlp"), "sharding_rules": (("mlp", "fsdp"), ("embed", None))}
    return nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=metadata)

  plan = nxp.plan(init, mesh(), RULES)
  assert plan["kernel"].spec == Spec(None, "fsdp")
  assert plan["kernel"].decision.reason == "names (embed, mlp) by its own sharding_rules"
  assert "with its own sharding_rules {'mlp': 'fsdp', 'embed': None}" in plan.explain("kernel")


def test_a_variables_own_rules_must_agree():
  metadata = {**named("embed", "mlp"), "sharding_rules": (("mlp", "fsdp"), ("mlp", "tensor"))}
  with pytest.raises(ShardingError, match=r"kernel: sharding_rules maps 'mlp' twice"):
    spec_of(**metadata)


@pytest.mark.parametrize(("metadata", "message"), [
  ({"out_shardings": ("embed", "mlp")}, r"key 'out_shardings' means nothing.*\n.*\n.*'out_sharding'\?"),
  ({"sharding_name": ("embed", "mlp")}, r"key 'sharding_name' means nothing.*\n.*\n.*'sharding_names'\?"),
  ({"out_sharding": "embed"}, r"for each dim, not 'embed'.\n  Fix: out_sharding=\('embed', None\)"),
  ({"out_sharding": 3}, r"out_sharding must be one name .* not 3"),
  ({"out_sharding": ("embed", 3)}, r"3 in out_sharding is not a name"),
  ({"out_sharding": ("embed",) * 3}, r"kernel: 3 names for an array of 2 dims.\n.*\n  Fix: write 2 entries"),
  ({"out_sharding": ("embed", "mpl")}, r"dim 1 is named 'mpl', .*\n.*\n.*did you mean 'mlp'\?"),
  ({"out_sharding": Spec("fsdp", None, None)}, r"3 names for an array of 2 dims"),
])  # fmt: skip
def test_what_flax_would_ignore_or_garble_is_an_error(metadata, message):
  with pytest.raises(ShardingError, match=message):
    spec_of(**metadata)


def test_other_metadata_is_none_of_our_business():
  found = spec_of(**named("embed", "mlp"), note="sharded by hand", optimizer_sharding=None)
  assert found == Spec("fsdp", "tensor")


def test_names_survive_creation_and_can_be_planned_again_on_another_mesh():
  init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=named("embed", "mlp"))
  model = nxp.create_sharded_model(init, mesh(), RULES)
  assert model.kernel.out_sharding == ("embed", "mlp")
  assert names_of(model.kernel, where="kernel") == (("embed", "mlp"), (), {})
  rules = nxp.LogicalRules(embed=None, mlp="tensor")
  again = nxp.plan(lambda: nnx.clone(model), nxp.make_mesh(tensor=8), rules)
  assert again["kernel"].spec == Spec(None, "tensor")


def test_a_variables_own_rules_survive_creation_and_the_axes_that_they_gave_do_not():
  def init():
    metadata = {**named("embed", "mlp"), "sharding_rules": (("mlp", "fsdp"), ("embed", None))}
    return nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=metadata)

  model = nxp.create_sharded_model(init, mesh(), RULES)
  assert model.kernel.sharding_rules == (("embed", None), ("mlp", "fsdp"))
  assert scope_of(variables(model).values()) == nxp.plan(init, mesh(), RULES).activation_rules
  other = nxp.plan(lambda: nnx.clone(model), nxp.make_mesh(fsdp=8), RULES.replace(embed="fsdp", mlp=None))
  assert other["kernel"].spec == Spec(None, "fsdp")


def test_an_annotation_written_after_creation_counts():
  rules = RULES.replace(embed="fsdp")
  init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=named("embed", "mlp"))
  model = nxp.create_sharded_model(init, mesh(), rules)
  model.kernel.set_metadata(out_sharding=("mlp", "embed"))
  assert nxp.plan(lambda: nnx.clone(model), mesh(), rules)["kernel"].spec == Spec("tensor", "fsdp")


def test_tied_weights_are_counted_once_under_all_their_paths():
  plan = nxp.plan(lambda: LM(64, 8, 1, nnx.Rngs(0)), mesh(), RULES.replace(vocab=None))
  (found,) = (leaf.name for leaf in plan.leaves if "embed" in leaf.name or "head" in leaf.name)
  assert found == "embed.embedding"
  assert plan["head"] is plan["embed.embedding"]
  assert plan["head"].aliases == (("head",),)


def test_a_shared_submodule_gives_its_variables_two_paths():
  class Shared(nnx.Module):
    def __init__(self, rngs):
      self.a = nnx.Linear(8, 8, rngs=rngs)
      self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), self.a])

  wanted = {("a", name): (("layers", 1, name),) for name in ("bias", "kernel")}
  assert aliases(Shared(nnx.Rngs(0))) == wanted


@pytest.mark.slow
def test_an_annotated_model_runs_without_a_mesh_and_keeps_its_names():
  init = lambda: LM(61, 8, 2, nnx.Rngs(0))
  model = unsharded(init)
  assert model.embed.embedding.out_sharding == ("vocab", "embed")
  assert len(model.embed.embedding[...].sharding.device_set) == 1
  tokens = jnp.zeros((2, 4), jnp.int32)
  rules = nxp.LogicalRules(embed="fsdp", mlp="tensor", vocab=None, batch=None)
  created = nxp.create_sharded_model(init, mesh(), rules)
  run = nnx.jit(lambda m, x: m(x))
  np.testing.assert_allclose(run(model, tokens), run(created, tokens), atol=1e-6)
  optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
  loss = nxp.train_step(lambda m, x: (m(x) ** 2).mean())(model, optimizer, tokens)["loss"]
  assert jnp.isfinite(loss)


def test_without_a_mesh_flax_alone_refuses():
  with pytest.raises(ValueError, match="mesh"):
    nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata=named("embed", "mlp"))


def test_planning_ignores_whatever_mesh_is_active():
  with jax.set_mesh(nxp.make_mesh(other=8)):
    assert spec_of(**named("embed", "mlp")) == Spec("fsdp", "tensor")


class Nested(nnx.Module):  # Parts in every kind of container, some of them twice
  def __init__(self, rngs: nnx.Rngs):
    self.plain = nnx.data([nnx.Linear(2, 2, rngs=rngs), {"b": nnx.Param(1.0), "a": (nnx.Param(2.0),)}])
    self.again = self.plain[0]
    self.many = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])
    self.table = nnx.Dict(z=nnx.Param(3.0), y=nnx.Dict(x=nnx.Param(4.0)))
    self.chain = nnx.Sequential(self.many[3], jax.nn.relu)
    self.optimizer = nnx.Optimizer(self.many[0], optax.adamw(1e-3), wrt=nnx.Param)
    self.size, self.dtype, self.array = 3, jnp.float32, nnx.data(jnp.ones(2))


def test_nodes_are_what_flax_visits_in_its_order():
  module, first = Nested(nnx.Rngs(0)), {}
  for path, node in iter_nodes(module):
    first.setdefault(id(node), (path, node))
  wanted = [(p, node) for p, node in nnx.iter_graph(module) if isinstance(node, (nnx.Pytree, nnx.Variable))]
  assert [path for path, _ in first.values()] == [path for path, _ in wanted]
  assert all(ours is theirs for (_, ours), (_, theirs) in zip(first.values(), wanted, strict=True))


@pytest.mark.parametrize("container", [list, tuple])
def test_a_variable_twice_in_one_plain_container_is_tied(container):
  one = nnx.Param(jnp.ones(2))
  module = nnx.Module()
  module.parts = nnx.data(container([one, one]))
  assert aliases(module) == {("parts", 0): (("parts", 1),)}


def test_annotations_of_other_code_are_noted():
  init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0), kernel_metadata={"pspec": ("embed", "mlp")})
  plan = nxp.plan(init, mesh(), nxp.fsdp(min_size=0))
  (note,) = other_notes(plan)
  assert note.endswith(" does not read (an annotation is out_sharding=...): kernel pspec=('embed', 'mlp')")
  assert plan["kernel"].spec == Spec(None, "fsdp")


def test_two_arrays_of_one_name_are_refused():
  def init():
    return nnx.Dict(x=nnx.data({"y.z": nnx.Param(jnp.ones(8)), "y": nnx.Dict(z=nnx.Param(jnp.ones(8)))}))

  with pytest.raises(nxp.errors.PlanError, match=r"two arrays are called x.y.z.\n.*'y', 'z'\) and .*'y.z'\)"):
    nxp.plan(init, mesh())
