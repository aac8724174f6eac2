"""Names for parameters without annotations, by pattern on their path."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from nnx_parallel.core.checked import are_texts, shorten_traceback
from nnx_parallel.core.nodes import Names, Path, path_str
from nnx_parallel.core.text import number_pattern
from nnx_parallel.errors import ShardingError

ANY_DIMS = "..."
"""In the names of a path rule: any number of dims that are not split. A string, for JSON."""


def _mend(window: str | tuple[str, ...]) -> str | tuple[str, ...]:
  """A regular expression from text that is not a regular expression: `*` means anything, as in a shell."""

  def part(pattern: str) -> str:
    try:
      re.compile(pattern)
    except re.error:
      return ".*".join(map(re.escape, pattern.split("*")))
    return pattern

  return part(window) if isinstance(window, str) else tuple(map(part, window))


@shorten_traceback
@dataclasses.dataclass(init=False, repr=False, unsafe_hash=True)
class PathRules:
  r"""Rules that give names to parameters without annotations, by their paths. The first match wins.

  A pattern is a regular expression for the full dotted path (`r".*attn\.(q|k|v)\.kernel"`), or a *window*: a
  tuple of regular expressions for consecutive path parts, each of which must match in full
  (`("SelfAttention", "(q|k|v)", "kernel")`). A value is a `PartitionSpec`, or a tuple with one name (logical,
  or a mesh axis) per dim, where one `...` stands for any number of dims without a name. None and
  `PartitionSpec()` replicate the parameter, even if there is a fallback. With `(None, None)` its dims have no
  names, and `fsdp(extend=True)` may still shard a dim.

  Args:
    rules: pairs `(pattern, names)`, in order.
    strict: whether a parameter that matches no rule is an error if there is no fallback. The error lists all
      such parameters.
    optional: whether rules may match nothing without a note in the plan, as in a table for a family of
      models.

  Raises:
    ShardingError: a pattern does not compile, or a value is not a tuple of names.

  Source: regex windows, T5X and Hugging Face Flax `partition_rules`.

  Example:
    >>> import nnx_parallel as nxp
    >>> rules = nxp.PathRules([(("attn", "(q|k|v)", "kernel"), (None, "tensor")), (r".*\.scale", None)])
    >>> rules.match(("blocks", 0, "attn", "q", "kernel")).names
    (None, 'tensor')
  """

  rules: tuple[PathRule, ...]
  strict: bool
  optional: bool

  def __init__(
    self,
    rules: Iterable[tuple[str | Sequence[str], Sequence[Any] | None]] | Mapping[Any, Any],
    *,
    strict: bool = True,
    optional: bool = False,
  ):
    given: Any = rules.items() if isinstance(rules, Mapping) else rules
    if isinstance(given, str) or not isinstance(given, Iterable) or isinstance(given, io.IOBase):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise _no_pairs(rules)
    pairs: list[Any] = [*given]  # pyright: ignore[reportUnknownArgumentType]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):  # pyright: ignore[reportUnknownArgumentType]
      raise _no_pairs(rules)
    self.strict, self.optional = strict, optional
    self.rules = tuple(PathRule.of(pattern, names) for pattern, names in pairs)
    seen: dict[Any, PathRule] = {}
    for rule in self.rules:
      if rule.pattern in seen:
        raise ShardingError(
          f"path rule {rule.pattern!r} is given twice; the second one can never fire.",
          details=f"values {seen[rule.pattern].names} and {rule.names}",
          fix="remove one of them.",
        )
      seen[rule.pattern] = rule

  @shorten_traceback
  def match(self, path: Path) -> PathRule | None:
    """Returns the first rule that matches a path, or None.

    Args:
      path: the parts of the path, as in `LeafPlan.path`.

    Returns:
      The rule, with its `.pattern` and `.names`.

    Raises:
      ShardingError: it is no path.
    """
    if not isinstance(path, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise ShardingError(f"{path!r:.60} is no path.", fix='rules.match(("blocks", 0, "kernel"))')
    return next((rule for rule in self.rules if rule.matches(path)), None)

  def pairs(self) -> list[tuple[str | tuple[str, ...], Names | None]]:
    """Returns the pairs `(pattern, names)`, so that you can edit them and build new rules."""
    return [(rule.pattern, rule.names) for rule in self.rules]

  def __repr__(self) -> str:
    lines = [f"  ({rule.pattern!r}, {show_names(rule.names)})," for rule in self.rules]
    options = ("" if self.strict else ", strict=False") + (", optional=True" if self.optional else "")
    return "\n".join(["PathRules([", *lines, f"]{options})"])


def _no_pairs(rules: object) -> ShardingError:
  return ShardingError(
    f"path rules are pairs of a pattern and names, and not {rules!r:.60}.",
    fix="nxp.PathRules([(r'.*kernel', (None, 'tensor'))])",
  )


@dataclasses.dataclass(frozen=True)
class PathRule:
  """One pattern and the names it gives; see `PathRules`."""

  pattern: str | tuple[str, ...]
  names: Names | None

  @classmethod
  def of(cls, pattern: str | Sequence[str], names: Any) -> PathRule:
    """Checks and normalises one `(pattern, names)` pair."""
    if not isinstance(pattern, str) and not are_texts(pattern):
      raise ShardingError(
        f"path rule {pattern!r:.60} has no pattern of texts.",
        fix=f"nxp.PathRules([(r'.*kernel', {names!r})])",
      )
    window = pattern if isinstance(pattern, str) else tuple(pattern)
    if not window:
      raise ShardingError(f"path rule {window!r} has no pattern.", fix="r'.*' matches every path.")
    try:
      for part in (window,) if isinstance(window, str) else window:
        re.compile(part)
    except re.error as error:
      raise ShardingError(
        f"path rule {window!r} is not a regular expression: {error}.",
        fix=f"nxp.PathRules([({_mend(window)!r}, {names!r})])",
      ) from error
    if names is None or (isinstance(names, PartitionSpec) and not len(names)):
      return cls(window, None)
    if isinstance(names, PartitionSpec):
      names = (*names, ...)  # as in jax, the dims that a spec leaves out are not split
    entries: tuple[Any, ...] = tuple(names) if isinstance(names, (tuple, list)) else ()
    entries = tuple(ANY_DIMS if entry is ... else entry for entry in entries)
    if not isinstance(names, (tuple, list)) or not all(map(_is_path_entry, entries)):
      shown = show_names(entries) if entries else repr(names)
      raise ShardingError(
        f"path rule {window!r} has the value {shown}, which is not one name for each dim.",
        fix=f"{_entries_that_work(entries, names)}, or None to replicate the parameter.",
      )
    if entries.count(ANY_DIMS) > 1:
      raise ShardingError(
        f"path rule {window!r} has the value {show_names(entries)}, with two ....",
        fix="keep one; it stands for any number of dims that are not split.",
      )
    return cls(window, tuple(tuple(e) if isinstance(e, list) else e for e in entries))

  def names_for(self, ndim: int, *, where: str) -> Names | None:
    """The names for an array at path `where`, with `...` written out; None replicates the array."""
    if self.names is None:
      return None
    names: list[Any] = list(self.names)
    if ANY_DIMS in names:
      at = names.index(ANY_DIMS)
      names[at : at + 1] = [None] * (ndim - len(names) + 1)
    if len(names) != ndim:
      given = len(self.names) - self.names.count(ANY_DIMS)
      stacked = f": {shifted([(where, self.names)], {where: ndim})}" if given < ndim else ""
      raise ShardingError(
        f"path rule {self.pattern!r} gives {given} names to {where}, an array of {ndim} dims.",
        details=f"names {show_names(self.names)}",
        fix="write one entry for each dim (None: not split; ... stands for any number of these), or put a"
        f" rule for it in front of this one{stacked or '.'}",
      )
    return tuple(names)

  def matches(self, path: Path) -> bool:
    """Whether the pattern matches the path."""
    if isinstance(self.pattern, str):
      return re.fullmatch(self.pattern, path_str(path)) is not None
    parts = [str(part) for part in path]
    width = len(self.pattern)
    return any(
      all(map(_matches_part, self.pattern, parts[start : start + width]))
      for start in range(len(parts) - width + 1)
    )


# Models repeat the same few parts ("attn", "kernel") in every layer.
@functools.lru_cache(maxsize=2**14)
def _matches_part(regex: str, part: str) -> bool:
  return re.fullmatch(regex, part) is not None


def _is_path_entry(entry: Any) -> bool:
  if isinstance(entry, (tuple, list)):
    return all(isinstance(name, str) for name in entry)  # pyright: ignore[reportUnknownVariableType]
  return entry is None or isinstance(entry, str)


def _entries_that_work(entries: tuple[Any, ...], names: Any) -> str:
  if isinstance(names, str):
    return f"({names!r}, None)"
  return show_names([entry if _is_path_entry(entry) else None for entry in entries] or [None])


def shifted(names: Iterable[tuple[str, Sequence[Any]]], ndims: Mapping[str, int]) -> str:
  """Path rules, as Python code, that give names to the last dims of arrays with `ndims` dims, by path."""
  by_path: dict[str, str] = {}
  for path, some in names:
    front = [None] * (ndims[path] - len(some) + (ANY_DIMS in some))
    by_path[path] = show_names([*front, *(name for name in some if name != ANY_DIMS)])
  rows: dict[str, str] = {}
  for path, row in by_path.items():
    if rows.setdefault(number_pattern(path).replace("_*", "_.*"), row) != row:
      rows = by_path  # layers of one pattern have different names
      break
  return f"nxp.PathRules([{', '.join(f'({path!r}, {row})' for path, row in rows.items())}], strict=False)"


def show_names(names: Sequence[Any] | None) -> str:
  """Names as Python code: `('embed', ..., None)`."""
  if names is None:
    return "None"
  shown = ["..." if entry == ANY_DIMS else repr(entry) for entry in names]
  return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"
