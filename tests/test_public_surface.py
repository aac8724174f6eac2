"""Freezes the names and signatures that users may rely on.

To change them on purpose: `python tests/test_public_surface.py --update`; say so in CHANGELOG.md.
"""

import difflib
import sys
from pathlib import Path

import nnx_parallel
from reference import reference
from surface import public_objects, surface

FROZEN = Path(__file__).with_name("public_surface.txt")
REFERENCE = Path(__file__).parent.parent / "guides" / "95-reference.md"
UPDATE = "python tests/test_public_surface.py --update"


def test_the_public_surface_is_as_frozen():
  frozen, now = FROZEN.read_text().splitlines(), surface(nnx_parallel)
  changes = "\n".join(difflib.unified_diff(frozen, now, "frozen", "now", lineterm="", n=0))
  assert not changes, f"the public surface changed:\n{changes}\nIf that is meant: {UPDATE}"


def test_the_reference_has_each_public_name_as_it_is():
  page = REFERENCE.read_text()
  assert [name for name, _ in public_objects(nnx_parallel) if f"\n### {name}\n" not in page] == []
  lines = difflib.unified_diff(
    page.splitlines(), reference(nnx_parallel).splitlines(), "page", "now", lineterm="", n=0
  )
  changes = "\n".join(lines)
  assert not changes, f"the reference is not up to date:\n{changes}\nFix: {UPDATE}"


def test_all_names_exist_once_and_are_public():
  names = list(getattr(nnx_parallel, "__all__", ()))
  assert len(names) == len(set(names))
  assert [name for name in names if name.startswith("_")] == []
  assert [name for name in names if not hasattr(nnx_parallel, name)] == []


if __name__ == "__main__":
  if sys.argv[1:] != ["--update"]:
    sys.exit(f"usage: {UPDATE}")
  FROZEN.write_text("".join(line + "\n" for line in surface(nnx_parallel)))
  REFERENCE.write_text(reference(nnx_parallel))
  for file in (FROZEN, REFERENCE):
    print(f"{file.name}: {len(file.read_text().splitlines())} lines")
