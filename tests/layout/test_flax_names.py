"""What flax reads on a created model: names where the author wrote some, and nothing elsewhere."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.create.constructor import unsharded

WIDTH, DEPTH = 4, 8  # the fallback splits the largest dim: of these arrays, the dim of the layers
RULES = [
  nxp.LogicalRules(batch="fsdp", layers=None, embed=None, mlp="tensor"),
  nxp.fsdp(min_size=0, extend=True),
]
X = np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)


def mesh(**kind):
  return nxp.make_mesh(fsdp=2, tensor=4, **kind)


class Layer(nnx.Module):  # Two parameters; `names` is which of them have names: all, some or none
  def __init__(self, rngs, names="none"):
    kernel, bias = named("embed", "mlp"), named("mlp")
    given = {"kernel_metadata": {} if names == "none" else kernel}
    given |= {"bias_metadata": bias if names == "all" else {}}
    self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **given)

  def __call__(self, x):
    return x + jnp.tanh(self.linear(x))


class Stack(nnx.Module):
  """Layers stacked along any dim, whose name is `partition`; each method runs them by another transform."""

  def __init__(self, rngs, names="none", axis=0, partition="layers", depth=DEPTH):
    self.axis, self.depth = axis, depth
    self.meta = {} if partition == "absent" else {"transform_metadata": {nnx.PARTITION_NAME: partition}}
    make = nnx.vmap(lambda rngs: Layer(rngs, names), in_axes=0, out_axes=axis, **self.meta)
    self.layers = nnx.split_rngs(splits=depth)(make)(rngs)
    self.noise = nnx.Rngs(noise=1)

  def scan(self, x, body=lambda layer, x: layer(x)):
    axes = {"in_axes": (nnx.Carry, self.axis), "out_axes": nnx.Carry}
    return nnx.scan(lambda x, layer: body(layer, x), **axes, **self.meta)(x, self.layers)

  def vmap(self, x):
    each = nnx.vmap(lambda layer, x: layer(x), in_axes=(self.axis, None), out_axes=0, **self.meta)
    return each(self.layers, x).mean(0)

  def remat(self, x):
    return self.scan(x, nnx.remat(lambda layer, x: layer(x)))

  def split_rngs(self, x):
    body = lambda x, layer, noise: layer(x) + 0.1 * jax.random.normal(noise.noise(), x.shape)
    over = nnx.scan(body, in_axes=(nnx.Carry, self.axis, 0), out_axes=nnx.Carry, **self.meta)
    return nnx.split_rngs(splits=self.depth)(over)(x, self.layers, self.noise)

  def cond(self, x):
    return nnx.cond(x.sum() < 1e9, lambda model, x: model.scan(x), lambda model, x: x, self, x)

  def while_loop(self, x):
    def body(carry):
      model, x, count = carry
      return model, model.scan(x), count + 1

    return nnx.while_loop(lambda carry: carry[2] < 2, body, (self, x, 0))[1]


def run(method, model, x):
  """The result of a method and, except through a loop of unknown length, its gradients."""
  loss = lambda model, x: (getattr(model, method)(x) ** 2).mean()
  f = loss if method == "while_loop" else nnx.value_and_grad(loss)
  return jax.tree.leaves(nnx.jit(f)(model, x))


TRANSFORMS = ("scan", "vmap", "remat", "split_rngs", "cond", "while_loop")


@pytest.mark.cases(9)
@pytest.mark.parametrize("partition", ["layers", None, "absent"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("names", ["none", "some", "all"])
@pytest.mark.parametrize("method", TRANSFORMS)
@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_transforms_of_flax_run_on_a_created_stack(method, names, axis, partition):
  if partition == "absent" and axis == 1 and names != "none":
    pytest.skip("flax leaves the names on dims that are no longer theirs")
  rules = RULES if partition != "absent" else [nxp.LogicalRules(embed=None, mlp=None, batch="fsdp"), RULES[1]]
  init = lambda: Stack(nnx.Rngs(0), names, axis, partition)
  model, alone = nxp.create_sharded_model(init, mesh(), rules), unsharded(init)
  for ours, theirs in zip(run(method, model, X), run(method, alone, X), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def create(names, extend=False, **kind):
  rules = [RULES[0], nxp.fsdp(min_size=0, extend=extend)]
  plan = nxp.plan(lambda: Layer(nnx.Rngs(0), names), mesh(**kind), rules, optimizer=optax.adam(1e-2))
  return nxp.create_sharded_model(plan)[0], plan


def specs_of(layer):
  return {name: getattr(layer.linear, name).get_raw_value().sharding.spec for name in ("bias", "kernel")}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("names", ["none", "some", "all"])
def test_names_stay_as_they_were_written_and_no_others_appear(names, explicit):
  model, plan = create(names, explicit=explicit)
  alone = unsharded(plan.init)
  for name, with_names in (("kernel", names != "none"), ("bias", names == "all")):
    ours, theirs = (getattr(module.linear, name).get_metadata() for module in (model, alone))
    added = {"sharding_scope", "mesh", "sharding_rules"} if with_names else {"sharding_scope"}
    assert ours.keys() - theirs.keys() == added
    assert ours.get("out_sharding") == theirs.get("out_sharding")
    derived = nnx.get_partition_spec(getattr(model.linear, name)).get_raw_value()
    assert derived == (plan[f"linear.{name}"].spec if with_names else jax.P())
  nxp.check_layout(model, plan)


@pytest.mark.parametrize("names", ["none", "some", "all"])
@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_the_constraint_of_the_flax_guide_keeps_what_has_names(names):
  model, plan = create(names)

  @nnx.jit
  def constrained(model):
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))

  with jax.set_mesh(plan.mesh):
    constrained(model)
  found = specs_of(model)
  assert found["kernel"] == (jax.P() if names == "none" else jax.P(None, "tensor"))
  assert found["bias"] == (jax.P("tensor") if names == "all" else jax.P())


@pytest.mark.parametrize("extend", [False, True])
@pytest.mark.parametrize("names", ["none", "some", "all"])
def test_an_optimizer_of_flax_follows_the_parameters(names, extend):
  model, _ = create(names, extend)
  make = lambda model: nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  assert specs_of(make(model).opt_state[0].mu) == specs_of(model)
  # Inside of jit only names say where the state goes.
  found, unnamed = specs_of(nnx.jit(make)(model).opt_state[0].mu), {"none": 2, "some": 1, "all": 0}[names]
  assert sum(found[name] != spec for name, spec in specs_of(model).items()) == unnamed


@pytest.mark.parametrize(("names", "rules", "spec", "flax"), [
  ((("embed", "mlp"), None), {"embed": "fsdp", "mlp": "tensor"}, (("fsdp", "tensor"), None), True),
  (("fsdp", None), {"fsdp": None}, (None, "fsdp"), False),
  ((None, "mlp"), {"mlp": "tensor"}, ("fsdp", "tensor"), False),
  (("embed", "embed"), {"embed": nxp.LogicalRules.first("fsdp", None)}, ("fsdp", None), False),
], ids=str)  # fmt: skip
def test_names_that_do_not_say_the_whole_layout(names, rules, spec, flax):
  """They stay, and an optimizer of flax follows the parameter nevertheless."""
  init = lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0), kernel_metadata=named(*names))
  model = nxp.create_sharded_model(init, mesh(), [rules, nxp.fsdp(min_size=64, extend=True)])
  assert model.kernel.out_sharding == names
  assert model.kernel.get_raw_value().sharding.spec == jax.P(*spec)
  assert (nnx.get_partition_spec(model.kernel).get_raw_value() == jax.P(*spec)) is flax
  moments = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param).opt_state[0].mu
  assert moments["kernel"].get_raw_value().sharding.spec == jax.P(*spec)


def test_a_sharded_model_without_names_can_be_pickled():
  model, _ = create("none")
  again = pickle.loads(pickle.dumps(model))
  np.testing.assert_array_equal(again.linear.kernel[...], model.linear.kernel[...])
