"""Variable paths as text, and back.

A path is a tuple of parts: names, list positions, and other keys of mappings in a module.
As text the parts are joined by dots. The text is unambiguous: the position `0`, the name `"0"` and the tuple
`(0,)` are written differently, and dots inside a name are escaped, so `("a.b",)` and `("a", "b")` cannot
collide in a checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeAlias
from urllib.parse import quote

from nnx_parallel.errors import CheckpointError

Part: TypeAlias = "str | int | tuple[Part, ...]"
Path: TypeAlias = "tuple[Part, ...]"

_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_WORD = re.compile(r"(\\s)?((?:\\.|[^\\.,()])*)", re.DOTALL)
_LONGEST_FILE_NAME = 160


def format(path: Path) -> str:
  r"""Writes a path as text.

  Args:
    path: parts, outermost first.

  Returns:
    The parts joined by dots. In names, `\`, `.`, `,`, `(` and `)` are preceded by `\`; a name that reads
    like a number, and the empty name, start with `\s`; tuples are in parentheses.

  Raises:
    CheckpointError: a part that is not a name, an int or a tuple of these.

  Example:
    >>> format(("layers", 0, "kernel")), format(("layers", "0", "a.b"))
    ('layers.0.kernel', 'layers.\\s0.a\\.b')
  """
  return ".".join(_write(part, path) for part in path)


def parse(text: str) -> Path:
  """Reads the text that `format` wrote.

  Example:
    >>> parse(format(("layers", 0, "0", ("x", 1), "a.b")))
    ('layers', 0, '0', ('x', 1), 'a.b')
  """
  if not text:
    return ()
  parts, position = _read_parts(text, 0, ".")
  if position != len(text):
    raise CheckpointError(
      f"cannot read the path {text!r}: unexpected {text[position]!r} at character {position}."
    )
  return parts


def file_name(text: str) -> str:
  """A folder name for a path: safe on every file system, unique, and readable where it can be.

  Example:
    >>> file_name("layers.0.kernel"), file_name("a/b"), file_name("")
    ('layers.0.kernel', 'a%2Fb', '%')
  """
  if not text:  # a tree that is a single array
    return "%"
  # Orbax and file systems treat leading dots and underscores as their own names.
  safe = quote(text, safe=" +-_.,()=@")
  safe = re.sub(r"^[._]", lambda first: f"%{ord(first[0]):02X}", safe)
  if len(safe) <= _LONGEST_FILE_NAME:
    return safe
  return f"{safe[:_LONGEST_FILE_NAME]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _write(part: Part, path: Path) -> str:
  if isinstance(part, tuple):
    return f"({','.join(_write(inner, path) for inner in part)})"
  if isinstance(part, bool) or not isinstance(part, (str, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise CheckpointError(
      f"cannot save {path!r}: the part {part!r} is a {type(part).__name__}.",
      fix="use names, ints or tuples of these as keys in the module.",
    )
  if isinstance(part, int):
    return str(part)
  if re.search("[\ud800-\udfff]", part):
    raise CheckpointError(
      f"cannot save {path!r}: the name {part!r} is not Unicode text.", fix="use another name in the module."
    )
  text = re.sub(r"([\\.,()])", r"\\\1", part)
  return f"\\s{text}" if not part or _INTEGER.fullmatch(part) else text


def _read_parts(text: str, position: int, separator: str) -> tuple[tuple[Part, ...], int]:
  parts: list[Part] = []
  while True:
    part, position = _read_part(text, position)
    parts.append(part)
    if position == len(text) or text[position] != separator:
      return tuple(parts), position
    position += 1


def _read_part(text: str, position: int) -> tuple[Part, int]:
  if text[position : position + 2] == "()":
    return (), position + 2
  if text[position : position + 1] == "(":
    inner, position = _read_parts(text, position + 1, ",")
    if text[position : position + 1] != ")":
      raise CheckpointError(f"cannot read the path {text!r}: a parenthesis is not closed.")
    return inner, position + 1
  found: Any = _WORD.match(text, position)
  word = re.sub(r"\\(.)", r"\1", found[2], flags=re.DOTALL)
  return (int(word) if not found[1] and _INTEGER.fullmatch(word) else word), found.end()
