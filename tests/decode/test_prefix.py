"""Tokens ahead of all prompts are read once; the new tokens are those of the whole prompts."""

import jax
import numpy as np
import pytest

import nnx_parallel as nxp
from tests.decode import test_generate as plain
from tests.decode import test_ragged as ragged
from training import placed

NEW, BATCH = 4, ragged.BATCH
PREFIX, PROMPTS, LENGTHS = ragged.PROMPTS[1, :19], ragged.PROMPTS[:, :7], np.array([1, 7, 2, 6, 3, 4, 7, 1])
WHOLE = np.concatenate([np.tile(PREFIX, (BATCH, 1)), PROMPTS], 1)


def whole(init, sampling):
  """With the prefix before each prompt, token by token, on one device."""
  generate, model = nxp.generator(NEW, sampling=sampling, stop=3), nxp.unsharded(lambda: init(BATCH))
  return generate(model, WHOLE, lengths=LENGTHS + len(PREFIX), key=jax.random.key(7))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("init", "layout", "options"), [
  (ragged.Listed, "both", {}), (ragged.Stacked, "dp", {"prefill": 4}),
  (ragged.Recurrent, "dp", {"prefill": 4}), (ragged.Listed, "both", {"slots": 8, "prefill": 4}),
])  # fmt: skip
@pytest.mark.slow
def test_tokens_are_those_of_whole_prompts(init, layout, options):
  sampling = options.get("sampling", plain.DRAWN)
  model = ragged.sharded(init, layout) if len(options) < 2 else ragged.slotted(layout)
  wanted = whole(init, sampling)
  generate = nxp.generator(NEW, **{"sampling": sampling, "stop": 3, **options})
  given = {"lengths": LENGTHS, "prefix": PREFIX, "key": jax.random.key(7)}
  for _ in range(2):
    found = generate(model, PROMPTS, **given)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
  texts = [[] for _ in range(BATCH)]
  for row, tokens in generate.stream(model, PROMPTS, every=2, **given):
    texts[row] += tokens.tolist()
  assert texts == plain.rows(wanted)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"slots": 8, "prefill": 4}], ids=str)
def test_a_cache_that_is_an_argument_is_at_the_position_after_the_prefix(options):
  model = placed(nxp.plan(ragged.windowed, nxp.make_mesh(fsdp=4, tensor=2), nxp.fsdp(min_size=64)))
  given = {"call": ragged.decoded, "cache": model.empty_cache}
  wanted = nxp.generator(NEW, **given)(model, WHOLE, lengths=LENGTHS + len(PREFIX))
  found = nxp.generator(NEW, **given, **options)(model, PROMPTS, lengths=LENGTHS, prefix=PREFIX)
  np.testing.assert_array_equal(found.tokens, wanted.tokens)


WRONG = {
  "one batch": (lambda: generated(ragged.OneBatch), "is read for one row and given to all, but one row is"),
  "long": (lambda: generated(ragged.Listed, prefix=np.ones(99, int)), "prompts of 106 tokens .* a cache"),
  "kind": (lambda: generated(ragged.Listed, prefix=np.ones(2)), r"prefix is float64 of shape \(2,\)"),
}


def generated(init, prefix=PREFIX, **options):
  nxp.generator(NEW, **options)(nxp.unsharded(lambda: init(BATCH)), PROMPTS, prefix=prefix)


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
  call, text = WRONG[case]
  with pytest.raises(nxp.errors.DecodeError, match=text):
    call()
