"""Names -> spec for one array: the only algorithm, with every step that led to the result."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import Entry, axes_by_dim, axes_in, axes_of, count_shards, entry_of
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.nodes import Names
from nnx_parallel.errors import ShardingError
from nnx_parallel.rules.fallback import Fallback
from nnx_parallel.rules.logical import (
  Candidate,
  First,
  LogicalRules,
  Uneven,
  show_candidate,
  show_candidates,
  show_rule,
)


@dataclasses.dataclass(frozen=True)
class Resolution:
  """A spec and how it was found."""

  spec: PartitionSpec  # one entry per dim
  # elements added at the end of each dim so that it divides; all zero unless `uneven="pad"`
  padding: tuple[int, ...]
  steps: tuple[str, ...]  # the attempts and decisions, in order, one sentence each


@check_arguments(ShardingError)
def resolve_spec(
  names: Sequence[Entry],
  shape: Sequence[int],
  mesh: Mapping[str, int] | AnyMesh,
  rules: LogicalRules | None = None,
  *,
  path: str = "<array>",
  uneven: Uneven = "error",
) -> Resolution:
  """Resolves the logical names of one array to mesh axes.

  Dims are resolved from left to right. A name with a rule gets the first candidate whose axes are in the
  mesh, are not used by an earlier dim, and divide the dim. A name without a rule must be a mesh axis. A dim
  with a tuple of names gets the axes of all these names, major to minor. The candidates of the names are
  tried in combination (the candidates of the last name vary first), and the `uneven` policy of the first name
  applies. The order of the rules never matters.

  Args:
    names: one entry for each dim; `None` does not shard the dim.
    shape: the global shape, not the per-device shape.
    mesh: a mesh, or a dict: mesh axis name -> size in devices.
    rules: `LogicalRules`, or a dict: logical name -> candidates. Names of mesh axes need no rule.
    path: the path of the array for error messages, for example `"mlp.up.kernel"`.
    uneven: what to do with a dim that no candidate divides. `"error"` raises an error. `"next"` does not
      shard the dim. `"pad"` rounds the stored dim up for the first candidate. `"replicate"` does not shard
      the dim as soon as one candidate does not divide it, and does not try later candidates.

  Returns:
    A `Resolution`, whose `spec` has `len(shape)` entries.

  Raises:
    ShardingError: a name is unknown, the number of names is not the rank, two dims need the same mesh axis,
      or a dim is uneven.

  Source: GSPMD, arXiv:2105.04663; logical names as in Flax Linen.

  Example:
    >>> import nnx_parallel as nxp
    >>> rules = nxp.LogicalRules(embed="fsdp", mlp="tensor")
    >>> nxp.resolve_spec(("embed", "mlp"), (8, 32), {"fsdp": 4, "tensor": 2}, rules).spec
    P('fsdp', 'tensor')
  """
  array = _Array(
    path, tuple(names), tuple(shape), dict(mesh) if isinstance(mesh, Mapping) else axis_sizes(mesh)
  )
  rules = LogicalRules() if rules is None else rules  # an empty table has a policy for unknown names too
  if len(array.names) != len(array.shape):
    raise ShardingError(
      f"cannot shard {path}: {len(array.names)} names for an array of {len(array.shape)} dims.",
      details=f"shape {array.shape}, names {array.names}",
      fix="give one name for each dim, None for a dim that is not split.",
    )
  used: dict[str, str] = {}  # the axes of earlier dims
  steps: list[str] = []
  entries: list[Entry] = []
  padding: list[int] = []
  for dim, parts in enumerate(map(axes_of, array.names)):
    chosen, extra = _take(array, dim, parts, rules, uneven, used, steps) if parts else ((), 0)
    used |= dict.fromkeys(chosen, f"dim {dim} ({'+'.join(parts)!r} -> {show_candidate(chosen)})")
    entries.append(entry_of(chosen))
    padding.append(extra)
  return Resolution(PartitionSpec(*entries), tuple(padding), tuple(steps))


class _Array(NamedTuple):
  """The array whose names are resolved, and the mesh."""

  path: str
  names: Names
  shape: tuple[int, ...]
  mesh: dict[str, int]


def _candidates(
  array: _Array, dim: int, parts: Sequence[str], rules: LogicalRules, steps: list[str]
) -> Sequence[Candidate]:
  """The candidates of a dim; of several names in one dim, all combinations."""
  found: list[tuple[Candidate, ...]] = []
  for name in parts:
    if name in rules:
      found.append(rules[name])
    elif name in array.mesh:
      found.append(((name,),))
    elif rules.unknown == "replicate":
      steps.append(f"{name!r} has no rule: replicated")
      found.append(((),))
    else:
      near = difflib.get_close_matches(name, [*rules, *array.mesh], 1)
      used = {a for part in array.names for n in axes_of(part) for a in itertools.chain(*rules.get(n, ()))}
      axis = next((axis for axis in array.mesh if axis not in used), None)
      raise ShardingError(
        f"cannot shard {array.path}: dim {dim} is named {name!r}, which is neither a rule nor a mesh axis.",
        details=f"rules {', '.join(rules) or 'none'}; mesh {array.mesh}",
        fix=(f"did you mean {near[0]!r}? " if near else "")
        + ("" if axis is None else f"Add a rule, nxp.LogicalRules({show_rule(name, axis)}), or ")
        + f"{show_rule(name, None)} not to split it.",
      )
  return [*dict.fromkeys(tuple(itertools.chain(*choice)) for choice in itertools.product(*found))]


def _take(
  array: _Array,
  dim: int,
  parts: Sequence[str],
  rules: LogicalRules,
  uneven: Uneven,
  used: Mapping[str, str],
  steps: list[str],
) -> tuple[Candidate, int]:
  """The axes of a dim with names, and its padding; adds the steps that led there."""
  name, policy = "+".join(parts), rules.uneven.get(parts[0], uneven)
  options = _candidates(array, dim, parts, rules, steps)
  refused: list[tuple[str, str]] = []
  undivided: list[Candidate] = []
  for option in options:
    kind, why = _refusal(array, dim, option, used)
    if not kind:
      if option != (name,):
        tried = "".join(f"; not {n}: {w}" for n, w in refused)
        steps.append(f"{name!r} -> {show_candidate(option)}{tried}")
      return option, 0
    if kind == "uneven" and policy == "replicate":
      steps.append(f"{name!r} -> replicated: {why} (uneven='replicate')")
      return (), 0
    refused.append((show_candidate(option), why))
    undivided += [option] if kind == "uneven" else []
  if not undivided:
    raise _no_candidate(array, dim, name, options, refused)
  if policy == "next":
    steps.append(f"{name!r} -> replicated: {refused[-1][1]}, and no candidate is left (uneven='next')")
    return (), 0
  if policy == "pad":
    option, size = undivided[0], array.shape[dim]
    extra = -size % count_shards(option, array.mesh)
    steps.append(f"{name!r} -> {show_candidate(option)}: {size} is padded to {size + extra}")
    return option, extra
  raise _undivided(array, dim, name, undivided[0])


def _refusal(array: _Array, dim: int, option: Candidate, used: Mapping[str, str]) -> tuple[str, str]:
  """Why a dim cannot have a candidate: the kind of reason, and the reason; empty if it can."""
  for axis in option:
    if axis not in array.mesh:
      near = difflib.get_close_matches(axis, list(array.mesh), 1)
      hint = f" (did you mean {near[0]!r}?)" if near else ""
      return "absent", f"axis {axis!r} is not in the mesh{hint}"
  for axis in option:
    if axis in used:
      return "used", f"axis {axis!r} is already used by {used[axis]}"
  if len(set(option)) != len(option):
    return "used", f"{show_candidate(option)} names an axis twice"
  if array.shape[dim] % count_shards(option, array.mesh):
    return "uneven", f"{count_shards(option, array.mesh)} does not divide {array.shape[dim]}"
  return "", ""


def _undivided(array: _Array, dim: int, name: str, option: Candidate) -> ShardingError:
  size, shards = array.shape[dim], count_shards(option, array.mesh)
  # A path rule may name the mesh axis itself.
  whole = f"nxp.RuleSet.of(rules).replace({show_rule(name, None)})"
  other = "None in its rule" if name in array.mesh else whole
  return ShardingError(
    f"cannot shard {array.path}: dim {dim} ({name!r}) has length {size}, which {shards} shards cannot split"
    " evenly.",
    details=f"shape {array.shape}, names {array.names}, rule {name!r} -> {option}, mesh {array.mesh}",
    fix=f'pad it (uneven="pad", to {size + -size % shards}), or replicate it with {other}.',
  )


def _no_candidate(
  array: _Array, dim: int, name: str, options: Sequence[Candidate], refused: Sequence[tuple[str, str]]
) -> ShardingError:
  offer = show_rule(name, First([*map(entry_of, options), None]))
  reasons = "; ".join(f"{option}: {why}" for option, why in refused)
  if all(any(axis not in array.mesh for axis in option) for option in options):
    fix = f"add the axis to the mesh (size 1 is fine), or do not split the dim: {offer}."
  else:
    fix = f"give {name!r} another candidate, or do not split it: {offer}."
  return ShardingError(
    f"cannot shard {array.path}: no candidate for dim {dim} ({name!r}) fits: {reasons}.",
    details=f"shape {array.shape}, names {array.names}, rule {name!r} -> {show_candidates(options)},"
    f" mesh {array.mesh}",
    fix=fix,
  )


@dataclasses.dataclass(frozen=True)
class Extended:
  """A spec with more axes."""

  spec: PartitionSpec  # one entry per dim
  padding: tuple[int, ...]  # elements to add at the end of each dim so that it divides
  added: tuple[tuple[Candidate, int], ...]  # the added axes and their dim, in order


def add_axes(
  spec: PartitionSpec,
  shape: Sequence[int],
  axes: Sequence[str],
  mesh: Mapping[str, int],
  *,
  rows: int | None = None,
  whole: Container[int] = (),
  pad: bool = False,
) -> Extended:
  """Splits an array over more axes: `fsdp()` for parameters, a stage of ZeRO for their state."""
  # All axes go to the largest free dim that they divide, else to the dim with the largest remaining size,
  # behind its own axes. If they jointly divide no dim, the largest subset that divides one comes first; `pad`
  # pads a dim instead. `rows`, of a look-up table, is tried first, and dims in `whole` are not split.
  entries, sizes = [axes_of(entry) for entry in spec], list(shape)
  added: list[tuple[Candidate, int]] = []
  while left := tuple(axis for axis in axes if not any(axis in entry for entry in entries)):
    local = [size // count_shards(entry, mesh) for size, entry in zip(sizes, entries, strict=True)]
    # Ties go to the last dim, so that a square kernel is split along its output features.
    order = sorted(
      (d for d in range(len(local)) if d not in whole),
      key=lambda d: (d == rows, not entries[d], local[d], d),
      reverse=True,
    )
    found = next(
      (
        (part, d)
        for part in _parts(left, mesh)
        for d in order
        if local[d] > 0 and local[d] % count_shards(part, mesh) == 0
      ),
      None,
    )
    if pad and (found is None or found[0] != left or (rows is not None and found[1] != rows)):
      found = next(((left, d) for d in order if local[d] > 1), found)
    if found is None:
      break
    part, dim = found
    entries[dim] += part
    sizes[dim] += -sizes[dim] % count_shards(entries[dim], mesh)
    added.append(found)
  padding = tuple(size - before for size, before in zip(sizes, shape, strict=True))
  return Extended(PartitionSpec(*map(entry_of, entries)), padding, tuple(added))


def _parts(axes: Candidate, mesh: Mapping[str, int]) -> list[Candidate]:
  """All axes, then subsets of them, larger numbers of shards first; among equals, the minor axes."""
  some = (
    part for count in range(len(axes) - 1, 0, -1) for part in [*itertools.combinations(axes, count)][::-1]
  )
  ways = {part: count_shards(part, mesh) for part in some}
  return [axes, *sorted((part for part in ways if ways[part] > 1), key=lambda part: -ways[part])]


def extend_spec(
  spec: PartitionSpec,
  shape: Sequence[int],
  mesh: Mapping[str, int],
  fallback: Fallback,
  *,
  rows: int | None = None,
  whole: Container[int] = (),
  pad: bool = False,
) -> tuple[Extended, str]:
  """Gives the axes of an `fsdp` fallback to an array, as `add_axes`; also returns the reason."""
  missing = [axis for axis in fallback.axes if axis not in mesh]
  if missing:
    near = difflib.get_close_matches(missing[0], [*mesh], 1)
    raise ShardingError(
      f"{fallback} needs the mesh axis {missing[0]!r}, which is not in the mesh.",
      details=f"mesh {dict(mesh)}",
      fix=f"nxp.fsdp({(near or [*mesh])[0]!r}), or add {missing[0]}=... to the mesh.",
    )
  taken = {*axes_in(spec)}
  left = tuple(axis for axis in fallback.axes if axis not in taken)
  size, unchanged = math.prod(shape), Extended(spec, (0,) * len(shape), ())
  if not left:
    return unchanged, f"axis {fallback.axes[0]!r} is already used"
  if size <= fallback.min_size:
    return unchanged, f"{size} elements, at most min_size={fallback.min_size}"
  found = add_axes(spec, shape, left, mesh, rows=rows, whole=whole, pad=pad)
  ways = count_shards(left, mesh)
  not_rows = ""
  if rows is not None and not any(dim == rows for _, dim in found.added):
    own = count_shards(axes_of(spec[rows]), mesh)
    not_rows = f"; not the rows of this look-up table: {ways * own} does not divide {shape[rows]}"
  if not found.added:
    return found, f"no dim of {tuple(shape)} divides by {ways} ({show_candidate(left)}){not_rows}"
  why = "; ".join(
    _said(spec, shape, mesh, axes, dim, found.padding[dim], dim == rows) for axes, dim in found.added
  )
  part = "" if found.added[0][0] == left else f"; no dim of {tuple(shape)} divides by all {ways}"
  return found, why + part + not_rows


def _said(
  spec: PartitionSpec,
  shape: Sequence[int],
  mesh: Mapping[str, int],
  axes: Candidate,
  dim: int,
  extra: int,
  rows: bool,
) -> str:
  ways, own = count_shards(axes, mesh), axes_of(spec[dim])
  behind = f" behind {show_candidate(own)}" if own else ""
  which = (
    "the rows of a look-up table" if rows else f"the largest {'' if own else 'free '}dim that {ways} divides"
  )
  if extra:
    which = f"padded to {shape[dim] + extra}" + (", the rows of a look-up table" if rows else "")
  return f"{show_candidate(axes)}{behind} on dim {dim} ({shape[dim]}), {which}"


def count_shards_by_dim(spec: PartitionSpec, ndim: int, mesh: Mapping[str, int]) -> tuple[int, ...]:
  """The number of shards of each dim; `spec` may have fewer entries than dims."""
  return tuple(count_shards(axes, mesh) for axes in axes_by_dim(spec, ndim))
