"""Layouts that a constructor states where it makes its arrays, on meshes with Explicit axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp

WHERE = P(None, "model")


def mesh(explicit=True):
  return nxp.make_mesh(data=2, model=4, explicit=explicit)


def draw(**options):
  return jax.random.normal(jax.random.key(0), (8, 16), **options)


def looped(body):
  return jax.lax.fori_loop(0, 3, lambda _, x: body(x), draw(out_sharding=WHERE))


constrained = lambda: jax.lax.with_sharding_constraint(draw(), WHERE) + 1
of_shards = lambda: jnp.full((8, 4), 1.0 + jax.lax.axis_index("model").astype(float))


@jax.custom_jvp
def doubled(x):
  return 2 * x


doubled.defjvp(lambda x, t: (doubled(*x), 2 * t[0]))
# The operations that state a sharding, or that pass one on, each with the same numbers without shardings.
MADE = {
  "zeros": lambda: jnp.zeros((8, 16), out_sharding=WHERE),
  "full": lambda: jnp.full((8, 16), 3.0, out_sharding=WHERE),
  "arange": lambda: jnp.arange(16.0, out_sharding=P("model")),
  "eye": lambda: jax.sharding.reshard(jnp.eye(16), WHERE),
  "random": lambda: draw(out_sharding=WHERE),
  "uniform": lambda: jax.random.uniform(jax.random.key(1), (8, 16), out_sharding=WHERE),
  "initializer": lambda: nnx.initializers.lecun_normal()(jax.random.key(0), (8, 16), out_sharding=WHERE),
  "orthogonal, then reshard": lambda: jax.sharding.reshard(
    nnx.initializers.orthogonal()(jax.random.key(0), (8, 16)), WHERE
  ),
  "einsum": lambda: jnp.einsum("ij,jk->ik", draw().T, draw(), out_sharding=P("model", "data")),
  "dot": lambda: jnp.dot(draw().T, draw(), out_sharding=P("data", "model")),
  "reshape": lambda: jnp.reshape(draw(), (16, 8), out_sharding=P("data", "model")),
  "device_put": lambda: jax.device_put(draw(), NamedSharding(mesh(), WHERE)),
  "auto_axes": lambda: jax.sharding.auto_axes(lambda: draw() + 1, out_sharding=WHERE)(),
  "constraint": lambda: jax.sharding.auto_axes(constrained, out_sharding=WHERE)(),
  "shard_map": lambda: jax.shard_map(of_shards, mesh=mesh(), in_specs=(), out_specs=WHERE)(),
  "both axes of a dim": lambda: jnp.ones((8, 16), out_sharding=P(("data", "model"), None)),
  "followed through operations": lambda: jnp.tanh(draw(out_sharding=WHERE) * 2).T,
  "jit": lambda: jax.jit(lambda: draw(out_sharding=WHERE) + 1)(),
  "checkpoint": lambda: jax.checkpoint(jnp.sin)(draw(out_sharding=WHERE)),
  "custom rule": lambda: doubled(draw(out_sharding=WHERE)),
  "cond": lambda: jax.lax.cond(True, jnp.sin, jnp.cos, draw(out_sharding=WHERE)),
  "loop": lambda: looped(jnp.sin),
  "while": lambda: jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x + 1, draw(out_sharding=WHERE)),
  "scan": lambda: jax.lax.scan(lambda c, _: (c * 0.5, c), draw(out_sharding=WHERE), length=3)[1],
  "vmap": lambda: jax.vmap(jnp.cumsum)(draw(out_sharding=P("model", None))),
}


class Holder(nnx.Module):
  def __init__(self, make):
    self.w = nnx.Param(make())


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", MADE)
def test_a_stated_sharding_is_the_layout_and_the_numbers_are_those_of_flax(name):
  init = functools.partial(Holder, MADE[name])
  with jax.set_mesh(mesh()):
    wanted = init().w.get_value()
  plan = nxp.plan(init, mesh(), optimizer=optax.adam(1e-3))
  assert plan["w"].spec == wanted.sharding.spec
  assert plan["optimizer/opt_state.0.mu.w"].spec == wanted.sharding.spec
  assert "stated by init" in str(plan)
  for compile in ("slices", "jit"):
    model, _ = nxp.create_sharded_model(plan, compile=compile)
    found = model.w.get_value()
    assert found.sharding == wanted.sharding
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


class Mixed(nnx.Module):  # Metadata, a stated sharding, a rule, and nothing
  def __init__(self, rngs):
    stated = functools.partial(nnx.initializers.lecun_normal(), out_sharding=P("model", None))
    named = {"out_sharding": ("data", None)}
    self.both = nnx.Linear(8, 8, use_bias=False, kernel_init=stated, kernel_metadata=named, rngs=rngs)
    self.stated = nnx.Linear(8, 8, use_bias=False, kernel_init=stated, rngs=rngs)
    self.ruled = nnx.Linear(8, 8, use_bias=False, rngs=rngs)


def test_metadata_comes_before_what_init_states_and_that_before_rules():
  rules = [nxp.PathRules([("stated.kernel|ruled.kernel", (None, "model"))])]
  plan = nxp.plan(lambda: Mixed(nnx.Rngs(0)), mesh(), rules)
  specs = {leaf.name: (leaf.spec, leaf.decision.source) for leaf in plan.leaves}
  assert specs["both.kernel"] == (P("data", None), "metadata")
  assert specs["stated.kernel"] == (P("model", None), "stated")
  assert specs["ruled.kernel"] == (P(None, "model"), "path rule")
  assert any("both.kernel" in note for note in plan.notes)


@pytest.mark.parametrize("name", ["zeros", "arange", "initializer", "einsum", "shard_map", "eye"])
def test_a_stated_sharding_needs_explicit_axes_and_the_error_says_so(name):
  init = functools.partial(Holder, MADE[name])
  with pytest.raises(nxp.errors.PlanError, match=r"explicit=True"):
    nxp.plan(init, mesh(explicit=False))
  if name != "shard_map":  # which brings its mesh
    with pytest.raises(nxp.errors.PlanError, match=r"states shardings.*(.|\n)*explicit=True"):
      nxp.unsharded(init)
