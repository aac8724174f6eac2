"""Prompts of very different lengths in one batch: the tokens of each row alone, in few calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.interop.families.decoder import Config, Decoder, Rope
from tests.decode import test_generate as plain
from tests.decode.test_rows import Calls
from training import placed

NEW, WIDTH, BATCH, VOCABULARY, FEATURES = 5, 41, 8, plain.VOCABULARY, plain.FEATURES
PROMPTS = np.asarray(jax.random.randint(jax.random.key(11), (BATCH, WIDTH), 0, VOCABULARY))
LENGTHS = np.array([1, 41, 2, 17, 40, 9, 33, 16])
LAYOUTS = {"dp": {"data": 8}, "both": {"fsdp": 4, "tensor": 2}}


class Listed(plain.Model):  # Flax's caches, in a list of layers; `rows` is the batch of the caches
  def __init__(self, rows):
    super().__init__()
    for block in self.blocks:
      block.attention.init_cache((rows, WIDTH + NEW, FEATURES))


def stack(rows, depth, length, rngs):
  """Equal layers with their caches, in one module."""

  @nnx.split_rngs(splits=depth)
  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
  def make(rngs):
    block = plain.Block(rngs)
    block.attention.init_cache((rows, length, FEATURES))
    return block

  return make(rngs)


class Stacked(nnx.Module):
  """Stacked layers, whose caches have their rows in dim 1, and a count of tokens outside of them."""

  def __init__(self, rows, depth=2, length=WIDTH + NEW):
    rngs = nnx.Rngs(2)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.places = nnx.Param(jax.random.normal(rngs.params(), (length, FEATURES)))
    self.seen = nnx.Cache(jnp.zeros((), jnp.int32))
    self.blocks = stack(rows, depth, length, rngs)
    self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs, kernel_init=nnx.initializers.normal(1.0))

  def __call__(self, tokens):
    count = tokens.shape[1]
    places = jax.lax.dynamic_slice_in_dim(self.places[...], self.seen[...], count)
    x = self.embed(tokens) + places[None]
    self.seen[...] += count

    @nnx.scan
    def run(x, block):
      return block(x), None

    x, _ = run(x, self.blocks)
    return self.head(x)


class Recurrent(nnx.Module):
  """No attention: a sum of all tokens that decays; and as many entries as rows that are not of rows."""

  def __init__(self, rows):
    rngs = nnx.Rngs(4)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.state = nnx.Cache(jnp.zeros((rows, FEATURES)))
    self.places = nnx.Cache(jnp.zeros((BATCH,)))
    self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs, kernel_init=nnx.initializers.normal(1.0))

  def __call__(self, tokens):
    def one(carry, x):
      state, places = carry
      state, places = jnp.tanh(state + x), jnp.roll(places, 1).at[0].add(1.0)
      return (state, places), state + places[1]

    x = self.embed(tokens).swapaxes(0, 1)
    (self.state[...], self.places[...]), found = jax.lax.scan(one, (self.state[...], self.places[...]), x)
    return self.head(found.swapaxes(0, 1))


@functools.cache
def alone(init, sampling, stop=()):
  """Each row by itself, token by token, on one device."""
  model, found = nxp.unsharded(lambda: init(1)), []
  generate = nxp.generator(NEW, sampling=sampling, stop=stop)
  for n, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    given = {"lengths": np.array([length]), "requests": np.array([n]), "key": jax.random.key(7)}
    found += plain.rows(generate(model, prompt[None], **given))
  return found


def sharded(init, layout):
  axes = LAYOUTS[layout]
  rules = plain.rules_for(axes)
  if init is Stacked:
    heads = "tensor" if "tensor" in axes else None
    rules[0] = rules[0].replace(layers=())
    rules[1] = nxp.PathRules([(r".*\.cached_(key|value)", (None, "batch", None, heads, None))])
  return placed(nxp.plan(lambda: init(BATCH), nxp.make_mesh(axes), rules))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
  ("init", "layout"), [(Listed, "dp"), (Listed, "both"), (Stacked, "both"), (Recurrent, "dp")]
)
def test_rows_have_the_tokens_of_each_row_alone(init, layout):
  model = sharded(init, layout)
  for sampling in (plain.GREEDY, plain.DRAWN):
    stop = (alone(init, sampling)[1][1], alone(init, sampling)[0][2])
    generate = nxp.generator(NEW, sampling=sampling, stop=stop, prefill=16)
    for _ in range(2):  # the second one starts from a used cache
      found = generate(model, PROMPTS, lengths=LENGTHS, key=jax.random.key(7))
      assert plain.rows(found) == alone(init, sampling, stop)
  assert str(generate.layers).startswith("prompts: 16, 2 tokens at once, each row at its own position")
  assert found.tokens.sharding.spec[0] == model.embed.embedding[...].sharding.mesh.axis_names[0]


class OneBatch(Recurrent):  # It takes a batch of 8 only
  def __call__(self, tokens):
    return super().__call__(tokens.reshape(BATCH, -1))


def test_rows_that_cannot_be_told_apart_are_read_up_to_the_shortest():
  model, calls = nxp.unsharded(lambda: OneBatch(BATCH)), Calls()
  generate = nxp.generator(NEW, prefill=4, call=calls)
  lengths = np.maximum(LENGTHS, 9)
  found = generate(model, PROMPTS, lengths=lengths)
  jax.effects_barrier()
  assert sorted(calls.seen, reverse=True) == [4, 4, *[1] * (WIDTH - 8 - 1 + NEW)]
  assert plain.rows(found) == plain.rows(nxp.generator(NEW)(model, PROMPTS, lengths=lengths))
  text = "prompts: 4 tokens at once, up to the shortest prompt, and then token by token: one row is not"
  assert str(generate.layers).startswith(text)


@functools.cache
def slotted(layout):
  axes = LAYOUTS[layout]
  rules = plain.rules_for(axes)
  rules[1] = nxp.PathRules([(r".*\.cached_(key|value)", (None, None, "heads", None))])
  return placed(nxp.plan(lambda: Listed(1), nxp.make_mesh(axes), rules))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_read_long_prompts_in_chunks(layout):
  expected = alone(Listed, plain.DRAWN)
  generate = nxp.generator(NEW, sampling=plain.DRAWN, prefill=8, slots=8)
  twice = np.concatenate([np.arange(BATCH), np.arange(BATCH)[::-1], np.arange(BATCH)])
  given = {"lengths": LENGTHS[twice], "requests": twice, "key": jax.random.key(7)}
  found = generate(slotted(layout), PROMPTS[twice], **given)
  assert plain.rows(found) == [expected[n] for n in twice]


SIZES = {"vocab": VOCABULARY, "width": FEATURES, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 4}
WINDOWED = Config(**SIZES, ropes=(Rope(),) * 2, windows=(6, None), score_scale=0.5)


def decoded(model, tokens, position, cache):
  return model(tokens, cache, position)


def windowed():
  model = Decoder(WINDOWED, nnx.Rngs(0))
  model.embed_tokens.embedding[...] *= 8  # else each row repeats one token
  return model


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_caches_that_are_an_argument(kind):
  whole, expected = nxp.unsharded(windowed), []
  options = {"call": decoded, "cache": whole.empty_cache}
  generate = nxp.generator(NEW, **options)
  for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
    expected += plain.rows(generate(whole, prompt[None], lengths=np.array([length])))
  assert len({*map(tuple, expected)}) == BATCH
  mesh = nxp.make_mesh(fsdp=4, tensor=2, explicit=kind == "explicit")
  model = placed(nxp.plan(windowed, mesh, nxp.fsdp(min_size=64)))
  options["cache"] = model.empty_cache
  for more in ({}, {"slots": 8}):
    generate = nxp.generator(NEW, prefill=8, **options, **more)
    assert plain.rows(generate(model, PROMPTS, lengths=LENGTHS)) == expected
    assert "each row at its own position" in str(generate.layers)
