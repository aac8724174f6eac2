"""Gradients of grouped convolutions equal one device's, which XLA alone does not give."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed

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


class Net(nnx.Module):
  """A grouped and a depthwise convolution between plain layers."""

  def __init__(self, rngs: nnx.Rngs):
    def conv(groups: int) -> nnx.Conv:
      return nnx.Conv(
        8,
        8,
        (3, 3),
        feature_group_count=groups,
        kernel_metadata={"out_sharding": CHANNELS},
        bias_metadata={"out_sharding": ("conv",)},
        rngs=rngs,
      )

    self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
    self.grouped, self.depthwise = conv(2), conv(8)
    self.head = nnx.Linear(8, 4, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = nnx.gelu(self.stem(x))
    return self.head(self.body(x).mean((1, 2)))

  def body(self, x: jax.Array) -> jax.Array:
    return self.depthwise(nnx.gelu(self.grouped(x)))


def loss_fn(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
  return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(examples: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
    "x": rng.normal(size=(examples, 6, 6, 3)).astype("float32"),
    "y": rng.normal(size=(examples, 4)).astype("float32"),
  }


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
