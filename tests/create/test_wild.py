"""Traits of modules in the wild: each handled, or refused with the attribute and the mend."""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import nnx_parallel as nxp
from create.models import arrays_of, assert_same_arrays


class Rotary(nnx.Module):  # A complex table assigned to an attribute without `nnx.data`
  def __init__(self, rngs: nnx.Rngs):
    angles = jnp.outer(jnp.arange(8.0), jnp.ones(8))
    self.table = jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    self.linear = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.linear(x * jnp.real(self.table))


class Unhashable(nnx.Module):
  """Static attributes that cannot be hashed, and functions that never compare equal."""

  def __init__(self, rngs: nnx.Rngs):
    self.config = {"widths": [8, 16]}
    self.activation = lambda x: jax.nn.relu(x)
    self.partial = functools.partial(jnp.sum, axis=0)
    self.linear = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.activation(self.linear(x))


class Metadata(nnx.Module):  # Metadata that holds streams, dtypes and None
  def __init__(self, rngs: nnx.Rngs):
    value = nnx.initializers.lecun_normal()(rngs.params(), (8, 16))
    self.kernel = nnx.Param(value, rngs=nnx.Rngs(3), dtype_hint=jnp.bfloat16, out_sharding=None)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x @ self.kernel[...]


class Optional(nnx.Module):  # Modules or None, integer state, statistics, and functions between layers
  def __init__(self, rngs: nnx.Rngs):
    self.layers = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), jax.nn.gelu, nnx.BatchNorm(16, rngs=rngs))
    self.adapter: nnx.Linear | None = None
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    self.buckets = nnx.Variable(jnp.arange(16, dtype=jnp.int32))

  def __call__(self, x: jax.Array) -> jax.Array:
    self.calls[...] = self.calls[...] + 1
    return self.layers(x) if self.adapter is None else self.adapter(self.layers(x))


class Tied(nnx.Module):  # One Variable in two places, and one submodule twice in a list
  def __init__(self, rngs: nnx.Rngs):
    self.inner = nnx.Linear(8, 8, rngs=rngs)
    self.outer = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
    self.outer.kernel = self.inner.kernel
    self.twice = nnx.List([self.inner, self.inner])

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.outer(self.twice[1](x))


class Caching(nnx.Module):  # Makes a cache in its forward pass
  def __init__(self, rngs: nnx.Rngs):
    self.linear = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    self.seen = nnx.Cache(x.mean(0, keepdims=True))
    return self.linear(x * self.seen[...].sum())


WILD: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
  cls.__name__.lower(): cls for cls in (Rotary, Unhashable, Metadata, Optional, Tied, Caching)
}
WILD["attention"] = lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
WILD["grouped convolution"] = lambda rngs: nnx.Conv(8, 8, (3,), feature_group_count=8, rngs=rngs)
WILD["spectral norm"] = lambda rngs: nnx.SpectralNorm(nnx.Linear(8, 16, rngs=rngs), rngs=rngs)


@pytest.mark.cases(9)
@pytest.mark.parametrize("compile", ["slices", "jit"])
@pytest.mark.parametrize("name", WILD)
def test_created_as_built_eagerly(name, compile):
  init = lambda: WILD[name](nnx.Rngs(0))
  mesh = nxp.make_mesh(data=4, tensor=2)
  plan = nxp.plan(init, mesh, nxp.fsdp("tensor", min_size=0), optimizer=optax.adam(1e-2))
  model, optimizer = nxp.create_sharded_model(plan, compile=compile)
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert_same_arrays(arrays_of(model), arrays_of(init()), atol=0.0 if compile == "slices" else 1e-6)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32))
  output = model(x[:, None] if name == "attention" else x)
  assert bool(jnp.isfinite(output).all())
  if name == "tied":
    assert model.outer.kernel is model.inner.kernel
    assert model.twice[0] is model.twice[1] is model.inner


class Listed(nnx.Module):  # Arrays in a plain list, which flax refuses when the module is built eagerly
  def __init__(self):
    self.tables = [jnp.ones((2, 2)), jnp.zeros(3)]


def test_a_list_of_arrays_names_the_attribute_and_the_mend():
  with pytest.raises(nxp.errors.PlanError) as caught:
    nxp.plan(lambda: nnx.Dict(block=Listed()), nxp.make_mesh(data=8))
  assert str(caught.value) == (
    "block.tables is a list that holds arrays, which flax takes for a static attribute.\n"
    "  Fix: self.tables = nnx.data(...), or nnx.List / nnx.Dict of nnx.Variable, in Listed."
  )


class Attributes(nnx.Module):  # Modules where flax does not look for any
  def __init__(self, kind: str):
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    self.blocks = {"list": [linear], "dict": {"first": linear}, "appended": []}[kind]
    if kind == "appended":
      self.blocks.append(linear)


@pytest.mark.parametrize("kind", ["list", "dict", "appended"])
def test_modules_in_a_static_attribute_are_an_error_with_the_mend(kind):
  what, fix = ("dict", "Dict({...})") if kind == "dict" else ("list", "List([...])")
  with pytest.raises(nxp.errors.PlanError) as caught:
    nxp.plan(lambda: Attributes(kind), nxp.make_mesh(data=8))
  text = str(caught.value)
  assert text.startswith(f"Attributes.blocks is a {what} that holds modules, Variables or arrays, and flax")
  assert text.endswith(f"Fix: self.blocks = nnx.{fix}, or nnx.data(...), in Attributes.")


class Pair(typing.NamedTuple):
  cos: typing.Any
  sin: typing.Any


@struct.dataclass
class Tables:
  sin: typing.Any
  cos: typing.Any


CONTAINERS: dict[str, Callable[[typing.Any, typing.Any], typing.Any]] = {
  "tuple": lambda cos, sin: (cos, sin), "dict": lambda cos, sin: {"sin": sin, "cos": cos},
  "nested": lambda cos, sin: {"pairs": [cos, (sin, 3)]}, "named tuple": Pair, "dataclass": Tables,
  "numpy": lambda cos, sin: (cos, sin), "beside a Variable": lambda cos, sin: (nnx.Param(cos), sin),
}  # fmt: skip


class Contained(nnx.Module):  # Arrays in a container that flax takes for data
  def __init__(self, container: str):
    self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    angles, made = np.arange(8, dtype=np.float32), np if container == "numpy" else jnp
    self.rope = nnx.data(CONTAINERS[container](made.cos(angles), made.sin(angles)))

  def __call__(self, x: jax.Array) -> jax.Array:
    cos, sin = (array for array in jax.tree.leaves(self.rope) if jnp.shape(array) == (8,))
    return self.linear(x * cos[None] + sin[None])


contained_loss = lambda model, batch: jnp.square(model(batch)).mean()


@pytest.mark.cases(4)
@pytest.mark.parametrize("container", CONTAINERS)
def test_arrays_in_a_container_are_planned_created_trained_saved_and_moved(container, tmp_path):
  init = lambda: Contained(container)

  def planned(**sizes: int) -> nxp.Plan:
    return nxp.plan(init, nxp.make_mesh(**sizes), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))

  plan = planned(data=2, fsdp=4)
  batch = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  alone = init()
  assert [*plan.of("model")] == [path for path, _ in nnx.to_flat_state(nnx.state(alone))]
  assert sum(leaf.name.startswith("rope") and leaf.bytes_per_device == 8 for leaf in plan.leaves) == 2
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert_same_arrays(arrays_of(model), arrays_of(alone))
  loss = nxp.train_step(contained_loss)(model, optimizer, nxp.shard_batch(batch, plan))["loss"]
  np.testing.assert_allclose(loss, contained_loss(alone, batch), rtol=1e-5)

  with nxp.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    restored, _ = checkpointer.restore(plan)
    live = checkpointer.restore(init(), optimizer="drop")
  moved, _ = nxp.reshard(restored, planned(fsdp=8), optimizer=optimizer)
  for other in (restored, live, moved):
    assert type(other.rope) is type(alone.rope)
    assert_same_arrays(arrays_of(other), arrays_of(model))
