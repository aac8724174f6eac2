"""A recipe is found by name or file, and what it lacks is said before anything runs."""

import re
import textwrap

import pytest

from nnx_parallel.errors import RecipeError
from nnx_parallel.loop.loader import load_recipe


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
  text = r"(?s)does not define loss\(\) and batches\(\).*losses\(\) has nearly the name.*Fix: add\n +def loss"
  with pytest.raises(RecipeError, match=text):
    load_recipe(path)
