"""Generation on every layout gives the tokens of a plain loop on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp

BATCH, WIDTH, NEW, VOCABULARY, FEATURES, LENGTH = 8, 4, 6, 32, 16, 9


def kernel(*names):
  return {"out_sharding": names}


class Block(nnx.Module):
  """Attention with flax's own cache, and an MLP."""

  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      8,
      FEATURES,
      decode=True,
      rngs=rngs,
      kernel_metadata=kernel("embed", "heads", None),
      out_kernel_metadata=kernel("heads", None, "embed"),
    )
    self.attention.init_cache((BATCH, LENGTH, FEATURES))
    self.up = nnx.Linear(FEATURES, 32, rngs=rngs, kernel_metadata=kernel("embed", "mlp"))
    self.down = nnx.Linear(32, FEATURES, rngs=rngs, kernel_metadata=kernel("mlp", "embed"))

  def __call__(self, x):
    x = x + self.attention(self.norm(x))
    return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    self.head = nnx.Linear(
      FEATURES,
      VOCABULARY,
      rngs=rngs,
      kernel_init=nnx.initializers.normal(1.0),
      kernel_metadata=kernel("embed", "vocab"),
    )

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.head(x)


LAYOUTS = {"dp": {"data": 8}, "fsdp": {"fsdp": 8}, "tensor": {"tensor": 8}, "both": {"fsdp": 4, "tensor": 2}}
LOGICAL = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
CACHES = nxp.PathRules([(r".*\.cached_(key|value)", ("batch", None, "heads", None))])


def rules_for(axes):
  names = {name: (axis if axis in axes else ()) for name, axis in LOGICAL.items()}
  batch = tuple(axis for axis in axes if axis != "tensor")
  return [nxp.LogicalRules(batch=batch, **names), CACHES, nxp.replicate()]



PROMPTS = np.asarray(jax.random.randint(jax.random.key(1), (BATCH, WIDTH), 0, VOCABULARY))
LENGTHS = np.array([4, 1, 3, 2, 4, 2, 1, 3])


@functools.cache
def whole():
  """The logits of every position, without a cache."""
  model = nxp.unsharded(Model)
  model.set_attributes(decode=False)

  @jax.jit
  def run(tokens):
    x = model.embed(tokens)
    for block in model.blocks:
      x = x + block.attention(block.norm(x), mask=nnx.make_causal_mask(tokens))
      x = x + block.down(nnx.gelu(block.up(x)))
    return model.head(x)

  return run


def logits_of(tokens):
  padded = np.zeros((1, WIDTH + NEW), np.int32)
  padded[0, : len(tokens)] = tokens
  return whole()(padded)[0, len(tokens) - 1]


@functools.cache
def expected(sampling, stop):
  """A plain loop over rows and tokens on one device."""
  found = []
  for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    tokens, key = [*map(int, prompt[:length])], jax.random.fold_in(jax.random.key(7), row)
    for n in range(NEW):
      chosen = int(choose(logits_of(tokens), sampling, jax.random.fold_in(key, n)))
      tokens.append(chosen)
      if chosen in stop:
        break
    found.append(tokens[length:])
  return found


def choose(logits, sampling, key):
  if not sampling.temperature:
    return np.argmax(logits)
  logits = np.asarray(logits) / sampling.temperature
  order = np.argsort(-logits)
  kept = order[: sampling.top_k]
  chances = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
  kept = kept[: 1 + np.searchsorted(np.cumsum(chances), sampling.top_p)]
  only = np.full_like(logits, -np.inf)
  only[kept] = logits[kept]
  return jax.random.categorical(key, jnp.asarray(only))


def rows(result):
  tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
  for row, length in zip(tokens, lengths, strict=True):
    assert not row[length:].any()
  return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]



GREEDY, DRAWN = nxp.Sampling(), nxp.Sampling(temperature=0.9, top_k=12, top_p=0.8)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_a_plain_loop(layout, explicit):
  axes = LAYOUTS[layout]
  model = nxp.create_sharded_model(Model, nxp.make_mesh(axes, explicit=explicit), rules_for(axes))
  for sampling in (GREEDY, DRAWN):
    stop = (expected(sampling, ())[0][2],)
    generate = nxp.generator(NEW, sampling=sampling, stop=stop)
    for _ in range(2):  # the second one starts from a used cache
      result = generate(model, PROMPTS, lengths=LENGTHS, key=jax.random.key(7))
      assert rows(result) == expected(sampling, stop)
  cached = model.blocks[0].attention.cached_key[...].sharding
  heads = "tensor" if "tensor" in axes else None
  assert cached.spec[2] == heads
  assert cached.shard_shape((BATCH, LENGTH, 8, 2))[0] == BATCH // int(
    np.prod([n for a, n in axes.items() if a != "tensor"])
  )
