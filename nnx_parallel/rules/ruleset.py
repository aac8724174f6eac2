"""All the rules of a plan.

Three small kinds of rule, composed in a `RuleSet`:

* `LogicalRules`: logical name -> mesh axes, with candidates in order of preference;
* `PathRules`: a pattern on the path -> names, for models without annotations;
* a fallback for parameters without names: `fsdp()`, `replicate()` or `require_names()`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from nnx_parallel.core.checked import check_arguments, shorten_traceback
from nnx_parallel.core.text import few
from nnx_parallel.errors import ShardingError
from nnx_parallel.rules.fallback import Fallback, replicate
from nnx_parallel.rules.inputs import InputRules
from nnx_parallel.rules.logical import LogicalRules, show_candidates, show_rule
from nnx_parallel.rules.paths import PathRules

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RuleSet:
  """All rules of a plan. It prints as the list of rules that it was made from.

  Attributes:
    logical: logical name -> mesh axes.
    paths: names for parameters without annotations, by path.
    fallback: what happens to parameters without names.
    inputs: the `InputRules`, if a `batch` rule for dim 0 is not enough.
    optional: the logical names whose axes the mesh may lack, and `"fallback"` if it may lack the axis of the
      fallback. Presets set this.
  """

  logical: LogicalRules = dataclasses.field(default_factory=LogicalRules)
  paths: tuple[PathRules, ...] = ()
  fallback: Fallback | None = None
  inputs: InputRules | None = None
  optional: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

  @classmethod
  @shorten_traceback
  def of(cls, rules: Rules) -> RuleSet:
    """Makes a `RuleSet` from the `rules` argument of `plan`.

    Args:
      rules: None, `LogicalRules`, a mapping of logical names, `PathRules`, a fallback, `InputRules`, a
        `RuleSet`, or a sequence of these.

    Returns:
      One `RuleSet`.

    Raises:
      ShardingError: logical rules, fallbacks or input rules contradict each other, or an object is not a
        rule.
    """
    if isinstance(rules, RuleSet):
      return rules
    items = [*_flatten(rules)]
    for item in items:
      if not isinstance(item, (LogicalRules, PathRules, Fallback, InputRules)):
        raise _no_rule(item)
    tables = [item for item in items if isinstance(item, LogicalRules)]
    return cls(
      functools.reduce(_merge, tables) if tables else LogicalRules(),
      tuple(item for item in items if isinstance(item, PathRules)),
      _single("fallbacks", [item for item in items if isinstance(item, Fallback)]),
      _single("input rules", [item for item in items if isinstance(item, InputRules)]),
      _optional(rules),
    )

  @check_arguments(ShardingError)
  def replace(
    self, names: Mapping[str, Any] | None = None, /, *, fallback: Fallback | None = None, **rules: Any
  ) -> RuleSet:
    """Returns a copy with some logical rules replaced or added. Use it to edit a preset.

    Args:
      names: as for `LogicalRules.replace`.
      fallback: `fsdp()`, `replicate()` or `require_names()`; None keeps the current fallback.
      **rules: logical name -> candidates, and the options of `LogicalRules.replace`.

    Returns:
      New rules; `self` is unchanged.

    Example:
      >>> import nnx_parallel as nxp
      >>> nxp.presets.data_parallel().replace(batch=("data", "fsdp"))
      [LogicalRules(batch=('data', 'fsdp'), unknown='replicate'), replicate()]
    """
    logical = self.logical.replace(names, **rules)
    optional = self.optional - {*(names or ()), *rules} - ({"fallback"} if fallback else set[str]())
    return dataclasses.replace(
      self, logical=logical, fallback=fallback or self.fallback, optional=frozenset(optional)
    )

  def __repr__(self) -> str:
    return f"[{', '.join(map(repr, _flatten(self)))}]"


def on_mesh(rules: RuleSet, mesh: Mapping[str, int]) -> tuple[RuleSet, list[str]]:
  """Rules on a mesh, without a preset's rules for axes that the mesh lacks; and notes that say so."""
  absent = {
    name: {axis for option in options for axis in option} - mesh.keys()
    for name, options in rules.logical.items()
    if name in rules.optional and all(set(option) - mesh.keys() for option in options)
  }
  missing, fallback = set[str]().union(*absent.values()), rules.fallback
  left_out = [*absent]
  if fallback is not None and "fallback" in rules.optional and set(fallback.axes) - mesh.keys():
    left_out.append(str(fallback))
    missing |= set(fallback.axes) - mesh.keys()
    fallback = replicate()
  if not left_out:
    return rules, []
  axes = ", ".join(map(repr, sorted(missing)))
  note = f"the mesh has no axis {axes}, so rules of the preset are left out: {few(left_out)}"
  logical = rules.logical.replace(dict.fromkeys(absent))
  return dataclasses.replace(rules, logical=logical, fallback=fallback), [note]


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


def _optional(rules: Any) -> frozenset[str]:
  if isinstance(rules, RuleSet):
    return rules.optional
  if isinstance(rules, Sequence) and not isinstance(rules, str):
    return frozenset[str]().union(*map(_optional, rules))  # pyright: ignore[reportUnknownArgumentType]
  return frozenset()


def _no_rule(item: object) -> ShardingError:
  if callable(item) and getattr(item, "__module__", "").startswith("nnx_parallel.rules."):
    name = getattr(item, "__name__", "")
    where = "nxp.presets" if item.__module__.endswith(".presets") else "nxp"
    return ShardingError(f"the function {name} was not called, so it is not a rule.", fix=f"{where}.{name}()")
  return ShardingError(
    f"{item!r} is not a sharding rule.",
    fix='pass nxp.LogicalRules(embed="fsdp"), nxp.PathRules([...]), nxp.fsdp(), nxp.replicate(), or a list of'
    " these; the (name, axes) pairs of Flax Linen through nxp.LogicalRules.from_linen(pairs).",
  )


def _single(kind: str, found: Sequence[T]) -> T | None:
  for other in found:
    if other != found[0]:
      raise ShardingError(f"two {kind}: {found[0]} and {other}.", fix="keep one of them.")
  return found[0] if found else None


def _merge(first: LogicalRules, second: LogicalRules) -> LogicalRules:
  clash = [name for name in first if name in second and first[name] != second[name]]
  if clash:
    name = clash[0]
    raise ShardingError(
      f"logical name {name!r} has two rules.",
      details=f"{show_candidates(first[name])} and {show_candidates(second[name])}",
      fix=f"keep one, or change it with nxp.RuleSet.of(rules).replace({show_rule(name, ...)}).",
    )
  unknown = "replicate" if "replicate" in (first.unknown, second.unknown) else "error"
  return LogicalRules({**first, **second}, unknown=unknown, uneven={**first.uneven, **second.uneven})


Rules: TypeAlias = (
  "RuleSet | LogicalRules | PathRules | Fallback | InputRules | Mapping[str, Any] | Sequence[Rules] | None"
)
"""The types of the `rules` of a plan: one kind of rule, a preset, a mapping, or a sequence of these."""
