"""Tokens that the host gets as they are made: the tokens of a call, some of them early."""

import collections

import jax
import numpy as np
import pytest

import nnx_parallel as nxp
from tests.decode import test_generate as plain
from tests.decode import test_ragged as ragged
from training import placed

NEW, PROMPTS, LENGTHS = ragged.NEW, ragged.PROMPTS, ragged.LENGTHS


def joined(pairs, count):
  found = collections.defaultdict(list)
  for row, tokens in pairs:
    assert tokens.size
    found[row] += tokens.tolist()
  return [found[row] for row in range(count)]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("options", [{"prefill": 8}, {}, {"prefill": 8, "slots": 8}], ids=str)
def test_streamed_tokens_are_those_of_each_row_alone(options, explicit):
  axes = ragged.LAYOUTS["both"]
  rules = plain.rules_for(axes)
  rows = 1 if "slots" in options else ragged.BATCH
  if rows == 1:
    rules[1] = nxp.PathRules([(r".*\.cached_(key|value)", (None, None, "heads", None))])
  mesh = nxp.make_mesh(axes, explicit=explicit)
  model = placed(nxp.plan(lambda: ragged.Listed(rows), mesh, rules))
  expected = ragged.alone(ragged.Listed, plain.DRAWN)
  stop = (expected[1][1], expected[0][2])
  generate = nxp.generator(NEW, sampling=plain.DRAWN, stop=stop, **options)
  order = [*range(ragged.BATCH), *(range(ragged.BATCH)[::-1] if rows == 1 else ())]
  given = {"lengths": LENGTHS[order], "requests": np.array(order), "key": jax.random.key(7)}
  expected = [ragged.alone(ragged.Listed, plain.DRAWN, stop)[n] for n in order]
  for every in (1, 3):
    found = joined(generate.stream(model, PROMPTS[order], every=every, **given), len(order))
    assert found == expected
  found = generate(model, PROMPTS[order], **given)  # the model is as it was
  assert plain.rows(found) == expected
  blocks = generate._bound(model)._blocks
  assert [block._cache_size() for block in blocks.values()] == [1, 1]  # one program for each `every`
