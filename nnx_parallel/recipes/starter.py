"""A small job to start from: predicts a byte from the 8 bytes before it. `nnx-parallel new FILE` copies it.

Train it with `nnx-parallel train starter --mesh fsdp=8 --steps 200`.
"""

import itertools
from collections.abc import Iterator
from pydoc_data.topics import topics  # the text: the manual of Python, which comes with Python

import jax
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp

TEXT = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)


class Model(nnx.Module):
  """Logits (batch, 256) of the next byte, for bytes (batch, 8)."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(256, 64, rngs=rngs)
    self.up = nnx.Linear(8 * 64, 1024, rngs=rngs)
    self.down = nnx.Linear(1024, 256, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Predicts."""
    return self.down(nnx.gelu(self.up(self.embed(x).reshape(len(x), -1))))


def init() -> Model:
  """The model, not yet on any mesh."""
  return Model(nnx.Rngs(0))


def optimizer() -> optax.GradientTransformation:
  """Any optax transformation."""
  return optax.adamw(1e-3)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
  """The mean cross-entropy of a batch, in nats."""
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def mesh() -> dict[str, int]:
  """The default mesh; `--mesh` overrides it."""
  return {"fsdp": 8}


def rules() -> nxp.RuleSet:
  """FSDP: the axis `fsdp` shards the batch, the parameters and the optimizer state."""
  return nxp.presets.fsdp(min_size=2**14)


def batches(start: int = 0, *, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
  """Global batches of 256 examples: endless from example `start` of the run on, or 4 of the held-out text."""
  text, numbers = TEXT[:-50_000], itertools.count(start, 256)
  if split == "held_out":
    text, numbers = TEXT[-50_000:], iter(range(0, 4 * 256, 256))
  for number in numbers:
    first = np.random.default_rng(number).integers(0, len(text) - 9, 256)
    windows = text[first[:, None] + np.arange(9)].astype(np.int32)
    yield {"x": windows[:, :8], "y": windows[:, 8]}
