"""A byte-level transformer language model on any folder of text. `nnx-parallel new FILE` copies this file.

A recipe is a file of plain functions; the command line calls them:

    nnx-parallel plan  text_lm --mesh data=2,fsdp=2,tensor=2
    nnx-parallel train text_lm --mesh data=2,fsdp=2,tensor=2 --steps 200 --checkpoint runs/ckpt

Without `--text DIR` (or the variable `NXP_TEXT`) it is trained on Python's own standard library. The model
names the dims of its parameters (`"embed"`, `"mlp"`, ...); only `rules()` has mesh axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sysconfig
import zlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import RecipeError

VOCAB = 256  # one token for each byte
NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests"})


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the model and its batches. The defaults train visibly in a minute on two CPU cores."""

  width: int = 128
  depth: int = 3
  heads: int = 4
  mlp: int = 384
  dropout: float = 0.0
  sequence: int = 256  # bytes in a window
  batch: int = 16  # windows in a global batch
  held_out_batches: int = 8
  learning_rate: float = 4e-3
  seed: int = 0


CONFIG = Config()
Batch = dict[str, np.ndarray]


# Model -----------------------------------------------------------------------------------------


def dense(
  shape_in: int | tuple[int, ...],
  shape_out: int | tuple[int, ...],
  names: tuple[str | None, ...],
  rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
  """A linear layer without bias; `names` are the logical names of the kernel's dims."""
  axis = tuple(range(-len(shape_in), 0)) if isinstance(shape_in, tuple) else -1
  metadata = {"out_sharding": names}
  return nnx.LinearGeneral(
    shape_in, shape_out, axis=axis, use_bias=False, rngs=rngs, kernel_metadata=metadata
  )


def rotate(x: jax.Array) -> jax.Array:
  """Rotary positions on (batch, sequence, heads, head_dim). Source: RoFormer, arXiv:2104.09864."""
  half = x.shape[-1] // 2
  frequency = 10_000.0 ** (-np.arange(half) / half)
  angle = np.arange(x.shape[1])[:, None] * frequency
  sin, cos = (jnp.asarray(f(angle)[None, :, None, :], x.dtype) for f in (np.sin, np.cos))
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
  """Causal self-attention over (batch, sequence, width)."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    per_head = (config.heads, config.width // config.heads)
    names = ("embed", "heads", None)
    self.query = dense(config.width, per_head, names, rngs)
    self.key = dense(config.width, per_head, names, rngs)
    self.value = dense(config.width, per_head, names, rngs)
    self.out = dense(per_head, config.width, ("heads", None, "embed"), rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Each position attends to itself and earlier positions."""
    q, k, v = rotate(self.query(x)), rotate(self.key(x)), self.value(x)
    return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class GatedMLP(nnx.Module):
  """SwiGLU. Source: arXiv:2002.05202."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.gate = dense(config.width, config.mlp, ("embed", "mlp"), rngs)
    self.up = dense(config.width, config.mlp, ("embed", "mlp"), rngs)
    self.down = dense(config.mlp, config.width, ("mlp", "embed"), rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps each position separately."""
    return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
  """A pre-norm transformer block."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
    self.attention = Attention(config, rngs)
    self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
    self.mlp = GatedMLP(config, rngs)
    self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Adds attention, then the MLP, to the residual stream."""
    x = x + self.dropout(self.attention(self.attention_norm(x)))
    return x + self.dropout(self.mlp(self.mlp_norm(x)))


class TextLM(nnx.Module):
  """Logits of the next byte, float32 (batch, sequence, 256), for int32 bytes (batch, sequence)."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.embed = nnx.Embed(
      VOCAB, config.width, rngs=rngs, embedding_metadata={"out_sharding": ("vocab", None)}
    )
    self.blocks = nnx.List([Block(config, rngs) for _ in range(config.depth)])
    self.norm = nnx.RMSNorm(config.width, rngs=rngs)
    self.head = dense(config.width, VOCAB, ("embed", "vocab"), rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Logits for each position's next byte."""
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))


# Recipe ----------------------------------------------------------------------------------------


def init(config: Config = CONFIG, seed: int | None = None) -> TextLM:
  """The model; called abstractly by the plan, and compiled straight into shards by the creation."""
  return TextLM(config, nnx.Rngs(config.seed if seed is None else seed))


def optimizer(config: Config = CONFIG) -> optax.GradientTransformation:
  """AdamW after a short warm-up, with the global norm of the gradients clipped to 1."""
  rate = optax.linear_schedule(0.0, config.learning_rate, transition_steps=20)

  def adamw(learning_rate: Any) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, b2=0.98, weight_decay=0.01)

  # With inject_hyperparams the rate is in the optimizer's state, and among the metrics.
  return optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(adamw)(learning_rate=rate))


def loss(model: TextLM, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Mean loss in nats per byte, and the same in bits per byte."""
  logits = model(jnp.asarray(batch["inputs"]))
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
  return nats, {"bits_per_byte": nats / np.float32(np.log(2))}


def mesh() -> dict[str, int]:
  """The default mesh: devices along each axis."""
  return {"data": 2, "fsdp": 2, "tensor": 2}


def rules() -> nxp.LogicalRules:
  """How the names of dims map to the axes of `mesh()`."""
  return nxp.LogicalRules(
    batch=("data", "fsdp"),
    embed="fsdp",
    mlp="tensor",
    heads="tensor",
    # The embedding table is split by rows only: looked up by columns, the activations would be
    # regathered. In the head, fsdp is taken by `embed`, and the second candidate fits.
    vocab=nxp.LogicalRules.first(("tensor", "fsdp"), "tensor"),
  )


def tokens(batch: Batch) -> int:
  """Bytes in one batch; the progress display divides it by the step time."""
  return int(batch["inputs"].size)


def batches(
  start: int = 0,
  *,
  split: str = "train",
  text: str | None = None,
  batch: int | None = None,
  seed: int | None = None,
  config: Config = CONFIG,
) -> Iterator[Batch]:
  """Yields global batches as int32 `inputs` and `targets`, each (batch, sequence).

  Args:
    start: the cursor: how many windows were consumed before. Window `i` is a function of the seed
      and `i` alone, so a run can resume on any mesh, with any batch size.
    split: `"train"`, endless; or `"held_out"`, a fixed number of evenly spaced windows.
    text: folder of text; by default `NXP_TEXT`, else Python's own standard library.
    batch: windows in a global batch, instead of the config's.
    seed: of the windows drawn, instead of the config's.
    config: gives the window length.

  Raises:
    RecipeError: an unknown split, or a folder without enough text.
  """
  config = dataclasses.replace(
    config, batch=batch or config.batch, seed=config.seed if seed is None else seed
  )
  train, held_out = read_text(text or os.environ.get("NXP_TEXT"), config.sequence + 1)
  if split == "train":
    data, windows = train, _random_windows(len(train), start, config)
  elif split == "held_out":
    data, windows = held_out, _even_windows(len(held_out), config)
  else:
    raise RecipeError(f"text_lm has no split {split!r}.", fix="split='train' or split='held_out'.")
  for offsets in windows:
    window = data[offsets[:, None] + np.arange(config.sequence + 1)].astype(np.int32)
    yield {"inputs": window[:, :-1], "targets": window[:, 1:]}


def _random_windows(length: int, start: int, config: Config) -> Iterator[np.ndarray]:
  places = length - config.sequence
  while True:
    # A counter-based generator: window i needs no history, so the cursor is a single number.
    draws = [np.random.Philox(key=config.seed, counter=start + i).random_raw() for i in range(config.batch)]
    yield np.array([draw % places for draw in draws], np.int64)
    start += config.batch


def _even_windows(length: int, config: Config) -> Iterator[np.ndarray]:
  count = config.held_out_batches * config.batch
  offsets = np.linspace(0, length - config.sequence - 1, count).astype(np.int64)
  yield from offsets.reshape(config.held_out_batches, config.batch)


# Text ------------------------------------------------------------------------------------------


@functools.cache
def read_text(folder: str | None, minimum: int) -> tuple[np.ndarray, np.ndarray]:
  """Reads the UTF-8 files of a folder, or the standard library, into bytes: (train, held out).

  One file in ten is held out, by a digest of its name, so more files move none; of a single file, its end.
  """
  root = Path(folder) if folder else Path(sysconfig.get_paths()["stdlib"])
  files = find_text(root) if folder else find_text(root, suffix=".py", skip=NOT_THE_LIBRARY)
  sides = split_files(files)
  train, held_out = (np.frombuffer(b"\n".join(side), np.uint8) for side in sides)
  if min(len(train), len(held_out)) < minimum:
    raise RecipeError(
      f"not enough text in {root}: a window takes {minimum} bytes.",
      details=f"{len(files)} text files, {len(train)} bytes for training, {len(held_out)} held out",
      fix="--text DIR (or NXP_TEXT=DIR), a folder of UTF-8 text files; several files are best.",
    )
  return train, held_out


def split_files(files: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
  """The contents to train on, and the held-out contents."""
  if len(files) == 1:
    (content,) = files.values()
    cut = len(content) - len(content) // 10
    return [content[:cut]], [content[cut:]]
  digest = {name: zlib.crc32(name.encode()) for name in files}
  first = sorted(files, key=digest.__getitem__)[:1]
  held_out = {name for name in files if digest[name] % 10 == 0} or set(first)
  return [files[n] for n in files if n not in held_out], [files[n] for n in files if n in held_out]


def find_text(root: Path, suffix: str = "", skip: Container[str] = ()) -> dict[str, bytes]:
  """Name, relative to `root`, to content of each UTF-8 file below it (not empty, no NUL); sorted by name."""
  if not root.is_dir():
    raise RecipeError(
      f"no folder of text at {root}.", fix="--text DIR (or NXP_TEXT=DIR), an existing folder."
    )
  found: dict[str, bytes] = {}
  for folder, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f not in skip and not f.startswith(".")]
    for name in names:
      path = Path(folder, name)
      if name.endswith(suffix) and not name.startswith(".") and path.is_file():
        content = path.read_bytes()
        with contextlib.suppress(UnicodeDecodeError):
          content.decode()
          if content and b"\0" not in content:
            found[path.relative_to(root).as_posix()] = content
  return dict(sorted(found.items()))
