"""Prompts read several tokens at once, and slots that are filled again: the tokens of plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from tests.decode import test_generate as plain
from training import placed

NEW, WIDTH, LENGTH, VOCABULARY = plain.NEW, plain.WIDTH, plain.LENGTH, plain.VOCABULARY
LAYOUTS = {"dp": {"data": 8}, "both": {"fsdp": 4, "tensor": 2}}


class One(plain.Model):
  """The same model with caches of one row."""

  def __init__(self):
    super().__init__()
    for block in self.blocks:
      block.attention.init_cache((1, LENGTH, plain.FEATURES))


@functools.cache
def sharded(init, layout):
  axes = LAYOUTS[layout]
  rules = plain.rules_for(axes)
  if init is One:
    rules[1] = nxp.PathRules([(r".*\.cached_(key|value)", (None, None, "heads", None))])
  return placed(nxp.plan(init, nxp.make_mesh(axes), rules))


class Calls:
  """Counts the calls of a model, by the number of tokens."""

  def __init__(self):
    self.seen = []

  def __call__(self, model, tokens, position):
    jax.debug.callback(lambda: self.seen.append(tokens.shape[1]))
    return model(tokens)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_read_several_tokens_at_once(layout):
  lengths = np.maximum(plain.LENGTHS, 3)
  plainly = nxp.generator(NEW)(sharded(plain.Model, layout), plain.PROMPTS, lengths=lengths)
  calls = Calls()
  generate = nxp.generator(NEW, prefill=2, call=calls)
  found = generate(sharded(plain.Model, layout), plain.PROMPTS, lengths=lengths)
  assert plain.rows(found) == plain.rows(plainly)
  jax.effects_barrier()
  assert calls.seen.count(2) == 1  # the shortest prompt has 3 tokens, and its last one needs its logits
  assert calls.seen.count(1) == WIDTH + NEW - 1 - 2


class Scaled(nnx.MultiHeadAttention):
  """A subclass with a call of its own."""

  def __call__(self, *args, **options):
    return 2 * super().__call__(*args, **options)


@pytest.mark.parametrize("kind", [nnx.MultiHeadAttention, Scaled])
def test_the_class_of_an_attention_that_reads_several_tokens_is_its_own(kind):
  class ByClass(plain.Model):
    def __init__(self):
      super().__init__()
      for block in self.blocks:
        old, rngs = block.attention, nnx.Rngs(0)
        block.attention = kind(
          old.num_heads, old.in_features, use_bias=False, decode=True, keep_rngs=False, rngs=rngs
        )
        block.attention.init_cache((plain.BATCH, LENGTH, plain.FEATURES))

    def __call__(self, tokens):
      sign = [1 if type(block.attention) is kind else -1 for block in self.blocks]
      return sum(sign) * super().__call__(tokens)

  model = nxp.unsharded(ByClass)
  expected = nxp.generator(NEW, prefill=1)(model, plain.PROMPTS)
  assert plain.rows(nxp.generator(NEW, prefill=3)(model, plain.PROMPTS)) == plain.rows(expected)
  assert vars(kind)["__call__"].__qualname__.startswith(kind.__name__)


PROMPTS = np.asarray(jax.random.randint(jax.random.key(5), (19, WIDTH), 0, VOCABULARY))
LENGTHS = np.arange(19) % WIDTH + 1


@functools.cache
def one_by_one(sampling, stop):
  """Each request by itself, on one device."""
  model, found = nxp.unsharded(One), []
  generate = nxp.generator(NEW, sampling=sampling, stop=stop)
  for n, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    given = {"requests": np.array([n]), "key": jax.random.key(7)}
    found += plain.rows(generate(model, prompt[None], lengths=np.array([length]), **given))
  return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "prefill"), [("dp", 1), ("both", 3)])
@pytest.mark.slow
def test_slots_are_filled_again(layout, prefill):
  model = sharded(One, layout)
  for sampling in (plain.GREEDY, plain.DRAWN):
    expected = one_by_one(sampling, ())
    stop = (expected[0][2], expected[3][1])
    generate = nxp.generator(NEW, sampling=sampling, stop=stop, slots=8, prefill=prefill)
    result = generate(model, PROMPTS, lengths=LENGTHS, key=jax.random.key(7))
    assert plain.rows(result) == one_by_one(sampling, stop)
  few = generate(model, PROMPTS[:3], lengths=LENGTHS[:3], key=jax.random.key(7))
  assert plain.rows(few) == one_by_one(sampling, stop)[:3]


def test_no_slot_waits_for_the_longest():
  calls = Calls()
  generate = nxp.generator(8, stop=9, slots=2, call=calls)
  # It counts up to the stop token, from 8 different starts.
  starts = np.array([[1], [8], [8], [8], [7], [8], [8], [6]])
  found = generate(Count(), starts)
  assert plain.rows(found) == [[*range(start[0] + 1, 10)] for start in starts]
  jax.effects_barrier()
  assert (
    len(calls.seen) <= 2 * 9
  )  # under vmap each call counts for both slots; a batch of 2 takes 8 + 1 + 2 + 3


class Count(nnx.Module):
  """The next number; its cache holds the last one."""

  def __init__(self):
    self.last = nnx.Cache(jnp.zeros((1,), jnp.int32))

  def __call__(self, tokens):
    self.last[...] = tokens[:, -1]
    return jax.nn.one_hot(self.last[...][:, None] + 1, 12) * jnp.ones((1, tokens.shape[1], 1))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("axes", "explicit"), [({"data": 8}, False), ({"data": 4, "tensor": 2}, True)])
def test_slots_with_a_cache_that_is_an_argument(axes, explicit):
  mesh = nxp.make_mesh(axes, explicit=explicit)
  model = placed(nxp.plan(plain.Grouped, mesh, plain.rules_for(axes)[::2]))
  generate = nxp.generator(NEW, call=plain.Grouped.__call__, cache=plain.ring, slots=8)
  twice = np.concatenate([plain.PROMPTS, plain.PROMPTS[::-1]])
  found = generate(model, twice, lengths=np.concatenate([plain.LENGTHS, plain.LENGTHS[::-1]]))
  assert plain.rows(found) == plain.of_window() + plain.of_window()[::-1]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
  ("init", "options"),
  [
    (plain.Model, {}),
    (plain.Model, {"prefill": 3}),
    (One, {"slots": 8}),
    (One, {"slots": 8, "prefill": 3}),
  ],
  ids=["batch", "ragged", "slots", "slots and chunks"],
)
def test_no_whole_cache_is_gathered(init, options):
  generate = nxp.generator(NEW, **options)
  text = generate.lower(sharded(init, "both"), plain.PROMPTS, plain.LENGTHS).compile().as_text()
  gathered = [line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line]
  assert gathered, "the weights are sharded over fsdp"
  assert not [line for line in gathered if f",{LENGTH}," in line]
  assert ("own position" in str(generate.layers)) == ("prefill" in options)


@pytest.mark.slow
def test_a_report_on_a_plan_names_the_caches():
  axes = LAYOUTS["both"]
  plan = nxp.plan(plain.Model, nxp.make_mesh(axes), plain.rules_for(axes))
  prompts = jax.ShapeDtypeStruct(plain.PROMPTS.shape, "int32")
  report = nxp.compile_report(nxp.generator(NEW), plan, batch=prompts)
  found = {x.name: x for x in report.arguments}
  cache = found["blocks.1.attention.cached_key"]
  assert cache.donated
  assert cache.bytes == plain.BATCH * LENGTH * plain.FEATURES * 4 // 8
  assert not found["head.kernel"].donated


class Wide(nnx.Module):
  """Many more tokens than rows."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(512, 64, rngs=rngs)
    self.total = nnx.Cache(jnp.zeros((1, 64)))
    self.head = nnx.Linear(64, 512, rngs=rngs)

  def __call__(self, tokens):
    self.total[...] += self.embed(tokens)[:, 0]
    return self.head(self.total[...])[:, None] * jnp.ones((1, tokens.shape[1], 1))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_head_is_not_gathered():
  axes = {"data": 2, "tensor": 4}
  names = nxp.LogicalRules(batch="data")
  rules = [names, nxp.PathRules([(r"head\.kernel", (None, "tensor"))]), nxp.replicate()]
  plan = nxp.plan(Wide, nxp.make_mesh(axes), rules)
  rows = 4 // axes["data"]
  largest = {}
  for sampling in (plain.GREEDY, plain.DRAWN):
    generate = nxp.generator(NEW, sampling=sampling, slots=4)
    report = nxp.compile_report(generate, plan, batch=jax.ShapeDtypeStruct((4, 3), "int32"))
    largest[sampling] = max(c.bytes for c in report.collectives if "tensor" in c.axes)
  logits = rows * 512 * 4
  assert largest[plain.GREEDY] <= logits // 8
  assert largest[plain.DRAWN] == logits < 64 * 512 * 4


def test_layers_that_are_scanned():
  scanned = nxp.with_layers(lambda model, tokens: model(tokens), scan_layers=True)
  generate = nxp.generator(NEW, call=lambda model, tokens, position: scanned(model, tokens))
  model = sharded(plain.Model, "both")
  plainly = nxp.generator(NEW)(model, plain.PROMPTS, lengths=plain.LENGTHS)
  assert plain.rows(generate(model, plain.PROMPTS, lengths=plain.LENGTHS)) == plain.rows(plainly)
  assert generate.lower(model, plain.PROMPTS).compile().as_text().count(" while(") == 2


WRONG = {
  "cache of a batch": (lambda: generated(plain.Model, slots=8), "each slot has a cache for one row"),
  "slots and shards": (lambda: generated(One, slots=3), "3 slots cannot be split over 8 shards"),
  "explicit": (lambda: on_explicit_fsdp(), "on Explicit axes a row cannot use model.embed"),
  "slots": (lambda: nxp.generator(1, slots=0), "slots=0 is out of range"),
  "prefill": (lambda: nxp.generator(1, prefill=0), "prefill=0 is out of range"),
}


def generated(init, **options):
  return nxp.generator(1, **options)(sharded(init, "dp"), plain.PROMPTS)


def on_explicit_fsdp():
  axes = {"fsdp": 8}
  mesh = nxp.make_mesh(axes, explicit=True)
  model = placed(nxp.plan(plain.Grouped, mesh, plain.rules_for(axes)[::2]))
  generate = nxp.generator(1, call=stating, cache=plain.ring, slots=8)
  generate(model, plain.PROMPTS)


def stating(model, tokens, position, cache):
  """A call with a sharding that only Explicit axes take."""
  jax.reshard(model.embed[...], jax.P(None, "fsdp"))
  return model(tokens, position, cache)


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
  call, text = WRONG[case]
  with pytest.raises(nxp.errors.DecodeError, match=text):
    call()
