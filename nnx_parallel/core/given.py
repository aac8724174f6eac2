"""Arguments as users give them: of any type, whatever the annotation says."""

from __future__ import annotations

from collections.abc import Sequence


def is_one_of(value: object, options: Sequence[object]) -> bool:
  """Whether a value is one of some words or numbers; an array, whose comparisons are arrays, is none."""
  return any(value is option or (type(value) is type(option) and value == option) for option in options)


def is_count(value: object, least: int = 1) -> bool:
  """Whether a value is a Python integer, and not less than that."""
  return type(value) is int and value >= least


def are_texts(value: object) -> bool:
  """Whether a value is a tuple, list or set of texts."""
  return isinstance(value, (tuple, list, set, frozenset)) and all(type(text) is str for text in value)  # pyright: ignore[reportUnknownVariableType]
