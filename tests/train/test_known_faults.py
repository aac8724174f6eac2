"""Canaries: what XLA computes wrong. One that fails says that XLA is mended, and that an avoidance can go."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from nnx_parallel.layout.known_faults import KNOWN_FAULTS
from nnx_parallel.testing import assert_same_training
from train.models import RULES, Normed
from training import placed

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
  return RNG.normal(size=shape).astype(np.float32)


def off(run: Any, mesh: Any, *placed: tuple[np.ndarray, PartitionSpec], out: PartitionSpec) -> float:
  """The relative difference between a function on a mesh and on one device."""
  arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in placed]
  split = jax.jit(run, out_shardings=NamedSharding(mesh, out))(*arrays)
  whole = jax.jit(run)(*[x for x, _ in placed])
  return float(jnp.linalg.norm(np.asarray(split) - whole) / jnp.linalg.norm(whole))


def convolution(kernel: Any, x: Any, groups: int = 1) -> Any:
  numbers = ("NWC", "WIO", "NWC")
  y = jax.lax.conv_general_dilated(
    x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
  )
  return jnp.sin(y).sum()


def grouped_convolution() -> float:
  run = lambda kernel, x: jax.grad(convolution)(kernel, x, 4)
  mesh = nxp.make_mesh(data=2, model=4)
  return off(run, mesh, (normal(3, 1, 4), jax.P()), (normal(8, 6, 4), jax.P("data")), out=jax.P())


def split_window() -> float:
  mesh = nxp.make_mesh(fsdp=2, tensor=2, other=2)
  given = (normal(3, 8, 8), jax.P()), (normal(8, 8, 8), jax.P("fsdp", "tensor"))
  return off(jax.grad(convolution), mesh, *given, out=jax.P())


def swapped_examples() -> float:
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  batch = ("data", "fsdp")
  given = (normal(16, 32), jax.P(batch, "tensor")), (normal(32, 32), jax.P("fsdp", "tensor"))
  return off(lambda dy, w: dy @ w.T, mesh, *given, out=jax.P(batch, "tensor"))


def crossed_gradient() -> float:
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  given = (normal(16, 32), jax.P("fsdp", "data")), (normal(16, 32), jax.P("fsdp", ("tensor", "data")))
  return off(lambda x, dy: x.T @ dy, mesh, *given, out=jax.P("fsdp", "tensor"))


def looked_up_rows() -> float:
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  batch = ("tensor", "fsdp")
  given = (normal(32, 16), jax.P("data")), (np.arange(8) * 3 % 32, jax.P(batch))
  return off(lambda table, tokens: table[tokens], mesh, *given, out=jax.P(batch, "data"))


def split_kernel() -> float:
  def run(kernel: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(
      x, kernel, (2,), ((2, 2),), lhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
    )
    return jnp.sin(y).sum()

  mesh = nxp.make_mesh(data=2, tensor=4)
  placed = (normal(4, 16, 16), jax.P("tensor")), (normal(8, 12, 16), jax.P("data"))
  return off(jax.grad(run), mesh, *placed, out=jax.P("tensor"))


CANARIES = {
  "grouped convolution": grouped_convolution, "split window": split_window,
  "swapped examples": swapped_examples, "crossed gradient": crossed_gradient,
  "looked-up rows": looked_up_rows, "split kernel": split_kernel,
}  # fmt: skip


class Convolved(nnx.Module):  # A convolution over positions that a table over the tensor axis splits
  def __init__(self, rngs: nnx.Rngs):
    self.positions = nnx.Param(jax.random.normal(rngs.params(), (8, 16)), out_sharding=("mlp", None))
    self.kernel = nnx.Conv(16, 16, (3,), rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.kernel(x + self.positions[None])


class Adapted(nnx.Module):  # A low-rank adapter beside its kernel, the two over different axes
  def __init__(self, rngs: nnx.Rngs):
    drawn = lambda *names: nnx.Param(jax.random.normal(rngs.params(), (8, 8)), out_sharding=names)
    self.kernel, self.down, self.up = drawn(None, "mlp"), drawn(None, None), drawn("mlp", "embed")

  def __call__(self, x: jax.Array) -> jax.Array:
    return x @ self.kernel + x @ self.down @ self.up


class Mapped(Normed):  # A shard_map over the tensor axis alone: the batch's axes are left to XLA
  def __call__(self, x: jax.Array) -> jax.Array:
    spec, mesh = jax.P(None, "tensor"), jax.sharding.get_abstract_mesh()
    sine: Any = jnp.sin
    if "tensor" in mesh.shape:  # not on one device
      sine = jax.shard_map(sine, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"tensor"})
    for norm, layer in zip(self.norms, self.layers, strict=True):
      x = x + sine(layer(norm(x)))
    return x


TABLE = jnp.arange(16.0)


@jax.jit
def turned(x: jax.Array) -> jax.Array:
  return jnp.sin(x * TABLE[None, None])


class Odd(Normed):
  """The same in forms of program that are not traced anew, or are told apart: constants, branches, loops."""

  def __call__(self, x: jax.Array) -> jax.Array:
    @nnx.remat
    def first(module: Any, x: jax.Array) -> jax.Array:
      return module.layers[0](turned(module.norms[0](x)))

    y = x + jnp.sin(first(self, x))
    y = jax.lax.cond(y.sum() > -1e9, lambda y: self.layers[1](self.norms[1](y)), jnp.zeros_like, y)
    y = jax.lax.fori_loop(0, 2, lambda _, y: y + jnp.sin(self.layers[0](y)), y)
    y, scale = jax.lax.with_sharding_constraint((y, jnp.float32(1)), jax.P())
    return y * scale


squares = lambda model, x: (jnp.sin(model(x)) ** 2).mean()


def on_three_axes(make: Any, rules: Any = RULES) -> nxp.Plan:
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  return nxp.plan(lambda: make(nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(0.1))


@pytest.mark.parametrize("name", KNOWN_FAULTS)
def test_xla_still_computes_it_wrong(name: str) -> None:
  assert CANARIES[name]() > 0.1, f"{name} is mended in jax {jax.__version__}: see layout/known_faults.py"


@pytest.mark.cases(4)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=["whole", "microbatches"])
@pytest.mark.parametrize("make", [Normed, Convolved, Odd, Mapped])
def test_a_step_avoids_it(make: Any, options: dict[str, Any]) -> None:
  shape = (16, 16) if make is Mapped else (16, 8, 16)
  assert_same_training(squares, {"gathered": on_three_axes(make)}, [normal(*shape)] * 2, **options)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_an_evaluation_avoids_it() -> None:
  """A low-rank adapter over other axes than its kernel: under plain jax the loss itself is wrong."""
  plan, x = on_three_axes(Adapted), normal(8, 8)
  model, _ = placed(plan)
  batch, right = nxp.shard_batch(x, plan), squares(nxp.unsharded(lambda: Adapted(nnx.Rngs(0))), x)
  assert abs(nnx.jit(squares)(model, batch) - right) > 0.001 * right, "XLA is mended"
  np.testing.assert_allclose(nxp.eval_step(squares)(model, batch)["loss"], right, rtol=1e-5)


class Upsampled(nnx.Module):
  """A transposed convolution with taps over the tensor axis: plain jit gets it wrong, or stops."""

  def __init__(self, rngs: nnx.Rngs, taps: int = 4, width: int = 15):
    names = {"out_sharding": ("taps", None, None)}
    self.up = nnx.ConvTranspose(width, width, (taps,), strides=(2,), kernel_metadata=names, rngs=rngs)


def upsampled(rules: Any, taps: int = 4) -> nxp.Plan:
  mesh = nxp.make_mesh(data=2, tensor=4)
  return nxp.plan(lambda: Upsampled(nnx.Rngs(0), taps), mesh, rules, optimizer=optax.sgd(0.1))


@pytest.mark.parametrize("taps", [4, 8])
def test_a_plan_that_splits_the_taps_of_a_dilated_kernel_is_an_error(taps: int) -> None:
  with pytest.raises(nxp.errors.PlanError, match=r"up.kernel: .*sharded over its spatial dims") as caught:
    upsampled(nxp.LogicalRules(batch="data", taps="tensor"), taps)
  assert "Fix: shard its channels: a rule of None for the names of the spatial dims" in str(caught.value)


class Images(nnx.Module):  # A convolution, and one of each group of channels, over positions
  def __init__(self, rngs: nnx.Rngs, groups: int = 1):
    self.conv = nnx.Conv(8, 8, (3,), feature_group_count=groups, rngs=rngs)


@pytest.mark.parametrize("rules", [
  nxp.LogicalRules(batch="data", seq="tensor"),
  [nxp.LogicalRules(batch="data", rows="tensor"), nxp.InputRules(map_3d=("batch", "rows", None))],
], ids=["seq", "inputs"])  # fmt: skip
def test_a_plan_that_splits_the_windows_of_a_convolution_beside_an_idle_axis_is_an_error(rules: Any) -> None:
  def plan(groups: int = 1, **sizes: int) -> nxp.Plan:
    return nxp.plan(lambda: Images(nnx.Rngs(0), groups), nxp.make_mesh(**sizes), rules)

  text = r"(?s)conv: XLA makes the kernel gradient .* 2 times too.*tensor shards positions, and other neither"
  text += r" them nor the examples.*Fix: let other shard the examples too: .*\(batch=\('data', 'other'\)\)"
  with pytest.raises(nxp.errors.PlanError, match=text):
    plan(data=2, tensor=2, other=2)
  plan(data=2, tensor=4)
  plan(8, data=2, tensor=2, other=2)  # by hand in a step


def test_fsdp_leaves_the_taps_of_a_dilated_kernel_whole() -> None:
  plan = nxp.plan(
    lambda: nnx.ConvTranspose(3, 4, (8, 8), strides=(2, 2), rngs=nnx.Rngs(0)),
    nxp.make_mesh(fsdp=4, data=2),
    nxp.fsdp(min_size=0),
  )
  assert plan["kernel"].spec == jax.P(None, None, None, "fsdp")


def test_a_plan_says_what_a_step_of_ones_own_needs() -> None:
  plan = on_three_axes(Normed)
  (note,) = plan.notes
  assert "can compute wrong gradients on this mesh (fsdp shards parameters and examples, tensor no" in note
  assert "differentiate nxp.parallel.gather_on_read(loss, model), as nxp.train_step does by itself" in note
  layer = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  idle = nxp.plan(layer, nxp.make_mesh(data=2, fsdp=2, tensor=2), nxp.fsdp(min_size=0))
  assert idle.notes[0] == note

  def tied() -> nnx.Module:
    embed = nnx.Embed(32, 16, rngs=nnx.Rngs(0))
    return nnx.Dict(a=nnx.Dict(kernel=embed.embedding), embed=embed)  # the plan names it by the first path

  table = nxp.PathRules({"(.*kernel|.*embedding)": ("data", None)})
  for make in (lambda: nnx.Embed(32, 16, rngs=nnx.Rngs(0)), tied):
    batch = nxp.LogicalRules(batch=("tensor", "fsdp"))
    rows = nxp.plan(make, nxp.make_mesh(data=2, fsdp=2, tensor=2), [batch, table])
    assert "data shards the rows of tables, several axes shard the examples" in rows.notes[0]
  for axes in ({"data": 2, "fsdp": 4}, {"fsdp": 8}, {"data": 2, "tensor": 4}):
    assert not nxp.plan(layer, nxp.make_mesh(**axes), nxp.fsdp([*axes][-1], min_size=0)).notes


class LookedUpTwice(nnx.Module):  # Two tables over several axes of the batch, and a shard_map between
  def __init__(self, rngs: nnx.Rngs):
    def drawn(rows: int, columns: Any) -> nnx.Param[jax.Array]:
      return nnx.Param(jax.random.normal(rngs.params(), (rows, 16)), out_sharding=(None, columns))

    self.words, self.places = drawn(32, ("data", "tensor")), drawn(8, "tensor")

  def __call__(self, x: jax.Array) -> jax.Array:
    found, mesh = self.words[x], jax.sharding.get_abstract_mesh()
    if "data" in mesh.shape:  # not on one device
      found = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))(found)
    else:
      found = jnp.sin(found)
    return found + self.places[x % 8]


@pytest.mark.slow
def test_tables_over_several_axes_of_the_batch_are_right() -> None:
  rules = nxp.LogicalRules(batch=("data", "tensor"))
  plan = nxp.plan(
    lambda: LookedUpTwice(nnx.Rngs(0)), nxp.make_mesh(data=4, tensor=2), rules, optimizer=optax.sgd(0.1)
  )
  x = np.arange(32, dtype=np.int32).reshape(8, 4)
  assert_same_training(squares, {"gathered": plan}, [x, x])
  model, optimizer = placed(plan)
  step = nxp.train_step(squares)
  assert step.check_gradients(model, optimizer, nxp.shard_batch(x, plan))
  assert float(nxp.eval_step(squares)(model, nxp.shard_batch(x, plan))["loss"]) > 0


class Tied(nnx.Module):
  """A table, a product whose rows are over the axis of the table's rows, and the table as the head."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(32, 16, rngs=rngs)
    self.layer = nnx.Linear(16, 16, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    found = 4 * self.embed(x)
    return self.embed.attend(found + jnp.tanh(self.layer(found)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [*itertools.permutations(("data", "fsdp", "tensor"), 2)], ids="+".join)
@pytest.mark.parametrize("split", ["rows", "rows and examples", "columns too"])
def test_a_look_up_beside_a_product_over_the_axis_of_its_rows_is_right(batch: Any, split: str) -> None:
  (rows,), (first, last) = {"data", "fsdp", "tensor"} - {*batch}, batch
  specs = {"rows": (rows, None), "rows and examples": ((first, rows), last), "columns too": (rows, last)}
  tables = nxp.PathRules([(r".*(embedding|kernel)", specs[split])])
  plan = on_three_axes(Tied, [nxp.LogicalRules(batch=batch), tables])
  x = np.arange(8, dtype=np.int32) * 5 % 32
  assert_same_training(squares, {"looked up": plan}, [x, x])
  model, _ = placed(plan)
  found = nxp.eval_step(squares)(model, nxp.shard_batch(x, plan))["loss"]
  np.testing.assert_allclose(found, squares(nxp.unsharded(lambda: Tied(nnx.Rngs(0))), x), rtol=1e-5)
