"""A recipe small enough to run in a blink, as a file that a user could have written."""

from pathlib import Path

import pytest

TINY = """
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp


class Net(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(8, 16, rngs=rngs, kernel_metadata={"out_sharding": ("inputs", "hidden")})
    self.dropout = nnx.Dropout(0.25, rngs=rngs)
    self.down = nnx.Linear(16, 8, rngs=rngs, kernel_metadata={"out_sharding": ("hidden", "inputs")})

  def __call__(self, x):
    hidden = nxp.constrain(nnx.relu(self.up(x)), "batch", "hidden")
    return self.down(self.dropout(hidden))


def init():
  return Net(nnx.Rngs(0))


def optimizer():
  return optax.adamw(1e-2)


def loss(model, batch):
  error = jnp.square(model(batch["x"]) - batch["x"])
  return error.mean(), {"close": nxp.weighted((error < 0.1).astype(jnp.float32).sum(), error.size)}


def mesh():
  return {"data": 4, "tensor": 2}


def rules():
  return nxp.LogicalRules(batch="data", inputs=None, hidden="tensor")


def batches(start=0, *, split="train", last=10**9):
  if split == "held_out":
    start, last = 10**6, 10**6 + 32
  while start < last:
    rows = [np.random.default_rng(i).standard_normal(8) for i in range(start, start + 16)]
    yield {"x": np.array(rows, np.float32)}
    start += 16
"""


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
  path = tmp_path / "tiny.py"
  path.write_text(TINY)
  return path
