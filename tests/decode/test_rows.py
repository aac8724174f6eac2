"""Prompts read several tokens at once, and slots that are filled again: the tokens of plain loops."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.decode.rows import dims_of_rows
from tests.decode import test_generate as plain
from training import placed

NEW, WIDTH, LENGTH, VOCABULARY = plain.NEW, plain.WIDTH, plain.LENGTH, plain.VOCABULARY
LAYOUTS = {"dp": {"data": 8}, "both": {"fsdp": 4, "tensor": 2}}


class One(plain.Model):  # The same model with caches of one row
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


class Calls:  # Counts the calls of a model, by the number of tokens
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


class Scaled(nnx.MultiHeadAttention):  # A subclass with a call of its own
  def __call__(self, *args, **options):
    return 2 * super().__call__(*args, **options)


@pytest.mark.parametrize("kind", [nnx.MultiHeadAttention, Scaled])
def test_the_class_of_an_attention_that_reads_several_tokens_is_its_own(kind):
  class ByClass(plain.Model):
    def __init__(self):
      super().__init__()
      for block in self.blocks:
        old, options = block.attention, {"use_bias": False, "decode": True, "keep_rngs": False}
        block.attention = kind(old.num_heads, old.in_features, **options, rngs=nnx.Rngs(0))
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


@pytest.mark.cases(3)
@pytest.mark.parametrize("init", [plain.Model, One], ids=["batch", "slots"])
@pytest.mark.parametrize("options", [{}, {"prefill": 3}], ids=str)
def test_no_whole_cache_is_gathered(init, options):
  options = options | ({"slots": 8} if init is One else {})
  generate = nxp.generator(NEW, **options)
  text = generate.lower(sharded(init, "both"), plain.PROMPTS, plain.LENGTHS).compile().as_text()
  gathered = [line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line]
  assert gathered, "the weights are sharded over fsdp"
  assert not [line for line in gathered if f",{LENGTH}," in line]
  assert ("own position" in str(generate.layers)) == ("prefill" in options)


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
  "slots": (lambda: nxp.generator(1, slots=0), r"slots=0(.|\n)*at least 1"),
  "prefill": (lambda: nxp.generator(1, prefill=0), r"prefill=0(.|\n)*at least 1"),
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


def test_the_dim_of_the_rows_is_found_wherever_it_is():
  def call(tokens, caches):
    layers, rows, count = caches
    return [layers + tokens[None, :, None], rows.at[:, 0].add(tokens), count + 1]

  caches = [np.zeros((3, 2, 4), np.int32), np.zeros((2, 4), np.int32), np.zeros((), np.int32)]
  assert dims_of_rows(call, np.ones(2, np.int32), caches) == [1, 0, None]
