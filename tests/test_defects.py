"""The table of defects names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_table_of_defects_names_tests():
  named = re.findall(r"`([a-z_/0-9]+\.py)(?:::([a-z0-9_]+))?`", (HERE / "DEFECTS.md").read_text())
  assert len(named) > 40
  for file, name in named:
    text = (HERE / file).read_text()
    assert not name or f"\ndef test_{name}(" in text or f"\ndef {name}(" in text, f"{file}::{name}"
