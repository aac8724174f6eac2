"""Checks of what a file says before it is believed; they raise ValueError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def whole(value: object) -> int:
  """A number of bytes, steps or elements.

  Raises:
    ValueError: anything else.
  """
  if type(value) is not int or not 0 <= value < 2**63:
    raise ValueError(f"{value!r:.100} is not a whole number")
  return value


def moment(value: object) -> float:
  """Seconds since 1970, before the year 10000.

  Raises:
    ValueError: anything else.
  """
  if type(value) not in (int, float) or not 0 <= value < 253402300800:  # pyright: ignore[reportOperatorIssue]
    raise ValueError(f"{value!r:.100} is not a time")
  return float(value)  # pyright: ignore[reportArgumentType]


def text(value: object) -> str:
  """A text.

  Raises:
    ValueError: anything else.
  """
  if not isinstance(value, str):
    raise ValueError(f"{value!r:.100} is not a text")
  return value


def inside(name: str) -> str:
  """A relative path that does not leave its folder.

  Raises:
    ValueError: one that does.
  """
  if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or "\0" in name:
    raise ValueError(f"{name!r:.100} leads out of the folder")
  return name


def folder_name(name: str) -> str:
  """The name of a folder in a folder.

  Raises:
    ValueError: a path, or none.
  """
  if "/" in inside(name):
    raise ValueError(f"{name!r:.100} is not the name of a folder")
  return name


def table(
  value: dict[str, Any], check: Callable[[Any], object], check_name: Callable[[str], object] = text
) -> dict[str, Any]:
  """A table whose names and values pass the checks.

  Raises:
    ValueError: one that does not.
  """
  for name, one in value.items():
    check_name(name)
    check(one)
  return value
