"""A recipe is found by name or file, and what it lacks is said before anything runs."""

import re
import textwrap

import pytest

from nnx_parallel.errors import RecipeError
from nnx_parallel.loop.loader import embedded_recipes, load_recipe


@pytest.mark.parametrize("name", embedded_recipes())
def test_embedded_recipes_have_what_training_needs(name):
  recipe = load_recipe(name)
  assert recipe.name == name
  assert recipe.rules is not None
  assert recipe.mesh is not None


def test_a_file_is_a_recipe(tiny_file):
  recipe = load_recipe(str(tiny_file))
  assert (recipe.name, recipe.source) == ("tiny", str(tiny_file))
  assert recipe.mesh() == {"data": 4, "tensor": 2}
  assert recipe.tokens is None


def test_only_what_a_command_needs_is_asked_for(tmp_path):
  path = tmp_path / "model.py"
  path.write_text("def build():\n  return None\n")
  assert load_recipe(f"{path}:build", needs=("init",)).loss is None
  with pytest.raises(RecipeError, match=r"model\.py does not define biuld\(\)"):
    load_recipe(f"{path}:biuld", needs=("init",))


def test_a_name_may_be_none_and_attributes_may_be_lazy(tmp_path):
  lazy = """
def __dir__():
  return ["extra"]

def __getattr__(name):
  raise (ImportError if name == "extra" else AttributeError)(name)
"""
  path = write(tmp_path, "def init(): ...\nrules = None\n" + lazy)
  assert load_recipe(path, needs=("init",)).rules is None


CASES = {
  "txt_lm": "no recipe named 'txt_lm'.\n  Fix: did you mean text_lm?",
  "zebra": "no recipe named 'zebra'.\n  Fix: one of digits, starter or text_lm; or a file,",
  "nowhere/mine.py": "no recipe file at nowhere/mine.py.",
  "package.mine:": "no recipe named 'package.mine:'.\n  Fix: one of digits, starter or text_lm; or a file,",
}


@pytest.mark.parametrize("spec", CASES)
def test_what_cannot_be_found(spec):
  with pytest.raises(RecipeError, match=re.escape(CASES[spec])):
    load_recipe(spec)


def write(tmp_path, text):
  path = tmp_path / "mine.py"
  path.write_text(textwrap.dedent(text))
  return str(path)


def test_missing_functions_are_named_with_their_signatures(tmp_path):
  path = write(tmp_path, "def init(): ...\ndef optimizer(): ...\ndef losses(model, batch): ...\n")
  with pytest.raises(RecipeError) as caught:
    load_recipe(path)
  assert str(caught.value) == (
    f"the recipe {path} does not define loss() and batches().\n"
    "  it defines init, losses and optimizer\n"
    "  losses() has nearly the name loss()\n"
    "  Fix: add\n"
    "       def loss(model, batch) -> (scalar, {name: metric}): ...\n"
    "       def batches(start=0, *, split='train') -> iterator of global batches: ..."
  )
