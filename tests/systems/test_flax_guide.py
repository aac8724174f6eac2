"""The models of Flax's guide "Scale up on multiple devices": plan, create, step, save, restore each of them.

Source: https://flax.readthedocs.io/en/latest/guides/flax_gspmd.html
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp

DEPTH, DRAW = 16, nnx.initializers.lecun_normal()
TX = optax.adam(1e-2)


class Auto(nnx.Module):
  """Section "Auto mode": names of mesh axes in metadata, a constraint in the forward pass."""

  def __init__(self, rngs):
    metadata = {"out_sharding": (None, "model")}
    self.dot1 = nnx.Linear(DEPTH, DEPTH, use_bias=False, kernel_metadata=metadata, rngs=rngs)
    self.w2 = nnx.Param(DRAW(rngs.params(), (DEPTH, DEPTH)), out_sharding=("model", None))
    self.b2 = nnx.Param(jnp.zeros((DEPTH,)), out_sharding=(None,))

  def __call__(self, x):
    y = nxp.constrain(jax.nn.relu(self.dot1(x)), "data", "model")
    return y @ self.w2[...] + self.b2[...][None]


class Constrained(Auto):  # The same with JAX's own constraint, which Explicit axes refuse
  def __call__(self, x):
    y = jax.lax.with_sharding_constraint(jax.nn.relu(self.dot1(x)), P("data", "model"))
    return y @ self.w2[...] + self.b2[...][None]


class Explicit(nnx.Module):
  """Section "Explicit mode": shardings in the types, in the constructor and in the forward pass."""

  def __init__(self, rngs):
    draw = partial(DRAW, out_sharding=P(None, "model"))
    self.dot1 = nnx.Linear(DEPTH, DEPTH, use_bias=False, kernel_init=draw, rngs=rngs)
    self.w2 = nnx.Param(DRAW(rngs.params(), (DEPTH, DEPTH), out_sharding=P("model", None)))
    self.b2 = nnx.Param(jnp.zeros((DEPTH,), out_sharding=P(None)))

  def __call__(self, x):
    y = jax.nn.relu(self.dot1(x))
    return jnp.dot(y, self.w2[...], out_sharding=P("data", None)) + self.b2[...][None]


class Logical(nnx.Module):
  """Section "Logical axes": names that rules map to mesh axes, the rules beside the names."""

  RULES = (("embed", None), ("hidden", "model"), ("batch", "data"))

  def __init__(self, rngs):
    metadata = {"out_sharding": ("embed", "hidden"), "sharding_rules": self.RULES}
    self.dot1 = nnx.Linear(DEPTH, DEPTH, use_bias=False, kernel_metadata=metadata, rngs=rngs)
    value = DRAW(rngs.params(), (DEPTH, DEPTH))
    self.w2 = nnx.Param(value, out_sharding=("hidden", "embed"), sharding_rules=self.RULES)
    self.b2 = nnx.Param(jnp.zeros((DEPTH,)), out_sharding=("embed",), sharding_rules=self.RULES)

  def __call__(self, x):
    return jax.nn.relu(self.dot1(x)) @ self.w2[...] + self.b2[...][None]


class ForOptimizer(nnx.Module):  # Section "Shard the optimizer": its state has a layout of its own
  def __init__(self, rngs):
    value = DRAW(rngs.params(), (DEPTH, DEPTH))
    self.w2 = nnx.Param(value, out_sharding=("model", None), optimizer_sharding=("model", "data"))

  def __call__(self, x):
    return x @ self.w2[...]


class Stacked(nnx.Module):
  """Section "Logical axes", its second model: layers made by `vmap` and run by `scan`."""

  def __init__(self, rngs):
    metadata = {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=metadata)
    def stack(rngs):
      return Auto(rngs)

    self.layers, self.metadata = stack(rngs), metadata

  def __call__(self, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=self.metadata)
    def run(layer, x):
      return layer(x)

    return run(self.layers, x)


MODELS = {kind.__name__: kind for kind in (Auto, Constrained, Explicit, Logical, ForOptimizer, Stacked)}
EITHER = {"Constrained": [False], "Explicit": [True]}
CASES = [(name, explicit) for name in MODELS for explicit in EITHER.get(name, [False, True])]


def mesh(explicit, data=2, model=4):
  devices = jax.devices()[: data * model]
  return nxp.make_mesh(data=data, model=model, explicit=explicit, devices=devices)


loss = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()


@nnx.jit
def flax_step(model, optimizer, batch):
  value, grads = nnx.value_and_grad(loss)(model, batch)
  optimizer.update(model, grads)
  return value


def batch():
  rng = np.random.default_rng(0)
  return {name: rng.normal(size=(8, DEPTH)).astype(np.float32) for name in "xy"}


def by_flax(name, steps=3):
  """The losses of Flax alone, on one device."""
  kind = MODELS[name]
  with jax.set_mesh(mesh(True, 1, 1)) if name == "Explicit" else jax.set_mesh(mesh(False, 1, 1)):
    model = kind(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return [float(flax_step(model, optimizer, batch())) for _ in range(steps)]


def planned(name, on, **options):
  return nxp.plan(lambda: MODELS[name](nnx.Rngs(0)), on, optimizer=TX, **options)


@pytest.mark.cases(4)
@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize(("name", "explicit"), CASES)
def test_a_model_of_the_guide_is_trained_and_restored_as_by_flax_alone(name, explicit, active, tmp_path):
  on, wanted = mesh(explicit), by_flax(name)
  with jax.set_mesh(on if active else None):
    plan = planned(name, on)
    model, optimizer = nxp.create_sharded_model(plan)
    step = nxp.train_step(loss)
    losses = [float(step(model, optimizer, batch())["loss"]) for _ in range(2)]
    with nxp.Checkpointer(tmp_path) as checkpointer:
      checkpointer.save(2, model, optimizer, plan=plan)
  with nxp.Checkpointer(tmp_path) as checkpointer:
    restored = checkpointer.restore(planned(name, mesh(explicit, data=4, model=2)))
  losses.append(float(step(*restored, batch())["loss"]))
  assert losses == pytest.approx(wanted, rel=1e-5)
  w2 = plan["layers.w2"] if name == "Stacked" else plan["w2"]
  assert w2.spec == P(*[None] * (name == "Stacked"), "model", None)
  moments = plan[f"optimizer/opt_state.0.mu.{w2.name}"]
  assert moments.spec == (P("model", "data") if name == "ForOptimizer" else w2.spec)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "explicit"), CASES)
def test_the_step_of_the_guide_runs_on_the_created_model(name, explicit):
  on, wanted = mesh(explicit), by_flax(name)
  plan = planned(name, on)
  model, optimizer = nxp.create_sharded_model(plan)
  with jax.set_mesh(on):
    run = flax_step if name in EITHER else nnx.jit(nxp.parallel.auto_axes(flax_step.__wrapped__))
    losses = [float(run(model, optimizer, nxp.shard_batch(batch(), plan))) for _ in range(3)]
  assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "explicit"), CASES)
def test_what_the_guide_saves_with_orbax_is_restored_by_a_plan(name, explicit, tmp_path):
  on = mesh(explicit)
  with jax.set_mesh(on):
    live = MODELS[name](nnx.Rngs(7))
    with ocp.StandardCheckpointer() as saver:
      saver.save(tmp_path / "flax", nnx.to_pure_dict(nnx.state(live)))
  plan = nxp.plan(lambda: MODELS[name](nnx.Rngs(0)), mesh(explicit, data=4, model=2))
  found = nxp.interop.restore_orbax(tmp_path / "flax", plan)
  for a, b in zip(jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(live)), strict=True):
    np.testing.assert_array_equal(a, b)
