"""Modules, gathers and kernels under shard_map, against the plain computation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.errors import SchemeError, ShardingError
from nnx_parallel.report.program.collectives import collectives
from training import placed

RANDOM = np.random.default_rng(0)


def normal(*shape):
  return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def close(found, wanted, tolerance=1e-5):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


class Net(nnx.Module):
  def __init__(self, rngs):
    self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)])
    self.norm = nnx.BatchNorm(32, rngs=rngs, axis_name=None)
    self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

  def __call__(self, x):
    return self.layers[1](self.dropout(jnp.tanh(self.layers[0](x))))


def own_loss(model, batch):
  losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
  return losses.mean()


LAYOUTS = {
  "data": ({"data": 8}, nxp.fsdp("data", min_size=16), ("data",)),
  "data whole": ({"data": 8}, nxp.presets.data_parallel(), ("data",)),
  "data, fsdp": ({"data": 2, "fsdp": 4}, nxp.fsdp("fsdp", min_size=16), ("data", "fsdp")),
  "both": ({"data": 2, "fsdp": 4}, nxp.fsdp(("data", "fsdp"), min_size=16), ("data", "fsdp")),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_by_hand_equals_the_plain_one(layout, check):
  sizes, rules, axes = LAYOUTS[layout]
  plan = nxp.plan(lambda: Net(nnx.Rngs(0)), nxp.make_mesh(sizes), rules, optimizer=optax.adam(1e-2))
  batch = {"x": normal(16, 16), "y": jnp.asarray(RANDOM.integers(0, 3, 16))}

  def step(model, optimizer, batch):
    loss = lambda model: own_loss(nxp.parallel.gather_parameters(model, plan, axes), batch)
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return jax.lax.pmean(value, axes)

  by_hand = nnx.jit(nxp.parallel.map_shards(step, plan, check_vma=check))
  model, optimizer = placed(plan)
  other = Net(nnx.Rngs(0))
  plain = nnx.Optimizer(other, optax.adam(1e-2), wrt=nnx.Param)
  for _ in range(3):
    wanted, grads = nnx.value_and_grad(own_loss)(other, batch)
    plain.update(other, grads)
    close(by_hand(model, optimizer, batch), wanted)
  close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(other, nnx.Param)), 1e-4)
  nxp.check_layout(model, plan)
  assert int(optimizer.step[...]) == 3


def test_a_module_that_the_plan_is_not_for():
  plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
  with pytest.raises(SchemeError, match=r"not for this Net[\s\S]*not in both"):
    nxp.parallel.map_shards(lambda m: 0, plan)(Net(nnx.Rngs(0)))
  with pytest.raises(SchemeError, match="2 in_specs for 1 arguments"):
    nxp.parallel.map_shards(lambda m: 0, plan, in_specs=(None, None))(placed(plan))
  with pytest.raises(SchemeError, match="not split along 'data' by hand"):
    nxp.parallel.gather_parameters(placed(plan), plan, "data")


def scaled(x, scale):
  """Rows over their norm, times a scale, by Pallas."""

  def body(x_ref, scale_ref, y_ref):
    x = x_ref[...]
    y_ref[...] = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * scale_ref[...][None]

  shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(body, out_shape=shape, interpret=True)(x, scale)


def plain_scaled(x, scale):
  return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) * scale[None]


@jax.custom_vjp
def trained(x, scale):
  return scaled(x, scale)


trained.defvjp(lambda *x: (scaled(*x), x), lambda kept, g: jax.vjp(plain_scaled, *kept)[1](g))


@pytest.mark.parametrize("explicit", [False, True], ids=["Auto", "Explicit"])
def test_a_pallas_kernel_on_the_shards_that_logical_names_give(explicit):
  x, scale, weights = normal(16, 8), normal(8), normal(16, 8)
  rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="tensor")
  kernel = nxp.parallel.map_kernel(trained, [("batch", None), (None,)], ("batch", None))
  close(kernel(x, scale), plain_scaled(x, scale))  # without a mesh
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2, explicit=explicit)
  f = jax.jit(jax.value_and_grad(lambda x, scale: (kernel(x, scale) * weights).sum(), (0, 1)))
  wanted = jax.value_and_grad(lambda x, scale: (plain_scaled(x, scale) * weights).sum(), (0, 1))(x, scale)
  with nxp.use_rules(rules, mesh):
    close(f(x, scale), wanted)
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(("data", "fsdp"))))
    compiled = jax.jit(kernel).lower(placed, scale).compile()
  assert not collectives(compiled.as_text(), {"data": 2, "fsdp": 2, "tensor": 2})
  with nxp.use_rules(rules, mesh):
    with pytest.raises(ShardingError):
      nxp.parallel.map_kernel(trained, [("rows", None), (None,)], ("rows", None))(x, scale)
    with pytest.raises(SchemeError, match="has a dim 'embed', and no argument has"):
      nxp.parallel.map_kernel(trained, [("batch", None), (None,)], ("batch", "embed"))(x, scale)


def test_a_kernel_with_several_results_in_a_train_step():
  halves = lambda x: (jnp.tanh(x), x * 2)

  def losses(f):
    def loss(model, batch):
      a, b = f(model(batch))
      return (a * b).mean()

    model, optimizer = placed(plan)
    step, batch = nxp.train_step(loss), nxp.shard_batch(jnp.ones((16, 8)), plan)
    return [float(step(model, optimizer, batch)["loss"]) for _ in range(3)]

  mesh, rules = nxp.make_mesh(data=2, fsdp=4), nxp.fsdp(min_size=8)
  plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(0.1))
  names = ("batch", None)
  close(losses(nxp.parallel.map_kernel(halves, [names], [names, names])), losses(halves))
