"""A step that the user writes: one compilation, and the plan's layout after every step."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed

X = np.random.default_rng(0).standard_normal((16, 8), dtype=np.float32)
compilations: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def count_compilations():
  def count(name: str, seconds: float, **_) -> None:
    if "backend_compile" in name:
      compilations.append(name)

  jax.monitoring.register_event_duration_secs_listener(count)
  yield
  jax.monitoring.unregister_event_duration_listener(count)


class Block(nnx.Module):  # Small replicated parameters, batch statistics and dropout around two split kernels
  def __init__(self, rngs):
    self.up = nnx.Linear(8, 64, rngs=rngs)
    self.batch_norm = nnx.BatchNorm(64, rngs=rngs)
    self.norm = nnx.LayerNorm(64, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(64, 8, rngs=rngs)

  def __call__(self, x):
    return self.down(self.dropout(self.norm(nnx.relu(self.batch_norm(self.up(x))))))


def update(model, optimizer, batch):
  loss, grads = nnx.value_and_grad(lambda m: ((m(batch) - batch) ** 2).mean())(model)
  optimizer.update(model, grads)
  return loss


def losses_of(*, explicit, **options):
  """Trains three steps; the layout and the compilations are checked."""
  axes = {"data": 8} if explicit else {"data": 2, "fsdp": 4}
  rules = nxp.replicate() if explicit else nxp.fsdp(min_size=64)
  mesh = nxp.make_mesh(**axes, explicit=explicit)
  plan = nxp.plan(lambda: Block(nnx.Rngs(0)), mesh, rules, optimizer=optax.adamw(1e-2), **options)
  model, optimizer = placed(plan)
  step = nnx.jit(update, donate_argnums=(0, 1))
  batch = nxp.shard_batch(X, plan)
  losses = [float(step(model, optimizer, batch))]
  compilations.clear()
  losses += [float(step(model, optimizer, batch)) for _ in range(2)]
  assert not compilations
  nxp.check_layout(model, plan, optimizer=optimizer)
  return losses


@functools.cache
def expected():
  model = Block(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
  step = nnx.jit(update)
  return [float(step(model, optimizer, X)) for _ in range(3)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("explicit", "zero", "memory"), [
  (True, 0, "pinned_host"), (True, 1, None), (False, 0, None), (False, 1, "pinned_host"),
])  # fmt: skip
def test_nnx_jit_compiles_once_and_keeps_the_layout(explicit, zero, memory):
  found = losses_of(explicit=explicit, zero=zero, optimizer_memory=memory)
  np.testing.assert_allclose(found, expected(), rtol=1e-5)


def gathers(jaxpr, shape=(64, 64), inside=()):
  """The specs of the constraints on parameters of a shape, with the operations that they are in, in order."""
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if eqn.primitive.name == "sharding_constraint" and eqn.invars[0].aval.shape == shape:
      yield inside, eqn.invars[0].aval, eqn.params["sharding"].spec
    for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield from gathers(value, shape, (*inside, eqn.primitive.name))


def traced(loss, model, *args):
  graphdef, state = nnx.split(model)
  return jax.make_jaxpr(lambda state, *args: loss(nnx.merge(graphdef, state), *args))(state, *args)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_parameter_is_gathered_behind_its_cast_and_inside_of_a_scan_and_a_checkpoint():
  class Stack(nnx.Module):
    def __init__(self):
      make = nnx.vmap(lambda rngs: nnx.Linear(64, 64, dtype=jnp.bfloat16, rngs=rngs), in_axes=0, out_axes=0)
      self.layers = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
      body = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
      return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

  mesh, x = nxp.make_mesh(data=2, fsdp=2, tensor=2), jnp.ones((8, 64), jnp.bfloat16)
  rules = [nxp.PathRules([(r".*kernel", (None, "fsdp", "tensor"))], strict=False), nxp.replicate()]
  model = placed(nxp.plan(Stack, mesh, rules))
  loss = nxp.parallel.gather_on_read(lambda model, x: model(x).sum(), model)
  ((inside, aval, spec),) = gathers(traced(loss, model, x))
  assert "scan" in inside
  assert {"checkpoint", "remat2", "remat"} & {*inside}
  assert (aval.dtype, aval.shape, tuple(spec)) == (jnp.bfloat16, (64, 64), (None, "tensor"))


def by_hand(mesh):
  model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  model.kernel.set_value(jax.device_put(model.kernel[...], jax.NamedSharding(mesh, jax.P("a", "b"))))
  return model


def test_a_parameter_that_a_condition_returns_cannot_be_gathered_where_it_is_read():
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  model = by_hand(mesh)

  def loss(model, x):
    kernel = jax.lax.cond(x.sum() > 0, lambda w: w, lambda w: 2 * w, model.kernel[...])
    return (x @ kernel).sum()

  gathered = nxp.parallel.gather_on_read(loss, model, batch_axes=("a",))
  with pytest.raises(nxp.errors.TrainError, match="a parameter that comes from a branch of a condition"):
    traced(gathered, model, jnp.ones((8, 64)))


def test_the_gradient_of_a_gathered_loss_can_be_differentiated_again():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, nxp.fsdp(min_size=0))
  x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  loss = lambda model, x: (jnp.tanh(model(x)) ** 2).mean()

  def curvature(model, of):
    graphdef, state = nnx.split(model)
    run = lambda state: of(nnx.merge(graphdef, state), x)
    ones = jax.tree.map(jnp.ones_like, state)
    return jax.jit(lambda s: jax.jvp(jax.grad(run), (s,), (ones,))[1])(state)

  live = nxp.create_sharded_model(plan)
  found = curvature(live, nxp.parallel.gather_on_read(loss, live))
  wanted = curvature(nxp.unsharded(plan.init), loss)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
