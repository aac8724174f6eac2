"""The digits recipe: real images, each once in an epoch, and an error when they are not installed."""

import itertools
import re
import sys

import numpy as np
import pytest

import nnx_parallel as nxp
from nnx_parallel.errors import RecipeError
from nnx_parallel.loop.loader import load_recipe
from nnx_parallel.loop.recipe import plan_recipe, start
from nnx_parallel.recipes import digits


def images(start, batches):
  rows = [b["pixels"] for b in itertools.islice(digits.batches(start), batches)]
  return np.concatenate(rows)


@pytest.mark.slow
def test_each_training_image_comes_once_in_an_epoch_and_no_held_out_one():
  pixels, _ = digits.read_digits()
  trained = len(pixels) - digits.TEST_IMAGES
  epoch = images(0, 12)[:trained]
  np.testing.assert_array_equal(np.unique(epoch, axis=0), np.unique(pixels[:trained], axis=0))
  held_out = np.concatenate([b["pixels"] for b in digits.batches(split="held_out")])
  np.testing.assert_array_equal(held_out, pixels[trained:])


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
  digits.read_digits.cache_clear()
  with pytest.raises(RecipeError, match=re.escape("Fix: pip install scikit-learn")):
    next(digits.batches())


@pytest.mark.slow
def test_it_learns_to_read_digits():
  recipe = load_recipe("digits")
  plan = plan_recipe(recipe, nxp.make_mesh(recipe.mesh()))
  run = start(recipe, plan, microbatches=recipe.microbatches())
  before = run.evaluate()
  run.train(80)
  after = run.evaluate()
  assert before["accuracy"] < 0.3
  assert after["accuracy"] > 0.9
  assert after["loss"] < 0.5 < before["loss"]
