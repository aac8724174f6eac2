"""Logical axis names, and the mesh axes that they map to."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from nnx_parallel.core.axes import entry_of
from nnx_parallel.core.checked import check_arguments, is_one_of, shorten_traceback
from nnx_parallel.errors import ShardingError

Candidate = tuple[str, ...]
"""Mesh axes that jointly split one dim, major to minor; `()` does not split the dim."""
Uneven = Literal["error", "next", "pad", "replicate"]
Unknown = Literal["error", "replicate"]
UNEVEN: tuple[Uneven, ...] = ("error", "next", "pad", "replicate")


class First(tuple[Any, ...]):
  """Candidates for one name, in order of preference; made by `LogicalRules.first`."""

  __slots__ = ()

  def __repr__(self) -> str:
    return f"LogicalRules.first({', '.join(map(repr, self))})"


@shorten_traceback
class LogicalRules(Mapping[str, tuple[Candidate, ...]]):
  """Rules that map logical names to mesh axes. A name may have several candidates, in order of preference.

  A value is a candidate (`"fsdp"`; `("data", "fsdp")` for both, major to minor; `None` or `()` for no axis)
  or `LogicalRules.first(...)` with several candidates: the rule takes the first candidate whose axes are in
  the mesh, are not yet used in the same spec, and divide the dim. The order of the names never matters; dims
  are resolved left to right.

  `train_step` and `eval_step` use two names even if the model names nothing. `batch` is dim 0 of the inputs
  and of the activations. `seq` is dim 1 of the activations between layers (the positions): with
  `seq="tensor"`, a tensor-parallel model is also sequence-parallel (arXiv:2205.05198). This holds on Auto
  axes; on Explicit axes, the types of the arrays decide.

  Args:
    names: rules as a mapping, for names that cannot be keyword arguments; merged with `rules`.
    unknown: what happens to a name that has no rule and is not a mesh axis: `"error"` (default), or
      `"replicate"` as in Flax Linen.
    uneven: by name, the `uneven` policy of the name (see `plan`), if it differs from the policy of the plan.
    **rules: logical name -> candidates.

  Raises:
    ShardingError: a name is given twice, a value is a list, a candidate names an axis twice, or a candidate
      can never be reached.

  Example:
    >>> import nnx_parallel as nxp
    >>> first = nxp.LogicalRules.first
    >>> rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", heads=first("tensor", None))
    >>> rules["heads"]
    (('tensor',), ())
    >>> rules.replace(embed=None)["embed"]
    ((),)
  """

  def __init__(
    self,
    names: Mapping[str, Any] | None = None,
    /,
    *,
    unknown: Unknown = "error",
    uneven: Mapping[str, Uneven] | None = None,
    **rules: Any,
  ):
    if names is not None and not (isinstance(names, Mapping) and all(type(n) is str for n in names)):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise ShardingError(
        f"{names!r:.60} maps no names.",
        fix='nxp.LogicalRules({"embed": "fsdp"}), or nxp.LogicalRules.from_linen(pairs) for pairs.',
      )
    twice = sorted(set(names or {}) & set(rules))
    if twice:
      raise ShardingError(f"logical name {twice[0]!r} has two rules.", fix="keep one of them.")
    if not is_one_of(unknown, ("error", "replicate")):
      raise ShardingError(
        f"unknown={unknown!r} is not a policy for names without a rule.", fix='use "error" or "replicate".'
      )
    self.unknown: Unknown = unknown
    if uneven is not None and not isinstance(uneven, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise ShardingError(f"uneven={uneven!r:.60} is no mapping.", fix='uneven={"vocab": "pad"}')
    self.uneven: dict[str, Uneven] = dict(uneven or {})
    self._table = {k: _candidates(k, v) for k, v in {**(names or {}), **rules}.items()}
    for name, policy in self.uneven.items():
      if not is_one_of(policy, UNEVEN) or name not in self._table:
        raise ShardingError(
          f"uneven={{{name!r}: {policy!r}}} does not fit these rules.",
          details=f"names {', '.join(self._table)}; policies {', '.join(UNEVEN)}",
          fix=f"uneven={{{next(iter(self._table), 'vocab')!r}: 'pad'}}",
        )

  @staticmethod
  def first(*candidates: str | tuple[str, ...] | None) -> First:
    """Several candidates for one name: the rule takes the first that fits.

    Args:
      *candidates: mesh axes, as in the constructor: `"fsdp"`, `("data", "fsdp")` for both, or None.

    Returns:
      The value of a rule.

    Example:
      >>> import nnx_parallel as nxp
      >>> nxp.LogicalRules(heads=nxp.LogicalRules.first("tensor", None))["heads"]
      (('tensor',), ())
    """
    return First(candidates)

  @classmethod
  @shorten_traceback
  def from_linen(cls, rules: Iterable[tuple[str, Any]]) -> LogicalRules:
    """Reads the rules of Flax Linen. A repeated name adds a candidate; unknown names get no axis.

    Args:
      rules: pairs as given to `flax.linen.logical_axis_rules`.

    Returns:
      The same rules as `LogicalRules`; the last candidate of every name is None, as in Linen. Pairs
      that Linen could never reach are left out.

    Example:
      >>> import nnx_parallel as nxp
      >>> nxp.LogicalRules.from_linen([("embed", "fsdp"), ("embed", "data")])["embed"]
      (('fsdp',), ('data',), ())
    """
    table: dict[str, list[Any]] = {}
    for name, axes in _pairs(rules):
      table.setdefault(name, []).append(candidate_of(axes))
    ended: dict[str, list[Any]] = {}
    for name, found in table.items():
      kept: list[Any] = []
      for option in [*found, ()]:
        if not any(set(earlier) <= set(option) for earlier in kept):
          kept.append(option)
      ended[name] = kept
    return cls({name: First(kept) for name, kept in ended.items()}, unknown="replicate")

  def __getitem__(self, name: str) -> tuple[Candidate, ...]:
    return self._table[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._table)

  def __len__(self) -> int:
    return len(self._table)

  def __repr__(self) -> str:
    plain = {name: value for name, value in self._table.items() if _is_keyword_argument(name)}
    rest = {name: value for name, value in self._table.items() if name not in plain}
    parts = [f"{name!r}: {show_candidates(value)}" for name, value in rest.items()]
    parts = [f"{{{', '.join(parts)}}}"] if parts else []
    parts += [f"{name}={show_candidates(value)}" for name, value in plain.items()]
    if self.unknown != "error":
      parts.append(f"unknown={self.unknown!r}")
    if self.uneven:
      parts.append(f"uneven={self.uneven}")
    return f"LogicalRules({', '.join(parts)})"

  @check_arguments(ShardingError)
  def replace(
    self,
    names: Mapping[str, Any] | None = None,
    /,
    *,
    unknown: Unknown | None = None,
    uneven: Mapping[str, Uneven] | None = None,
    **rules: Any,
  ) -> LogicalRules:
    """Returns a copy with some rules replaced or added.

    Args:
      names: rules as a mapping, for names that cannot be keyword arguments; merged with `rules`.
      unknown: the policy for names without a rule; None keeps the current policy.
      uneven: by name, the `uneven` policies to replace or add.
      **rules: logical name -> candidates, as in the constructor.

    Returns:
      New rules; `self` is unchanged.
    """
    return LogicalRules(
      {**self._table, **(names or {}), **rules},
      unknown=unknown or self.unknown,
      uneven={**self.uneven, **(uneven or {})},
    )

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, LogicalRules):
      return super().__eq__(other)
    return (self._table, self.unknown, self.uneven) == (other._table, other.unknown, other.uneven)

  def __hash__(self) -> int:
    # By value, so that equal rules give one compiled program (see `use_rules`).
    return hash((frozenset(self._table.items()), self.unknown, frozenset(self.uneven.items())))


def _pairs(rules: Any) -> list[tuple[str, Any]]:
  if isinstance(rules, (tuple, list)):
    found: list[Any] = [*rules]  # pyright: ignore[reportUnknownArgumentType]
    if all(isinstance(pair, (tuple, list)) and len(pair) == 2 and type(pair[0]) is str for pair in found):  # pyright: ignore[reportUnknownArgumentType]
      return found
  raise ShardingError(f"{rules!r:.60} are no pairs.", fix='nxp.LogicalRules.from_linen([("embed", "fsdp")])')


def check_axes(rules: LogicalRules, mesh: Mapping[str, int]) -> list[str]:
  """A note for each axis that looks misspelt; a `ShardingError` for a rule that can never apply."""
  notes: list[str] = []
  for name, options in rules.items():
    absent = [axis for option in options for axis in option if axis not in mesh]
    if all(any(axis not in mesh for axis in option) for option in options):
      near = difflib.get_close_matches(absent[0], list(mesh), 1)
      shown = show_rule(name, First([*map(entry_of, options), None]))
      raise ShardingError(
        f"the rule for {name!r} can never apply: axis {absent[0]!r} is not in the mesh.",
        details=f"rule {name!r} -> {show_candidates(options)}, mesh {dict(mesh)}",
        fix=(f"did you mean {near[0]!r}? Otherwise " if near else "")
        + (
          f"name the axes that share the examples, such as batch={next(iter(mesh))!r}."
          if name == "batch" and not near
          else f"do not split the dim on such a mesh: {shown}."
        ),
      )
    fitting = any(option and mesh.keys() >= {*option} for option in options)
    some = next((option for option in options if mesh.keys() & {*option} < {*option}), ())
    left = tuple(axis for axis in some if axis in mesh)
    if left and not fitting:
      said = f"the rule for {name!r} splits nothing: axis {absent[0]!r} of {some} is not in the mesh"
      fix = f"leave it out, {show_rule(name, entry_of(left))}, or give the mesh this axis with size 1"
      if rules.unknown == "replicate":  # as in Linen, where an absent axis is an error too
        raise ShardingError(f"{said}.", details=f"mesh {dict(mesh)}", fix=f"{fix}.")
      notes.append(f"{said}; {fix}")
    for axis in dict.fromkeys(absent):
      near = difflib.get_close_matches(axis, list(mesh), 1, cutoff=0.75)
      if near:
        notes.append(f"rule {name!r}: axis {axis!r} is not in the mesh (did you mean {near[0]!r}?)")
  return notes


def _is_keyword_argument(name: str) -> bool:
  return name.isidentifier() and not keyword.iskeyword(name) and name not in ("self", "unknown", "uneven")


def candidate_of(value: Any) -> Candidate:
  """One candidate as a tuple of mesh axes, from an axis, several, or None."""
  if value is None:
    return ()
  # Anything else becomes a candidate that the check of its axes refuses.
  return tuple(value) if isinstance(value, (tuple, list)) else (value,)  # pyright: ignore[reportUnknownVariableType]


def _candidates(name: str, value: Any) -> tuple[Candidate, ...]:
  if isinstance(value, list):
    # Elsewhere a list means all axes together, and in Flax the first that fits: neither is guessed.
    entries: tuple[Any, ...] = tuple(tuple(x) if isinstance(x, list) else x for x in value)  # pyright: ignore
    all_axes = (
      f"{show_rule(name, entries)} for all of them, " if all(isinstance(x, str) for x in entries) else ""
    )
    raise ShardingError(
      f"rule for {name!r}: {value!r} is a list, which does not say whether all axes split the dim together.",
      fix=f"{all_axes}{show_rule(name, First(entries))} for the first that fits.",
    )
  # A tuple of tuples is how `Mapping` access returns candidates, so that rules can be built from rules.
  is_many = isinstance(value, First) or (
    isinstance(value, tuple) and value and all(isinstance(item, tuple) for item in value)  # pyright: ignore[reportUnknownVariableType]
  )
  options = tuple(candidate_of(item) for item in (value if is_many else [value])) or ((),)  # pyright: ignore[reportUnknownVariableType]
  for position, option in enumerate(options):
    bad = [axis for axis in option if not isinstance(axis, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if bad or len(set(option)) != len(option):
      raise ShardingError(
        f"rule for {name!r}: {option!r} is not a tuple of distinct mesh axes.",
        fix=f"{show_rule(name, 'fsdp')}, {show_rule(name, ('data', 'fsdp'))}, or several candidates:"
        f" {show_rule(name, First(('tensor', None)))}.",
      )
    # Whatever stops the axes of an earlier candidate (absent, used, uneven) also stops more of them.
    shadow = next((earlier for earlier in options[:position] if set(earlier) <= set(option)), None)
    if shadow is not None:
      raise ShardingError(
        f"rule for {name!r}: candidate {show_candidate(option)} can never be reached after"
        f" {show_candidate(shadow)}.",
        details=f"candidates {show_candidates(options)}",
        fix="put candidates with more axes first and None, which always fits, last; each only once.",
      )
  return options


def show_rule(name: str, value: Any) -> str:
  """One logical rule as Python code, for any name: `mlp=None`, `{'col-alias': None}`."""
  shown = "..." if value is ... else f"nxp.{value!r}" if isinstance(value, First) else repr(value)
  return f"{name}={shown}" if _is_keyword_argument(name) else f"{{{name!r}: {shown}}}"


def show_candidate(option: Candidate) -> str:
  """One candidate as Python code: `'fsdp'`, `('data', 'fsdp')` or `None`."""
  return repr(option[0]) if len(option) == 1 else repr(option or None)


def show_candidates(options: Sequence[Candidate]) -> str:
  """Candidates as Python code."""
  shown = [show_candidate(option) for option in options]
  return shown[0] if len(shown) == 1 else f"LogicalRules.first({', '.join(shown)})"
