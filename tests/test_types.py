"""A type says what a value is: `Any` stands seldom, and its few other names say what they mean."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "nnx_parallel"
IN_100_LINES = 2.0
"""How often `Any` may stand in 100 lines: 7.8 times before the parts of traces had names, 1.5 times after."""


def sources() -> dict[str, str]:
  return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def too_many(texts: Mapping[str, str], limit: float) -> str:
  """What to say where `Any` stands too often; empty where it does not."""
  counts = {name: len(re.findall(r"\bAny\b", text)) for name, text in texts.items()}
  rate = 100 * sum(counts.values()) / sum(text.count("\n") for text in texts.values())
  most = ", ".join(f"{name} {counts[name]}" for name in sorted(counts, key=counts.__getitem__)[:-6:-1])
  text = f"`Any` stands {rate:.2f} times in 100 lines, {limit} at most: most often in {most}"
  return text if rate > limit else ""


def silent_names(texts: Mapping[str, str]) -> list[str]:
  """Names for `Any` that no docstring follows."""
  found: list[str] = []
  for name, text in texts.items():
    body = ast.parse(text).body
    for node, after in zip(body, [*body[1:], None], strict=True):
      is_name = isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
      said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
      if is_name and ast.unparse(node.value) == "Any" and not said:
        found.append(f"{name}:{node.lineno}")
  return found


def test_any_stands_seldom():
  assert too_many(sources(), IN_100_LINES) == ""


def test_each_other_name_of_any_says_what_the_value_is():
  assert silent_names(sources()) == []


def test_both_are_noticed():
  planted = {
    "a.py": "x: Any = 1\n",
    "b.py": 'Meant: TypeAlias = Any\n"""A tree."""\nSilent = Any\nMany = 2\n',
  }
  assert too_many(planted, 59.0).startswith(
    "`Any` stands 60.00 times in 100 lines, 59.0 at most: most often in b.py 2"
  )
  assert too_many(planted, 60.0) == ""
  assert silent_names(planted) == ["b.py:3"]
