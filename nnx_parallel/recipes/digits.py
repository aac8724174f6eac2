"""A classifier of real handwritten digits: 1 797 images of 8 x 8 pixels, from scikit-learn.

    nnx-parallel train digits --mesh data=8 --steps 300

The model of the UvA data-parallel notebooks: 512 SiLU units, dropout 0.1, bfloat16 compute with
float32 logits, AdamW 1e-3, batches of 128 in 4 microbatches. It needs scikit-learn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import RecipeError

BATCH = 128  # images in a global batch
TEST_IMAGES = 3 * BATCH
SEED = 0

Batch = dict[str, np.ndarray]


class Classifier(nnx.Module):
  """float32 logits (batch, 10) for pixels (batch, 64)."""

  def __init__(self, rngs: nnx.Rngs, hidden: int = 512):
    self.input = nnx.Linear(
      64,
      hidden,
      dtype=jnp.bfloat16,
      rngs=rngs,
      kernel_metadata={"out_sharding": ("pixels", "hidden")},
      bias_metadata={"out_sharding": ("hidden",)},
    )
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.output = nnx.Linear(
      hidden,
      10,
      dtype=jnp.bfloat16,
      rngs=rngs,
      kernel_metadata={"out_sharding": ("hidden", "digit")},
      bias_metadata={"out_sharding": ("digit",)},
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Classifies pixels (batch, 64)."""
    x = self.dropout(nnx.silu(self.input(x)))
    return self.output(x).astype(jnp.float32)


def init(seed: int = SEED) -> Classifier:
  """The model, with its own dropout stream."""
  return Classifier(nnx.Rngs(seed))


def optimizer() -> optax.GradientTransformation:
  """AdamW at 1e-3."""
  return optax.adamw(1e-3)


def loss(model: Classifier, batch: Batch) -> tuple[jax.Array, dict[str, Any]]:
  """Mean cross-entropy in nats, and the accuracy weighted by examples."""
  logits = model(jnp.asarray(batch["pixels"]))
  labels = jnp.asarray(batch["labels"])
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  right = (logits.argmax(-1) == labels).astype(jnp.float32)
  return nats.mean(), {"accuracy": nxp.weighted(right.sum(), right.size)}


def mesh() -> dict[str, int]:
  """The default mesh: devices along each axis."""
  return {"data": 8}


def rules() -> nxp.LogicalRules:
  """Data parallel: the classifier is replicated, and each device has a part of the batch."""
  return nxp.LogicalRules(batch="data", pixels=(), hidden=(), digit=())


def microbatches() -> int:
  """How many parts of a batch are accumulated before an update."""
  return 4


def batches(start: int = 0, *, split: str = "train", batch: int = BATCH, seed: int = SEED) -> Iterator[Batch]:
  """Yields float32 `pixels` (batch, 64) between 0 and 1, and int32 `labels` (batch,).

  Args:
    start: the cursor: how many images were consumed before. Image `i` of the run is a function of
      the seed and `i` alone; each epoch is a new permutation of the training images.
    split: `"train"`, endless; or `"held_out"`, the full batches of 384 images that are never trained on.
    batch: images in a global batch.
    seed: of the permutations.

  Raises:
    RecipeError: an unknown split, or scikit-learn is not installed.
  """
  pixels, labels = read_digits()
  trained = len(labels) - TEST_IMAGES
  if split == "train":
    rows = _endless_rows(start, trained, batch, seed)
  elif split == "held_out":
    rows = iter(np.arange(trained, trained + TEST_IMAGES // batch * batch).reshape(-1, batch))
  else:
    raise RecipeError(f"digits has no split {split!r}.", fix="split='train' or split='held_out'.")
  for chosen in rows:
    yield {"pixels": pixels[chosen], "labels": labels[chosen]}


def _endless_rows(start: int, trained: int, batch: int, seed: int) -> Iterator[np.ndarray]:
  while True:
    index = np.arange(start, start + batch)
    yield np.array([_epoch(int(i) // trained, trained, seed)[i % trained] for i in index])
    start += batch


@functools.lru_cache(maxsize=2)
def _epoch(epoch: int, count: int, seed: int) -> np.ndarray:
  return np.random.default_rng((seed, epoch)).permutation(count)


@functools.cache
def read_digits() -> tuple[np.ndarray, np.ndarray]:
  """Pixels, float32 (1797, 64) between 0 and 1, and labels, int32 (1797,), in one fixed random order."""
  try:
    from sklearn.datasets import load_digits
  except ModuleNotFoundError as error:
    raise RecipeError(
      "the recipe digits needs scikit-learn, which is not installed.",
      details="its images come with that package; nothing is downloaded",
      fix="pip install scikit-learn",
    ) from error
  pixels, labels = load_digits(return_X_y=True)
  order = np.random.default_rng(SEED).permutation(len(labels))
  return (pixels[order] / 16.0).astype(np.float32), labels[order].astype(np.int32)
