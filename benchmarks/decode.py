"""Time per token of `nxp.generator` against a hand-written jitted loop, in the same layout.

Eight simulated CPU devices, data 4 x tensor 2. The loop by hand does what the generator does for greedy
decoding: a `lax.while_loop` over one-token calls, with the cache donated and pinned. Then what each option
gains against the plain way: a prompt read in parts, slots that are filled again. `--chips`
adds what the program sends on chips that are not here, by their compilers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from benchmarks.harness import Record, measure

BATCH, WIDTH, NEW, FEATURES, VOCABULARY, LAYERS, HEADS = 8, 8, 56, 128, 512, 4, 8
LENGTH = WIDTH + NEW
POSITIONS = LENGTH - 1


class Block(nnx.Module):
  """Attention and an MLP."""

  def __init__(self, rngs: nnx.Rngs, batch: int):
    self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=rngs)
    self.attention.init_cache((batch, LENGTH, FEATURES))
    self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
    self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + self.attention(x)
    return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
  """Tokens to logits."""

  def __init__(self, batch: int = BATCH) -> None:
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.blocks = nnx.List([Block(rngs, batch) for _ in range(LAYERS)])
    self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.head(x)


def rules(rows: str | None = "batch") -> list[Any]:
  """Heads over `tensor`; the rows of the caches split as the batch, or not."""
  return [
    nxp.LogicalRules(batch="data", heads="tensor"),
    nxp.PathRules(
      [
        (r".*\.cached_(key|value)", (rows, None, "heads", None)),
        (r".*\.(query|key|value)\.kernel", (None, "heads", None)),
        (r".*\.out\.kernel", ("heads", None, None)),
        (r".*\.up\.kernel", (None, "heads")),
        (r".*\.down\.kernel", ("heads", None)),
      ]
    ),
    nxp.replicate(),
  ]


def by_hand(model: nnx.Module, mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
  """A jitted greedy loop: `(cache, weights, prompts) -> (cache, tokens)`."""
  graph, cache, weights = nnx.split(model, nnx.Cache, ...)
  places = jax.tree.map(lambda x: x.sharding, cache)

  @jax.jit
  def start(cache: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, cache)

  def run(cache: Any, weights: Any, prompts: Any) -> Any:
    def more(carry: Any) -> Any:
      return carry[0] < POSITIONS

    def one(carry: Any) -> Any:
      position, tokens, found, cache = carry
      model = nnx.merge(graph, cache, weights)
      logits = model(tokens[:, None])[:, 0]
      chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
      cache = jax.lax.with_sharding_constraint(nnx.state(model, nnx.Cache), places)
      following = position + 1
      given = jax.lax.dynamic_index_in_dim(prompts, jnp.minimum(following, WIDTH - 1), 1, keepdims=False)
      found = found.at[:, jnp.maximum(following - WIDTH, 0)].set(chosen)
      return following, jnp.where(following < WIDTH, given, chosen), found, cache

    cache = jax.tree.map(jnp.zeros_like, cache)
    found = jnp.zeros((BATCH, NEW), jnp.int32)
    *_, found, cache = jax.lax.while_loop(more, one, (jnp.int32(0), prompts[:, 0], found, cache))
    return cache, found

  jitted = jax.jit(run, donate_argnums=0, keep_unused=True, out_shardings=(places, None))
  where = NamedSharding(mesh, PartitionSpec("data"))
  held = [start(cache)]

  def call(prompts: Any) -> Any:
    held[0], found = jitted(held[0], weights, jax.device_put(prompts, where))
    return found

  return call


def options(record: Record, model: nnx.Module, mesh: jax.sharding.Mesh) -> None:
  """What prompts in parts and slots gain."""
  numbers = np.random.default_rng(1)
  text = numbers.integers(0, VOCABULARY, (BATCH, LENGTH - 1)).astype(np.int32)
  by_one, in_parts = nxp.generator(1), nxp.generator(1, prefill=LENGTH - 2)
  assert (np.asarray(by_one(model, text).tokens) == np.asarray(in_parts(model, text).tokens)).all()
  cases = {
    "token by token": lambda: by_one(model, text),
    f"prefill={LENGTH - 2}": lambda: in_parts(model, text),
  }
  title = f"a prompt of {LENGTH - 1} tokens and 1 new one"
  record.compare(measure(cases, rounds=15, warmup=2), baseline="token by token", group=title)

  # Each row counts its own tokens: row n ends after 1 to NEW of them, as by a stop token.
  single = nxp.create_sharded_model(lambda: Counted(1), mesh, rules(None))
  whole = nxp.create_sharded_model(lambda: Counted(BATCH), mesh, rules())
  ends = numbers.integers(1, NEW, (4 * BATCH, 1)).astype(np.int32)
  batch, slots = nxp.generator(NEW, stop=0), nxp.generator(NEW, stop=0, slots=BATCH)

  def in_batches() -> Any:
    return [batch(whole, ends[n : n + BATCH]).lengths for n in range(0, len(ends), BATCH)]

  assert (np.concatenate(in_batches()) == np.asarray(slots(single, ends).lengths)).all()
  cases = {f"batches of {BATCH}": in_batches, f"slots={BATCH}": lambda: slots(single, ends).lengths}
  title = f"{4 * BATCH} requests of 1 to {NEW - 1} tokens"
  record.compare(measure(cases, rounds=15, warmup=2), baseline=f"batches of {BATCH}", group=title)
  passes = sum(int(ends[n : n + BATCH].max()) for n in range(0, len(ends), BATCH))
  record.value(f"batches of {BATCH}", passes, "passes", group=title)
  record.value(f"slots={BATCH}, at least", -(-int(ends.sum()) // BATCH), "passes", group=title)


def ragged(record: Record) -> None:
  """Compares prompts of 1 and of 256 tokens in one batch with each row alone, on one device."""
  width, new, chunk = 256, 32, 32
  lengths = np.array([1, width])
  text = np.random.default_rng(3).integers(0, VOCABULARY, (2, width)).astype(np.int32)

  def long(batch: int) -> nnx.Module:
    model = Model(batch)
    for block in model.blocks:
      block.attention.init_cache((batch, width + new, FEATURES))
    return model

  both, one = nxp.unsharded(lambda: long(2)), nxp.unsharded(lambda: long(1))
  calls: list[int] = []

  def counted(model: Any, tokens: jax.Array, position: jax.Array) -> jax.Array:
    jax.debug.callback(lambda: calls.append(tokens.shape[1]))
    return model(tokens)

  def cases(call: Any = None) -> dict[str, Callable[[], Any]]:
    by_one, chunks = nxp.generator(new, call=call), nxp.generator(new, prefill=chunk, call=call)

    def alone() -> Any:
      return [chunks(one, text[n : n + 1, :length]).tokens for n, length in enumerate(lengths)]

    return {
      f"each row alone, prefill={chunk}": alone,
      "one batch, token by token": lambda: by_one(both, text, lengths=lengths).tokens,
      f"one batch, prefill={chunk}": lambda: chunks(both, text, lengths=lengths).tokens,
    }

  title = f"prompts of 1 and of {width} tokens, {new} new ones, on one device"
  found = [np.asarray(case()).reshape(2, new) for case in cases().values()]
  assert all((tokens == found[0]).all() for tokens in found)
  timed = measure(cases(), rounds=15, warmup=2)
  record.compare(timed, baseline=next(iter(timed)), group=title)
  for name, case in cases(counted).items():
    calls.clear()
    jax.block_until_ready(case())
    jax.effects_barrier()
    record.value(f"{name}: calls of the model", len(calls), "calls", group=title)


class Counted(Model):
  """The same layers; its tokens count down to 0."""

  def __call__(self, tokens: jax.Array) -> jax.Array:
    rest = jnp.maximum(tokens - 1, 0)
    return 1e6 * jax.nn.one_hot(rest, VOCABULARY) + super().__call__(tokens)


def compiled(record: Record) -> None:
  """What a device holds and sends for one token, by the compilers of chips that are not here."""
  cached = 2 * BATCH * LENGTH * FEATURES * 4 / 2**10
  for target in ("tpu:v5e:2x4", "gpu:h100:1x8"):
    plan = nxp.plan(Model, nxp.report.topology_mesh(target, data=4, tensor=2), rules())
    prompts = jax.ShapeDtypeStruct((BATCH, WIDTH), "int32")
    report = nxp.compile_report(nxp.generator(NEW), plan, batch=prompts)
    group = f"compiled for {target}"
    record.value("largest array sent", max(c.bytes for c in report.collectives) / 2**10, "KiB", group=group)
    record.value("sent for one token", sum(c.bytes for c in report.collectives) / 2**10, "KiB", group=group)
    record.value("whole cache of one layer", cached, "KiB", group=group)
    record.value("need of a device", report.need_bytes / 2**20, "MiB", group=group)


def main() -> None:
  """Measures and records."""
  mesh = nxp.make_mesh(data=4, tensor=2)
  model = nxp.create_sharded_model(Model, mesh, rules())
  prompts = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, WIDTH)).astype(np.int32)
  generate, plain = nxp.generator(NEW), by_hand(model, mesh)
  assert (np.asarray(plain(prompts)) == np.asarray(generate(model, prompts).tokens)).all()
  cases = {"by hand": lambda: plain(prompts), "nxp.generator": lambda: generate(model, prompts)}
  note = (
    f"{LAYERS} layers of width {FEATURES}, data=4 x tensor=2. Times are of a whole call: {WIDTH} tokens of"
    f" each prompt are read and {NEW} written, by {POSITIONS} passes. The generator also keeps account of"
    " rows of different length. Slots are one program for all requests; a batch is one call for each."
  )
  title = "Generation of 56 tokens for 8 prompts"
  record = Record("decode", title, command="python -m benchmarks.decode --chips", notes=[note])
  record.compare(measure(cases, rounds=45, warmup=2), baseline="by hand", group="whole call")
  host = measure(cases, rounds=45, warmup=2, wait=False)
  record.compare(host, baseline="by hand", group="until the call returns")
  cached = [block.attention.cached_key[...] for block in model.blocks]
  held = 2 * sum(x.addressable_shards[0].data.nbytes for x in cached)
  record.value("cache per device, held", held / 2**10, "KiB", group="memory")
  analytic = 2 * LAYERS * BATCH * LENGTH * FEATURES * 4 / mesh.size
  record.value("cache per device, analytic", analytic / 2**10, "KiB", group="memory")
  memory = generate.lower(model, prompts).compile().memory_analysis()
  record.value("aliased by donation", memory.alias_size_in_bytes / 2**10, "KiB", group="memory")
  options(record, model, mesh)
  ragged(record)
  if "--chips" in sys.argv[1:]:
    compiled(record)
  record.write()


if __name__ == "__main__":
  main()
