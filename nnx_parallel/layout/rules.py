"""How names become mesh axes, what un-annotated parameters are called, and what happens to the rest.

Three small kinds of rule, composed in a `RuleSet`:

* `LogicalRules`: logical name -> mesh axes, with candidates in order of preference;
* `PathRules`: a pattern on the path -> names, for models that nobody annotated;
* a fallback for parameters without names: `fsdp()`, `replicate()` or `error()`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.inputs import InputRules
from nnx_parallel.layout.variables import Names, Path, entry_of, path_str

Candidate = tuple[str, ...]
"""Mesh axes that cut one dim together, major to minor; `()` keeps the dim whole."""
Uneven = Literal["error", "next", "pad", "replicate"]
WHOLE_DIMS = "..."
"""In the names of a path rule: any number of whole dims. Stored as text, so that rules go through JSON."""
UNEVEN: tuple[Uneven, ...] = ("error", "next", "pad", "replicate")


class LogicalRules(Mapping[str, tuple[Candidate, ...]]):
  """Logical axis name -> mesh axes, as candidates in order of preference.

  A value is one candidate (`"fsdp"`; `("data", "fsdp")` for both, major to minor; `None` or `()` for whole)
  or a *list* of candidates: the first one whose axes are in the mesh, are not yet used in the same spec,
  and divide the dim is taken. The order of the names never matters; dims are resolved left to right.

  Args:
    names: the rules as a mapping, for names that are not Python keywords; merged with `rules`.
    unknown: what happens to a name that has no rule and is not a mesh axis: `"error"` (default), or
      `"whole"` as in Flax Linen.
    uneven: the policy for dims that do not divide, by name, where it differs from the plan's.
    **rules: logical name -> candidates.

  Raises:
    ShardingError: a name given twice, an axis twice in a candidate, a candidate that can never be reached.

  Example:
    >>> import nnx_parallel as nxp
    >>> rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", heads=["tensor", None])
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
    unknown: Literal["error", "whole"] = "error",
    uneven: Mapping[str, Uneven] | None = None,
    **rules: Any,
  ):
    twice = sorted(set(names or {}) & set(rules))
    if twice:
      raise ShardingError(f"logical name {twice[0]!r} has two rules.", fix="keep one of them.")
    if unknown not in ("error", "whole"):
      raise ShardingError(
        f"unknown={unknown!r} is not a policy for names without a rule.", fix='use "error" or "whole".'
      )
    self.unknown: Literal["error", "whole"] = unknown
    self.uneven: dict[str, Uneven] = dict(uneven or {})
    self._table = {k: _candidates(k, v) for k, v in {**(names or {}), **rules}.items()}
    for name, policy in self.uneven.items():
      if policy not in UNEVEN or name not in self._table:
        raise ShardingError(
          f"uneven={{{name!r}: {policy!r}}} does not fit these rules.",
          details=f"names {', '.join(self._table)}; policies {', '.join(UNEVEN)}",
          fix=f"uneven={{{next(iter(self._table), 'vocab')!r}: 'pad'}}",
        )

  @classmethod
  def from_linen(cls, rules: Iterable[tuple[str, Any]]) -> LogicalRules:
    """Reads Flax Linen's `(name, axes)` pairs: a repeated name adds a candidate, an unknown name is whole.

    Args:
      rules: pairs as given to `flax.linen.logical_axis_rules`.

    Returns:
      The same rules as `LogicalRules`; every name may end whole, as in Linen. Pairs that Linen could never
      reach are left out.

    Example:
      >>> import nnx_parallel as nxp
      >>> nxp.LogicalRules.from_linen([("embed", "fsdp"), ("embed", "data")])["embed"]
      (('fsdp',), ('data',), ())
    """
    table: dict[str, list[Any]] = {}
    for name, axes in rules:
      table.setdefault(name, []).append(_candidate(axes))
    ended: dict[str, list[Any]] = {}
    for name, found in table.items():
      kept: list[Any] = []
      for option in [*found, ()]:
        if not any(set(earlier) <= set(option) for earlier in kept):
          kept.append(option)
      ended[name] = kept
    return cls(ended, unknown="whole")

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

  def replace(
    self,
    names: Mapping[str, Any] | None = None,
    /,
    *,
    unknown: Literal["error", "whole"] | None = None,
    uneven: Mapping[str, Uneven] | None = None,
    **rules: Any,
  ) -> LogicalRules:
    """A copy with some rules replaced or added.

    Args:
      names: logical name -> candidates, for names that are not Python keywords; merged with `rules`.
      unknown: the policy for names without a rule; None keeps it.
      uneven: policies by name, replaced or added.
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

  def mesh_axes(self) -> tuple[str, ...]:
    """Every mesh axis that some candidate names, in order of first use."""
    found = (axis for options in self._table.values() for option in options for axis in option)
    return tuple(dict.fromkeys(found))

  def check_axes(self, mesh: Mapping[str, int]) -> list[str]:
    """Looks for axes that the mesh does not have.

    Args:
      mesh: mesh axis name -> size in devices.

    Returns:
      One note for each axis that looks like a misspelt one: its candidates are passed over.

    Raises:
      ShardingError: a rule none of whose candidates can ever apply on this mesh.
    """
    notes: list[str] = []
    for name, options in self._table.items():
      absent = [axis for option in options for axis in option if axis not in mesh]
      if all(any(axis not in mesh for axis in option) for option in options):
        near = difflib.get_close_matches(absent[0], list(mesh), 1)
        shown = show_rule(name, [*map(entry_of, options), None])
        raise ShardingError(
          f"the rule for {name!r} can never apply: axis {absent[0]!r} is not in the mesh.",
          details=f"rule {name!r} -> {show_candidates(options)}, mesh {dict(mesh)}",
          fix=(f"did you mean {near[0]!r}? Otherwise let" if near else "let")
          + f" the dim stay whole on such a mesh: {shown}.",
        )
      for axis in dict.fromkeys(absent):
        near = difflib.get_close_matches(axis, list(mesh), 1, cutoff=0.75)
        if near:
          notes.append(f"rule {name!r}: axis {axis!r} is not in the mesh (did you mean {near[0]!r}?)")
    return notes


def _mended(window: str | tuple[str, ...]) -> str | tuple[str, ...]:
  """A pattern as it was probably meant: as in a shell, where `*` stands for anything; else literally."""

  def part(pattern: str) -> str:
    try:
      re.compile(pattern)
    except re.error:
      return ".*".join(map(re.escape, pattern.split("*")))
    return pattern

  return part(window) if isinstance(window, str) else tuple(map(part, window))


class PathRules:
  r"""Names for parameters that nobody annotated, by pattern on their path. The first match wins.

  A pattern is a regular expression that must match the *whole* dotted path (`r".*attn\.(q|k|v)\.kernel"`),
  or a *window*: a tuple of regular expressions, each matching the whole of one of as many consecutive path
  parts (`("SelfAttention", "(q|k|v)", "kernel")`). A value is a tuple with one name (logical, or a mesh
  axis) per dim, where one `...` stands for any number of whole dims; or a `PartitionSpec`. None and
  `PartitionSpec()` keep the parameter whole, whatever the fallback is. With `(None, None)` its dims have no
  names, and `fsdp(extend=True)` may still split one.

  Args:
    rules: `(pattern, names)` pairs in order.
    strict: refuse to plan while some parameter matches no rule (all of them are listed), unless a fallback
      takes it.
    optional: rules that match nothing are no reason for a note in the plan: a table for a family of models.

  Raises:
    ShardingError: a pattern that does not compile, or a value that is not names.

  Source: regex windows, T5X and Hugging Face Flax `partition_rules`.

  Example:
    >>> import nnx_parallel as nxp
    >>> rules = nxp.PathRules([(("attn", "(q|k|v)", "kernel"), (None, "tensor")), (r".*\.scale", None)])
    >>> rules.match(("blocks", 0, "attn", "q", "kernel")).names
    (None, 'tensor')
  """

  def __init__(
    self,
    rules: Iterable[tuple[str | Sequence[str], Sequence[Any] | None]] | Mapping[Any, Any],
    *,
    strict: bool = True,
    optional: bool = False,
  ):
    pairs: list[tuple[Any, Any]] = list(rules.items() if isinstance(rules, Mapping) else rules)
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

  def match(self, path: Path) -> PathRule | None:
    """The first rule that matches a path, or None.

    Args:
      path: path parts, as in `LeafPlan.path`.

    Returns:
      The rule, with its `.pattern` and `.names`.
    """
    return next((rule for rule in self.rules if rule.matches(path)), None)

  def pairs(self) -> list[tuple[str | tuple[str, ...], Names | None]]:
    """The `(pattern, names)` pairs, to edit and build new rules from."""
    return [(rule.pattern, rule.names) for rule in self.rules]

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, PathRules):
      return NotImplemented
    return (self.rules, self.strict, self.optional) == (other.rules, other.strict, other.optional)

  def __hash__(self) -> int:
    return hash((self.rules, self.strict, self.optional))

  def __repr__(self) -> str:
    lines = [f"  ({rule.pattern!r}, {show_names(rule.names)})," for rule in self.rules]
    options = ("" if self.strict else ", strict=False") + (", optional=True" if self.optional else "")
    return "\n".join(["PathRules([", *lines, f"]{options})"])


@dataclasses.dataclass(frozen=True)
class PathRule:
  """One pattern and the names it gives; see `PathRules`."""

  pattern: str | tuple[str, ...]
  names: Names | None

  @classmethod
  def of(cls, pattern: str | Sequence[str], names: Any) -> PathRule:
    """Checks and normalises one `(pattern, names)` pair."""
    window = pattern if isinstance(pattern, str) else tuple(pattern)
    if not window:
      raise ShardingError(f"path rule {window!r} has no pattern.", fix="r'.*' matches every path.")
    try:
      for part in (window,) if isinstance(window, str) else window:
        re.compile(part)
    except re.error as error:
      raise ShardingError(
        f"path rule {window!r} is not a regular expression: {error}.",
        fix=f"PathRules([({_mended(window)!r}, {names!r})])",
      ) from error
    if names is None or (isinstance(names, PartitionSpec) and not len(names)):
      return cls(window, None)
    if isinstance(names, PartitionSpec):
      names = (*names, ...)  # as in jax, the dims that a spec leaves out are whole
    entries: tuple[Any, ...] = tuple(names) if isinstance(names, (tuple, list)) else ()
    entries = tuple(WHOLE_DIMS if entry is ... else entry for entry in entries)
    if not isinstance(names, (tuple, list)) or not all(map(_is_path_entry, entries)):
      raise ShardingError(
        f"path rule {window!r} has the value {names!r}, which is not one name for each dim.",
        fix=f"({names!r}, None), or None to keep the parameter whole.",
      )
    if entries.count(WHOLE_DIMS) > 1:
      raise ShardingError(
        f"path rule {window!r} has the value {show_names(entries)}, with two ....",
        fix="keep one; it stands for any number of whole dims.",
      )
    return cls(window, tuple(tuple(e) if isinstance(e, list) else e for e in entries))

  def names_for(self, ndim: int, *, where: str) -> Names | None:
    """The names for an array, with `...` written out.

    Args:
      ndim: rank of the array.
      where: its path, for errors.

    Returns:
      One entry per dim, or None: the rule keeps the array whole.

    Raises:
      ShardingError: the rule has another number of names.
    """
    if self.names is None:
      return None
    names: list[Any] = list(self.names)
    if WHOLE_DIMS in names:
      at = names.index(WHOLE_DIMS)
      names[at : at + 1] = [None] * (ndim - len(names) + 1)
    if len(names) != ndim:
      given = len(self.names) - self.names.count(WHOLE_DIMS)
      raise ShardingError(
        f"path rule {self.pattern!r} gives {given} names to {where}, an array of {ndim} dims.",
        details=f"names {show_names(self.names)}",
        fix="write one entry for each dim (None: whole; ... stands for any number of whole dims), or put a"
        " rule for it in front of this one.",
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


@dataclasses.dataclass(frozen=True)
class Fallback:
  """What happens to parameters without names; made by `fsdp`, `replicate` and `error`."""

  mode: Literal["fsdp", "replicate", "error"]
  axes: Candidate = ()
  min_size: int = 0
  extend: bool = False

  def __repr__(self) -> str:
    if self.mode != "fsdp":
      return f"{self.mode}()"
    axis = self.axes[0] if len(self.axes) == 1 else self.axes
    return f"fsdp({axis!r}, min_size={self.min_size}, extend={self.extend})"


def fsdp(axis: str | Sequence[str] = "fsdp", *, min_size: int = 2**18, extend: bool = True) -> Fallback:
  """Fallback: cut an array's largest free dim that divides, over `axis` (ZeRO-3).

  It holds for every Variable that nothing else names: parameters, and batch statistics or caches that are
  as large as parameters. RNG state stays whole. A look-up table (of `nnx.Embed`) is cut by rows, also where
  they are split already, and by columns only if its rows do not divide: by columns, the activations would
  come out split by feature, and be sent instead of the weights. Where no free dim divides, an array is cut
  behind the axes that it has, or over the largest part of `axis` that divides; `plan(uneven="pad")` pads it.

  Args:
    axis: mesh axis, or several (major to minor) that cut a dim together.
    min_size: arrays with at most this many *elements* stay whole.
    extend: also give the axis to a free dim of a Variable that has names, so that for example a
      tensor-parallel kernel is split over both axes.

  Returns:
    A fallback for the `rules` argument of `plan` and `create_sharded_model`.

  Raises:
    ShardingError: no axis, or one that is named twice.

  Source: ZeRO, arXiv:1910.02054; the threshold and the choice of dim follow the UvA deep-learning notebooks.

  Example:
    >>> import jax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(512, 1024, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp())
    >>> plan["kernel"].spec
    P(None, 'fsdp')
  """
  axes = _candidate(axis)
  if not axes:
    raise ShardingError("fsdp() needs a mesh axis.", fix='fsdp("fsdp")')
  if len(set(axes)) != len(axes):
    raise ShardingError(f"fsdp({axes!r}) names an axis twice.", fix=f"fsdp({tuple(dict.fromkeys(axes))!r})")
  return Fallback("fsdp", axes, min_size, extend)


def replicate() -> Fallback:
  """Fallback: parameters without names stay whole on every device (the default; the audit reports them).

  Returns:
    A fallback for the `rules` argument.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8), nxp.replicate())
    >>> plan["kernel"].copies, plan["kernel"].decision.reason
    (8, 'no annotation, replicate()')
  """
  return Fallback("replicate")


def error() -> Fallback:
  """Fallback: a parameter without names is an error that lists all of them.

  Returns:
    A fallback for the `rules` argument.

  Example:
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> try:
    ...   nxp.plan(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8), nxp.error())
    ... except nxp.ShardingError as error:
    ...   print(error)
    incomplete partition spec: 2 parameters have no annotation and match no rule.
        bias
        kernel
      Fix: ...
  """
  return Fallback("error")


@dataclasses.dataclass(frozen=True)
class RuleSet:
  """All the rules of a plan; printed as the list of rules that it was made from.

  Attributes:
    logical: logical name -> mesh axes.
    paths: names for parameters that nobody annotated, by path.
    fallback: what happens to parameters without names.
    inputs: how inputs are split, where the `batch` rule on dim 0 is not enough.
  """

  logical: LogicalRules = dataclasses.field(default_factory=LogicalRules)
  paths: tuple[PathRules, ...] = ()
  fallback: Fallback | None = None
  inputs: InputRules | None = None

  @classmethod
  def of(cls, rules: Any) -> RuleSet:
    """Reads whatever the `rules` argument may be: one kind of rule, a preset, a mapping, or a sequence.

    Args:
      rules: None, `LogicalRules`, a mapping of logical names, `PathRules`, a fallback, `InputRules`, a
        `RuleSet`, or a sequence of these.

    Returns:
      One `RuleSet`.

    Raises:
      ShardingError: two logical tables, fallbacks or input rules that disagree, or something that is not a
        rule.
    """
    if isinstance(rules, RuleSet):
      return rules
    logical: LogicalRules | None = None
    paths: list[PathRules] = []
    fallback: Fallback | None = None
    inputs: InputRules | None = None
    for item in _flatten(rules):
      if isinstance(item, LogicalRules):
        logical = item if logical is None else _merge(logical, item)
      elif isinstance(item, PathRules):
        paths.append(item)
      elif isinstance(item, Fallback):
        if fallback not in (None, item):
          raise ShardingError(
            f"two fallbacks: {fallback} and {item}.",
            fix="keep one; the fallback is what comes last.",
          )
        fallback = item
      elif isinstance(item, InputRules):
        if inputs not in (None, item):
          raise ShardingError(f"two input rules: {inputs} and {item}.", fix="keep one of them.")
        inputs = item
      else:
        if callable(item) and getattr(item, "__module__", "").startswith("nnx_parallel.layout."):
          name = getattr(item, "__name__", "")
          raise ShardingError(f"the function {name} was not called, so it is no rule.", fix=f"{name}()")
        raise ShardingError(
          f"{item!r} is not a sharding rule.",
          fix='pass LogicalRules(embed="fsdp"), PathRules([...]), fsdp(), replicate(), or a list of these;'
          " the (name, axes) pairs of Flax Linen through LogicalRules.from_linen(pairs).",
        )
    return cls(logical if logical is not None else LogicalRules(), tuple(paths), fallback, inputs)

  def replace(
    self, names: Mapping[str, Any] | None = None, /, *, fallback: Fallback | None = None, **rules: Any
  ) -> RuleSet:
    """A copy with some logical rules replaced or added: how a preset is edited.

    Args:
      names: as for `LogicalRules.replace`.
      fallback: `fsdp()`, `replicate()` or `error()` instead of its own; None keeps it.
      **rules: logical name -> candidates, and the options of `LogicalRules.replace`.

    Returns:
      New rules; `self` is unchanged.

    Example:
      >>> import nnx_parallel as nxp
      >>> nxp.presets.data_parallel().replace(batch=("data", "fsdp"))
      [LogicalRules(batch=('data', 'fsdp'), unknown='whole'), replicate()]
    """
    logical = self.logical.replace(names, **rules)
    return dataclasses.replace(self, logical=logical, fallback=fallback or self.fallback)

  def with_uneven(self, policy: Uneven) -> RuleSet:
    """The same rules, with a policy for the names that have none of their own.

    Args:
      policy: as in `plan`; `"error"` changes nothing, being what a name without a policy has.

    Returns:
      New rules, so that whoever resolves a name later (`constrain`, say) treats it as the plan did.
    """
    if policy == "error" or not len(self.logical):
      return self
    uneven = dict(self.logical.uneven)
    for name in self.logical:
      uneven.setdefault(name, policy)
    logical = LogicalRules(dict(self.logical), unknown=self.logical.unknown, uneven=uneven)
    return dataclasses.replace(self, logical=logical)

  def __repr__(self) -> str:
    return f"[{', '.join(map(repr, _flatten(self)))}]"


def _flatten(rules: Any) -> Iterator[Any]:
  if rules is None:
    return
  if isinstance(rules, RuleSet):
    if rules.logical != LogicalRules():
      yield rules.logical
    yield from rules.paths
    yield from (item for item in (rules.fallback, rules.inputs) if item is not None)
  elif isinstance(rules, Mapping) and not isinstance(rules, LogicalRules):
    yield LogicalRules(rules)  # pyright: ignore[reportUnknownArgumentType]
  elif isinstance(rules, Sequence) and not isinstance(rules, str):
    for item in rules:  # pyright: ignore[reportUnknownVariableType]
      yield from _flatten(item)
  else:
    yield rules


def _merge(first: LogicalRules, second: LogicalRules) -> LogicalRules:
  clash = [name for name in first if name in second and first[name] != second[name]]
  if clash:
    name = clash[0]
    raise ShardingError(
      f"logical name {name!r} has two rules.",
      details=f"{show_candidates(first[name])} and {show_candidates(second[name])}",
      fix=f"keep one, or change it with rules.replace({show_rule(name, ...)}).",
    )
  unknown = "whole" if "whole" in (first.unknown, second.unknown) else "error"
  return LogicalRules({**first, **second}, unknown=unknown, uneven={**first.uneven, **second.uneven})


def _is_keyword_argument(name: str) -> bool:
  return name.isidentifier() and not keyword.iskeyword(name) and name not in ("self", "unknown", "uneven")


def _candidate(value: Any) -> Candidate:
  if value is None:
    return ()
  # Anything else becomes a candidate that the check of its axes refuses.
  return tuple(value) if isinstance(value, (tuple, list)) else (value,)  # pyright: ignore[reportUnknownVariableType]


def _candidates(name: str, value: Any) -> tuple[Candidate, ...]:
  # A list holds candidates; everything else is one. A tuple of tuples is how `Mapping` access returns
  # candidates, so that rules can be built from rules.
  is_many = isinstance(value, list) or (
    isinstance(value, tuple) and value and all(isinstance(item, tuple) for item in value)  # pyright: ignore[reportUnknownVariableType]
  )
  options = tuple(_candidate(item) for item in (value if is_many else [value])) or ((),)  # pyright: ignore[reportUnknownVariableType]
  for position, option in enumerate(options):
    bad = [axis for axis in option if not isinstance(axis, str)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if bad or len(set(option)) != len(option):
      raise ShardingError(
        f"rule for {name!r}: {option!r} is not a tuple of distinct mesh axes.",
        fix=f"{show_rule(name, 'fsdp')}, {show_rule(name, ('data', 'fsdp'))}, or a list of candidates:"
        f" {show_rule(name, ['tensor', None])}.",
      )
    # Whatever stops the axes of an earlier candidate (absent, used, uneven) also stops more of them.
    shadow = next((earlier for earlier in options[:position] if set(earlier) <= set(option)), None)
    if shadow is not None:
      raise ShardingError(
        f"rule for {name!r}: candidate {show_candidate(option)} can never be reached after"
        f" {show_candidate(shadow)}.",
        details=f"candidates {show_candidates(options)}",
        fix="put candidates with more axes first and None (whole), which always fits, last; each only once.",
      )
  return options


def _is_path_entry(entry: Any) -> bool:
  if isinstance(entry, (tuple, list)):
    return all(isinstance(name, str) for name in entry)  # pyright: ignore[reportUnknownVariableType]
  return entry is None or isinstance(entry, str)


def show_names(names: Sequence[Any] | None) -> str:
  """Names as they would be typed: `('embed', ..., None)`."""
  if names is None:
    return "None"
  shown = ["..." if entry == WHOLE_DIMS else repr(entry) for entry in names]
  return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"


def show_rule(name: str, value: Any) -> str:
  """One logical rule as it would be typed, whatever its name: `mlp=None`, `{'col-alias': None}`."""
  shown = "..." if value is ... else repr(value)
  return f"{name}={shown}" if _is_keyword_argument(name) else f"{{{name!r}: {shown}}}"


def show_candidate(option: Candidate) -> str:
  """One candidate as it would be typed: `'fsdp'`, `('data', 'fsdp')` or `None`."""
  return repr(option[0]) if len(option) == 1 else repr(option or None)


def show_candidates(options: Sequence[Candidate]) -> str:
  """Candidates as they would be typed; a list when there are several."""
  shown = [show_candidate(option) for option in options]
  return shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
