"""Inferred rules: the pairs that a person would write, found by a trace."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from layout.families import GPT, T5, Llama, ViT
from nnx_parallel import infer_rules, presets
from training import other_notes, run_steps

TOKENS = jax.ShapeDtypeStruct((8, 8), "int32")
IMAGES = jax.ShapeDtypeStruct((8, 4, 4, 3), "float32")
FLOATS = jax.ShapeDtypeStruct((8, 16), "float32")
MESH = {"fsdp": 2, "tensor": 2}


def specs(init, *inputs, mesh=None, **options):
  """The tensor-parallel part of the layout that the inferred rules give, by path."""
  mesh = nxp.abstract_mesh(**(mesh or MESH))
  rules = infer_rules(init, mesh, *inputs, **{"min_size": 0, **options})
  plan = nxp.plan(init, mesh, [rules.paths, nxp.replicate()])
  assert all("grouped convolutions" in note for note in other_notes(plan))
  return {leaf.name: leaf.spec for leaf in plan.leaves}


def by_preset(init, table):
  plan = nxp.plan(init, nxp.abstract_mesh(**MESH), [table, presets.fsdp_tensor(min_size=2**30)])
  return {leaf.name: leaf.spec for leaf in plan.leaves}


FAMILIES = {
  "llama": (Llama, presets.llama, [TOKENS], set()),
  "gpt": (GPT, presets.gpt, [TOKENS], {"wpe.embedding"}),
  "vit": (ViT, presets.vit, [IMAGES], {"head.kernel", "head.bias"}),
  "t5": (T5, presets.t5, [TOKENS, TOKENS], {"relative_attention_bias.embedding"}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize(("make", "table", "inputs", "others"), FAMILIES.values(), ids=FAMILIES)
def test_a_family_comes_out_as_in_its_table_but_for_a_few_arrays(make, table, inputs, others):
  init = lambda: make(nnx.Rngs(0))
  found, wanted = specs(init, *inputs), by_preset(init, table())
  other = {path for path in found if found[path] != wanted[path]}
  assert {next((name for name in others if path.endswith(name)), path) for path in other} == others
  if make is T5:
    assert {found[path] for path in other} == {P(None, "tensor")}  # one bias for each head


def test_the_proposal_is_code():
  init, mesh = lambda: Llama(nnx.Rngs(0), tied=True), nxp.abstract_mesh(**MESH)
  rules = infer_rules(init, mesh, TOKENS, min_size=0)
  text = r"""[LogicalRules(batch='fsdp'), PathRules([
  (('embed_tokens', 'embedding'), ('tensor', None)),
  (('layers', '\\d+', 'mlp', 'down_proj', 'kernel'), ('tensor', None)),
  (('layers', '\\d+', 'mlp', '(gate_proj|up_proj)', 'kernel'), (None, 'tensor')),
  (('layers', '\\d+', 'self_attn', '(k_proj|q_proj|v_proj)', 'kernel'), (None, 'tensor', None)),
  (('layers', '\\d+', 'self_attn', 'o_proj', 'kernel'), ('tensor', None, None)),
]), fsdp('fsdp', min_size=0, extend=True)]"""
  assert repr(rules) == text
  names = {name: getattr(nxp, name) for name in nxp.__all__}
  assert nxp.RuleSet.of(eval(text, names)) == rules
  assert infer_rules(Llama(nnx.Rngs(0), tied=True, depth=1), mesh, TOKENS, min_size=0) == rules


class MLP(nnx.Module):
  def __init__(self, rngs, sizes=(16, 32, 64, 32, 16)):
    self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

  def __call__(self, x):
    for layer in self.layers[:-1]:
      x = nnx.relu(layer(x))
    return self.layers[-1](x)


def test_layers_alternate_between_columns_and_rows():
  found = specs(lambda: MLP(nnx.Rngs(0)), FLOATS)
  kernels = [found[f"layers.{i}.kernel"] for i in range(4)]
  # The widest dim first (64); the pairs over 32 touch its layers, so the outer layers stand alone.
  assert kernels[1:3] == [P(None, "tensor"), P("tensor", None)]
  assert found["layers.1.bias"] == P("tensor")
  assert found["layers.2.bias"] == P(None)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_pair_costs_one_collective():
  mesh = nxp.make_mesh(tensor=8)
  init = lambda: MLP(nnx.Rngs(0), (16, 64, 16))
  rules = infer_rules(init, mesh, FLOATS, min_size=0)
  assert repr(rules.fallback) == "replicate()"
  model = nxp.create_sharded_model(init, mesh, rules)
  x = jax.device_put(np.ones((8, 16), np.float32), jax.NamedSharding(mesh, P()))
  run = jax.jit(lambda model, x: model(x)).lower(model, x).compile()
  text = run.as_text()
  assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
  assert not re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
  np.testing.assert_allclose(run(model, x), init()(np.ones((8, 16), np.float32)), rtol=1e-5, atol=1e-6)


def test_sizes_that_the_axis_does_not_divide_stay_whole():
  found = specs(lambda: MLP(nnx.Rngs(0), (16, 30, 16)), FLOATS, mesh={"tensor": 4})
  first, second = ((found[f"layers.{n}.kernel"], found[f"layers.{n}.bias"]) for n in (0, 1))
  assert (first, second) == ((P("tensor", None), P(None)), (P(None, "tensor"), P("tensor")))


# Small groups stay whole; no tensor axis.
@pytest.mark.parametrize(("mesh", "axis", "size"), [(MESH, "fsdp", 2**18), ({"data": 8}, "data", 64)])
def test_only_fsdp(mesh, axis, size):
  rules = infer_rules(lambda: Llama(nnx.Rngs(0)), nxp.abstract_mesh(**mesh), TOKENS, min_size=size)
  assert repr(rules) == f"[LogicalRules(batch='{axis}'), fsdp('{axis}', min_size={size}, extend=True)]"


def test_a_loss_may_be_traced_instead():
  def loss(model, tokens):
    logits = model(tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    return -picked.mean()

  found = specs(lambda: Llama(nnx.Rngs(0)), TOKENS, call=loss)
  assert found["layers.1.mlp.down_proj.kernel"] == P("tensor", None)
  assert found["layers.0.self_attn.o_proj.kernel"] == P("tensor", None, None)


class Nested(nnx.Module):  # A path that ends like a longer one: ('kernel' of) `up` and `inner.up`
  def __init__(self, rngs):
    self.inner = nnx.Dict(up=nnx.Linear(16, 64, rngs=rngs), down=nnx.Linear(64, 30, rngs=rngs))
    self.up, self.down = nnx.Linear(30, 16, rngs=rngs), nnx.Linear(16, 30, rngs=rngs)

  def __call__(self, x):
    return self.down(self.up(self.inner.down(nnx.relu(self.inner.up(x)))))


def test_a_rule_never_reaches_into_longer_paths():
  init = lambda: Nested(nnx.Rngs(0))
  found = specs(init, FLOATS, mesh={"tensor": 4})
  assert found["up.kernel"] == found["inner.up.kernel"] == P(None, "tensor")
  assert found["down.kernel"] == found["inner.down.kernel"] == P("tensor", None)
  small = specs(init, FLOATS, mesh={"tensor": 4}, min_size=2000)
  assert small["inner.up.kernel"] == P(None, "tensor")
  assert not any(small["up.kernel"])
  rules = infer_rules(init, nxp.abstract_mesh(tensor=4), FLOATS, min_size=0)
  assert "'inner\\.down\\.kernel'" in repr(rules).replace("\\\\", "\\")
  large = infer_rules(init, nxp.abstract_mesh(tensor=64), FLOATS, min_size=0)
  assert large.paths[0].match(("up", "kernel")) is None
  assert large.paths[0].match(("inner", "up", "kernel")).names == (None, "tensor")


class Stacked(nnx.Module):
  def __init__(self, rngs):
    self.blocks = nnx.vmap(lambda rngs: MLP(rngs, (16, 64, 16)))(rngs.split(3))

  def __call__(self, x):
    scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return scan(lambda x, block: block(x))(x, self.blocks)


def test_stacked_layers_are_seen_through_scan():
  found = specs(lambda: Stacked(nnx.Rngs(0)), FLOATS)
  assert found["blocks.layers.0.kernel"] == P(None, None, "tensor")
  assert found["blocks.layers.1.kernel"] == P(None, "tensor", None)
  assert found["blocks.layers.0.bias"] == P(None, "tensor")


def test_layers_of_equal_width_stay_apart_where_their_activation_is_compiled():
  """Calls of a compiled function on equal shapes share one traced program, and not their dims."""

  class Net(MLP):
    def __init__(self, rngs, activate):
      super().__init__(rngs, (16,) * 5)
      self.activate = activate

    def __call__(self, x):
      for layer in self.layers:
        x = self.activate(layer(x))
      return x

  relu = lambda x: jnp.maximum(x, 0.0)
  found = specs(lambda: Net(nnx.Rngs(0), jax.jit(relu)), FLOATS)
  assert found == specs(lambda: Net(nnx.Rngs(0), relu), FLOATS)
  kernels = [found[f"layers.{i}.kernel"] for i in range(4)]
  assert kernels == [P(None, "tensor"), P("tensor", None)] * 2


def test_a_recurrent_cell_is_never_split_on_both_sides():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.rnn = nnx.RNN(nnx.SimpleCell(16, 32, rngs=rngs))
      self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
      return self.head(self.rnn(x))

  found = specs(lambda: Net(nnx.Rngs(0)), jax.ShapeDtypeStruct((2, 5, 16), "float32"))
  assert all(sum(entry is not None for entry in spec) <= 1 for spec in found.values())


class Annotated(nnx.Module):  # Names of both kinds on kernels; an activation has a name that no parameter has
  def __init__(self, rngs, names=("embed", "mlp"), **metadata):
    def linear(n, m, names):
      init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **metadata)
      return nnx.Linear(n, m, kernel_init=init, rngs=rngs)

    self.up, self.down = linear(16, 64, names), linear(64, 16, names[::-1])

  def __call__(self, x):
    x = nxp.constrain(nnx.relu(self.up(x)), "batch", "hidden")
    return self.down(x)


NAMED = {
  "all kernels": ({}, {"mlp": "tensor", "embed": None}),
  "a mesh axis": ({"names": ("embed", "fsdp")}, {"embed": None}),
  "own rules": ({"sharding_rules": (("mlp", "tensor"),)}, {"embed": None}),
  "two in one dim": ({"names": ("embed", ("mlp", "heads"))}, {"mlp": None, "heads": None, "embed": None}),
  "one name twice": ({"names": ("embed", "embed")}, {"embed": None}),
  "fewer names than dims": ({"names": ("embed",)}, {"embed": None}),
}


@pytest.mark.each_case
@pytest.mark.parametrize(("options", "logical"), NAMED.values(), ids=NAMED)
def test_a_proposal_for_a_model_with_names_is_always_accepted(options, logical):
  init = lambda: Annotated(nnx.Rngs(0), **options)
  for mesh in (MESH, {"tensor": 2, "fsdp": 1}, {"data": 4, "fsdp": 2, "tensor": 2}):
    rules = infer_rules(init, nxp.abstract_mesh(**mesh), FLOATS, min_size=0)
    nxp.plan(init, nxp.abstract_mesh(**mesh), rules, optimizer=optax.adam(1e-3))
    assert rules.logical == nxp.LogicalRules(logical, batch=rules.logical["batch"], hidden=None)


def test_names_and_the_rest_of_a_model_are_split_together():
  """Kernels have names, and their biases have none: one split carries over to both."""
  init, mesh = lambda: Annotated(nnx.Rngs(0)), nxp.make_mesh(**MESH, data=2)
  plan = nxp.plan(init, mesh, infer_rules(init, mesh, FLOATS, min_size=0), optimizer=optax.sgd(0.1))
  found = {leaf.name: leaf.spec for leaf in plan.leaves}
  assert found["up.kernel"] == P("fsdp", "tensor")
  assert (found["up.bias"], found["down.kernel"]) == (P(("tensor", "fsdp")), P("tensor", "fsdp"))
  run = run_steps(plan, lambda model, x: (model(x) ** 2).mean(), [np.ones((8, 16), np.float32)])
  plain = (nxp.unsharded(init)(np.ones((8, 16), np.float32)) ** 2).mean()
  assert run.losses == pytest.approx([float(plain)])
