"""Gradients of grouped convolutions equal one device's, which XLA alone does not give."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.errors import TrainError
from nnx_parallel.train.mend import mend, with_correct_convolutions
from training import other_notes, placed

CHANNELS = ("kh", "kw", "in", "conv")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
  "dp": ({"data": 8}, {"batch": "data"}),
  "batch on one of two axes": ({"data": 2, "model": 4}, {"batch": "data"}),
  "batch on both": ({"data": 2, "model": 4}, {"batch": ("data", "model")}),
  "no axis splits the batch": ({"data": 2, "model": 4}, {"batch": None}),
  "kernel on the other axis": ({"data": 2, "model": 4}, {"batch": "data", "conv": "model"}),
  "kernel on the batch axis": ({"data": 2, "model": 4}, {"batch": "data", "conv": "data"}),
  "three axes": ({"data": 2, "fsdp": 2, "tensor": 2}, {"batch": ("data", "fsdp"), "conv": "tensor"}),
}


class Net(nnx.Module):  # A grouped and a depthwise convolution between plain layers
  def __init__(self, rngs: nnx.Rngs):
    def conv(groups: int) -> nnx.Conv:
      names = {"kernel_metadata": named(*CHANNELS), "bias_metadata": named("conv")}
      return nnx.Conv(8, 8, (3, 3), feature_group_count=groups, rngs=rngs, **names)

    self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
    self.grouped, self.depthwise = conv(2), conv(8)
    self.head = nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = nnx.gelu(self.stem(x))
    return self.head(self.body(x).mean((1, 2)))

  def body(self, x: jax.Array) -> jax.Array:
    return self.depthwise(nnx.gelu(self.grouped(x)))


class RematNet(Net):  # The same, whose convolutions are a layer that can be recomputed
  body = nnx.remat(Net.body)


loss_fn = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray]:
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def batch_of(examples: int) -> dict[str, np.ndarray]:
  return dict(zip("xy", drawn((examples, 6, 6, 3), (examples, 4)), strict=True))


def gradients(
  mesh: Any, rules: dict[str, Any], examples: int = 16, net: type[Net] = Net, **options: Any
) -> tuple[dict[Any, np.ndarray], Any]:
  """What one step of SGD at rate 1 subtracts: the gradients that the optimizer saw."""
  names = {"kh": None, "kw": None, "in": None, "conv": None} | rules
  plan = nxp.plan(lambda: net(nnx.Rngs(0)), mesh, nxp.LogicalRules(**names), optimizer=optax.sgd(1.0))
  model, optimizer = placed(plan)
  before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  step = nxp.train_step(loss_fn, **options)
  step(model, optimizer, nxp.shard_batch(batch_of(examples), plan))
  after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  flat = jax.tree_util.tree_leaves_with_path(jax.tree.map(np.subtract, before, after))
  return {jax.tree_util.keystr(path): leaf for path, leaf in flat}, step


@functools.cache
def single_device(examples: int = 16) -> dict[Any, np.ndarray]:
  model = nxp.unsharded(lambda: Net(nnx.Rngs(0)))
  grads = nnx.jit(nnx.grad(loss_fn))(model, batch_of(examples))
  flat = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads))
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def check_equal(found: dict[Any, np.ndarray], expected: dict[Any, np.ndarray]) -> None:
  assert found.keys() == expected.keys()
  for path, want in expected.items():
    norm = np.linalg.norm(want)
    assert norm > 1e-4, f"{path} has no gradient to compare"
    assert np.linalg.norm(found[path]) == pytest.approx(norm, rel=1e-3), path
    np.testing.assert_allclose(found[path], want, atol=1e-5, rtol=1e-3, err_msg=path)


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_norms_equal_one_device(layout: str) -> None:
  sizes, rules = LAYOUTS[layout]
  found, step = gradients(nxp.make_mesh(**sizes), rules)
  check_equal(found, single_device())
  assert len(step.compiles) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("net", [RematNet, Net])
def test_gradients_inside_scans_and_remat(net: type[nnx.Module]) -> None:
  found, _ = gradients(nxp.make_mesh(data=2, model=4), {"batch": "data"}, net=net, microbatches=2)
  check_equal(found, single_device())


def convolve(kernel: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
  numbers = ("NWC", "WIO", "NWC")
  return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers, **options)


DEPTHWISE = drawn((3, 1, 8), (8, 6, 8))
depthwise_loss = lambda kernel, x: (jnp.sin(convolve(kernel, x, feature_group_count=8)) ** 2).mean()


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_batch_groups_written_by_the_user() -> None:
  mesh = nxp.make_mesh(data=2, model=4)
  loss = lambda kernel, x: (jnp.sin(convolve(kernel, x, batch_group_count=2)) ** 2).mean()
  kernel, x = drawn((3, 8, 4), (8, 6, 8))
  expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(kernel, x)
  placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
  found = jax.jit(with_correct_convolutions(jax.value_and_grad(loss, (0, 1)), mesh))(kernel, placed)
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-4)


TABLE = jnp.linspace(0.5, 1.5, 4)


@jax.jit
def scaled(x: jax.Array) -> jax.Array:
  return jnp.sin(x * TABLE[None, None])


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("inside", ["loop", "branch"])
def test_a_grouped_convolution_in_a_program_has_its_gradient(inside: str, groups: int) -> None:
  mesh = nxp.make_mesh(data=2, model=4)

  def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
    step = lambda x: jax.checkpoint(scaled)(convolve(kernel, x, feature_group_count=groups))
    if inside == "branch":
      return jax.lax.cond(x[0, 0, 0] < 100, step, jnp.sin, x).sum()
    return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=2)[0].sum()

  kernel, x = drawn((3, 4 // groups, 4), (8, 6, 4))
  placed = jax.device_put(x, NamedSharding(mesh, jax.P("data")))
  found = jax.jit(with_correct_convolutions(jax.grad(loss), mesh))(kernel, placed)
  np.testing.assert_allclose(found, jax.grad(loss)(kernel, x), rtol=1e-4, atol=1e-5)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
@pytest.mark.parametrize("axes", [{"data"}, {"data", "model"}])
def test_a_shard_map_that_leaves_axes_to_xla_is_refused(axes: set[str]) -> None:
  mesh = nxp.make_mesh(data=2, model=4)

  def of_shard(kernel: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.psum(jax.grad(depthwise_loss)(kernel, x), "data")

  options = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
  mapped = jax.shard_map(of_shard, mesh=mesh, axis_names=axes, check_vma=False, **options)
  run = jax.jit(with_correct_convolutions(mapped, mesh))
  if axes == {*mesh.axis_names}:
    assert np.isfinite(run(*DEPTHWISE)).all()
    return
  with pytest.raises(TrainError, match=r"shard_map over \['data'\], which leaves model to XLA"):
    run(*DEPTHWISE)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_convolution_in_a_program_that_cannot_be_traced_anew_is_refused() -> None:
  mesh = nxp.make_mesh(data=2, model=4)
  of_reference = jax.jit(lambda reference, x: jax.grad(depthwise_loss)(reference[...], x))
  run = with_correct_convolutions(lambda kernel, x: of_reference(jax.new_ref(kernel), x), mesh)
  with pytest.raises(TrainError, match="takes something else than arrays"):
    jax.jit(run)(*DEPTHWISE)


def test_the_plan_warns_those_who_compile_their_own_step() -> None:
  def notes(**axes: int) -> tuple[str, ...]:
    rules = nxp.LogicalRules(batch="data", kh=None, kw=None, conv=None, **{"in": None})
    return other_notes(nxp.plan(lambda: Net(nnx.Rngs(0)), nxp.make_mesh(**axes), rules))

  assert notes(data=2, model=4) == (
    "depthwise, grouped: grouped convolutions, whose kernel gradients XLA makes up to 4 times too large on"
    " this mesh in a step of your own; nxp.train_step computes them right",
  )
  assert notes(data=8, model=1) == ()


@pytest.mark.parametrize(("explicit", "picks"), [(False, True), (False, False), (True, True)])
def test_elements_of_rows_are_read_by_a_comparison_where_they_are_asked_to_be(explicit, picks):
  mesh = nxp.make_mesh(data=2, model=4, explicit=explicit)
  change = functools.partial(mend, picks=True) if picks else with_correct_convolutions
  read = change(lambda x, i: jnp.take_along_axis(x, i, -1), mesh)
  with jax.set_mesh(mesh):
    operations = str(jax.make_jaxpr(read)(jnp.ones((4, 5)), jnp.ones((4, 1), int)))
  assert ("gather[" not in operations) == (picks and not explicit)
