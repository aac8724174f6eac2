"""Declares how another program's weights correspond to ours; one declaration reads and writes.

    mapping = Mapping(
      Rule("model.embed_tokens.weight", "embed.embedding"),
      Rule("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.up.kernel", Transpose(1, 0)),
      Rule("model.layers.{i}.q_proj.weight", "layers.{i}.q.kernel", Transpose(1, 0), Split(1, 64)),
      ignore=["*.rotary_emb.inv_freq"],
    )

Operations are written from theirs to ours and undone in reverse. A `{name}` stands for a number. When only
their name has it, their arrays are stacked (`Stack`); when only ours has it, theirs is cut into layers
(`Unstack`). A rule may name several of our paths: they are tied, and written once.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
import re
import runpy
from collections.abc import Container, Iterable, Sequence
from collections.abc import Mapping as MappingType
from typing import Any, TypeAlias

import jax
import numpy as np

from nnx_parallel.checkpoint import views
from nnx_parallel.checkpoint.views import View
from nnx_parallel.errors import CheckpointError

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
  """Shape and dtype of an array that does not exist yet."""

  shape: Shape
  dtype: np.dtype[Any]


@dataclasses.dataclass(frozen=True, init=False)
class Transpose:
  """Reorders dims: dim k of ours is their dim `order[k]`."""

  order: tuple[int, ...]

  def __init__(self, *order: int):
    object.__setattr__(self, "order", order)

  def misfit(self, theirs: Shape) -> str:
    """Why it cannot be done to an array of theirs of this shape; empty when it can."""
    return "" if sorted(self.order) == list(range(len(theirs))) else f"does not name the dims of {theirs}"

  def view(self, source: View) -> View:
    """Ours on theirs."""
    return views.Transposed(source, self.order)

  def apply(self, theirs: jax.Array) -> jax.Array:
    """Ours from theirs, on devices."""
    return theirs.transpose(self.order)

  def theirs(self, ours: Spec) -> Spec:
    """Their shape."""
    return Spec(tuple(ours.shape[int(k)] for k in np.argsort(self.order)), ours.dtype)


@dataclasses.dataclass(frozen=True)
class Split:
  """Splits their dim `dim` into two of ours, the second of `size` elements: heads out of features."""

  dim: int
  size: int

  def misfit(self, theirs: Shape) -> str:
    """Why it cannot be done to an array of theirs of this shape; empty when it can."""
    fits = 0 <= self.dim < len(theirs) and self.size > 0 and not theirs[self.dim] % self.size
    return "" if fits else f"cannot split dim {self.dim} of {theirs} into rows of {self.size}"

  def view(self, source: View) -> View:
    """Ours on theirs."""
    return views.SplitDim(source, self.dim, self.size)

  def apply(self, theirs: jax.Array) -> jax.Array:
    """Ours from theirs, on devices."""
    return theirs.reshape((*theirs.shape[: self.dim], -1, self.size, *theirs.shape[self.dim + 1 :]))

  def theirs(self, ours: Spec) -> Spec:
    """Their shape."""
    merged = ours.shape[self.dim] * ours.shape[self.dim + 1]
    return Spec((*ours.shape[: self.dim], merged, *ours.shape[self.dim + 2 :]), ours.dtype)


@dataclasses.dataclass(frozen=True)
class Merge:
  """Merges their dims `dim` and `dim + 1` into one of ours; `size` is that of their second."""

  dim: int
  size: int

  def misfit(self, theirs: Shape) -> str:
    """Why it cannot be done to an array of theirs of this shape; empty when it can."""
    fits = 0 <= self.dim < len(theirs) - 1 and theirs[self.dim + 1] == self.size
    return "" if fits else f"cannot merge dim {self.dim} of {theirs} with a next one of {self.size}"

  def view(self, source: View) -> View:
    """Ours on theirs."""
    return views.MergedDims(source, self.dim)

  def apply(self, theirs: jax.Array) -> jax.Array:
    """Ours from theirs, on devices."""
    return theirs.reshape((*theirs.shape[: self.dim], -1, *theirs.shape[self.dim + 2 :]))

  def theirs(self, ours: Spec) -> Spec:
    """Their shape."""
    rows = ours.shape[self.dim] // self.size
    return Spec((*ours.shape[: self.dim], rows, self.size, *ours.shape[self.dim + 1 :]), ours.dtype)


@dataclasses.dataclass(frozen=True)
class Reshape:
  """Any reshape: from their shape to ours. Reads whole arrays; prefer `Split` and `Merge`."""

  theirs_shape: Shape
  ours_shape: Shape

  def misfit(self, theirs: Shape) -> str:
    """Why it cannot be done to an array of theirs of this shape; empty when it can."""
    fits = math.prod(theirs) == math.prod(self.ours_shape)
    return "" if fits else f"cannot give {theirs} another number of elements"

  def view(self, source: View) -> View:
    """Ours on theirs."""
    return views.Reshaped(source, self.ours_shape)

  def apply(self, theirs: jax.Array) -> jax.Array:
    """Ours from theirs, on devices."""
    return theirs.reshape(self.ours_shape)

  def theirs(self, ours: Spec) -> Spec:
    """Their shape."""
    return Spec(self.theirs_shape, ours.dtype)


@dataclasses.dataclass(frozen=True)
class Cast:
  """Stores another dtype on their side than on ours."""

  theirs_dtype: Any
  ours_dtype: Any

  def misfit(self, theirs: Shape) -> str:
    """It can be done to any shape."""
    return ""

  def view(self, source: View) -> View:
    """Ours on theirs."""
    return views.Cast(source, np.dtype(self.ours_dtype))

  def apply(self, theirs: jax.Array) -> jax.Array:
    """Ours from theirs, on devices."""
    return theirs.astype(self.ours_dtype)

  def theirs(self, ours: Spec) -> Spec:
    """Their dtype."""
    return Spec(ours.shape, np.dtype(self.theirs_dtype))


@dataclasses.dataclass(frozen=True)
class Stack:
  """Stacks their arrays, one for each number, along our dim `dim`; comes first in a rule."""

  dim: int = 0


@dataclasses.dataclass(frozen=True)
class Unstack:
  """Cuts their array along its dim `dim` into ours, one for each number; comes first in a rule."""

  dim: int = 0


Operation: TypeAlias = Transpose | Split | Merge | Reshape | Cast


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
  """One correspondence: their name, our path or (tied) paths, and operations from theirs to ours."""

  theirs: str
  ours: tuple[str, ...]
  layers: Stack | Unstack | None
  operations: tuple[Operation, ...]

  def __init__(self, theirs: str, ours: str | tuple[str, ...], *operations: Operation | Stack | Unstack):
    layers = operations[0] if operations and isinstance(operations[0], (Stack, Unstack)) else None
    rest = operations[1:] if layers else operations
    object.__setattr__(self, "theirs", theirs)
    object.__setattr__(self, "ours", (ours,) if isinstance(ours, str) else tuple(ours))
    object.__setattr__(self, "layers", layers)
    object.__setattr__(self, "operations", rest)
    fields = [_fields(theirs), *(_fields(path) for path in self.ours)]
    only_theirs, only_ours = fields[0] - fields[1], fields[1] - fields[0]
    wanted = (1, 0) if isinstance(layers, Stack) else (0, 1) if isinstance(layers, Unstack) else (0, 0)
    if any(isinstance(op, (Stack, Unstack)) for op in rest) or (len(only_theirs), len(only_ours)) != wanted:
      raise CheckpointError(
        f"the rule {theirs!r} -> {ours!r} does not say how its numbers correspond.",
        details=f"only in theirs: {sorted(only_theirs)}, only in ours: {sorted(only_ours)}",
        fix="put Stack() first when only theirs has a number, Unstack() when only ours has.",
      )


@dataclasses.dataclass(frozen=True)
class Bound:
  """A rule applied: one of our leaves and their names behind it.

  Attributes:
    ours: path of the leaf.
    theirs: their names; several when stacked.
    layer: which layer of theirs, when theirs is cut.
    rule: the rule.
  """

  ours: str
  theirs: tuple[str, ...]
  layer: int | None
  rule: Rule

  def view(self, sources: MappingType[str, View]) -> View:
    """Our leaf as a window onto their arrays."""
    found = [sources[name] for name in self.theirs]
    view: View = found[0]
    if isinstance(self.rule.layers, Stack):
      view = views.Stacked(found, self.rule.layers.dim)
    elif isinstance(self.rule.layers, Unstack):
      view = views.Layer(view, self.rule.layers.dim, self.layer or 0)
    for operation in self.rule.operations:
      if why := operation.misfit(view.shape):
        raise self._no_rule(operation, why)
      view = operation.view(view)
    return view

  def apply(self, sources: Sequence[jax.Array]) -> jax.Array:
    """Our leaf made of their arrays, on devices."""
    array = sources[0]
    if isinstance(self.rule.layers, Stack):
      array = jax.numpy.stack(list(sources), self.rule.layers.dim)
    elif isinstance(self.rule.layers, Unstack):
      array = jax.lax.index_in_dim(array, self.layer or 0, self.rule.layers.dim, keepdims=False)
    for operation in self.rule.operations:
      array = operation.apply(array)
    return array

  def their_specs(self, ours: Spec, layers: int) -> dict[str, Spec]:
    """Shape and dtype of their arrays when ours is given; `layers` is how many of ours they hold."""
    spec = ours
    for operation in reversed(self.rule.operations):
      try:
        spec = operation.theirs(spec)
      except IndexError:
        raise self._no_rule(operation, f"cannot be undone on {spec.shape}") from None
    if isinstance(self.rule.layers, Stack):
      dim = self.rule.layers.dim
      spec = Spec(spec.shape[:dim] + spec.shape[dim + 1 :], spec.dtype)
    elif isinstance(self.rule.layers, Unstack):
      dim = self.rule.layers.dim
      spec = Spec((*spec.shape[:dim], layers, *spec.shape[dim:]), spec.dtype)
    return dict.fromkeys(self.theirs, spec)

  def _no_rule(self, operation: Operation, why: str) -> CheckpointError:
    return CheckpointError(
      f"{self.ours} cannot be made of {', '.join(self.theirs[:3])}: {operation} {why}.",
      details=f"rule {self.rule.theirs!r} -> {', '.join(self.rule.ours)}",
      fix="correct the operations of that rule; they are written from theirs to ours.",
    )


class Mapping:
  """Rules from their names to our paths; the first rule that matches a path is taken.

  Args:
    *rules: in order.
    ignore: patterns of their names that we have no use for.

  Example:
    >>> mapping = Mapping(Rule("h.{i}.w", "layers.{i}.kernel", Transpose(1, 0)))
    >>> [(b.theirs, b.ours) for b in mapping.bind(["layers.0.kernel"], ["h.0.w"])]
    [(('h.0.w',), 'layers.0.kernel')]
  """

  def __init__(self, *rules: Rule, ignore: Iterable[str] = ()):
    self.rules, self.ignore = rules, tuple(ignore)

  def bind(self, ours: Iterable[str], theirs: Iterable[str]) -> list[Bound]:
    """Finds the rule behind each of our paths, and checks that nothing is left over on either side.

    Raises:
      CheckpointError: our leaves without a rule or source, or their names that no rule uses.
    """
    names, bounds, lost = list(theirs), list[Bound](), list[str]()
    known, paths = set(names), list(ours)
    for path in paths:
      bound = self._bind_one(path, names)
      if bound is None or not known.issuperset(bound.theirs):
        wanted = "no rule names it" if bound is None else f"needs {', '.join(bound.theirs) or 'nothing'}"
        near = difflib.get_close_matches(bound.theirs[0], names, 1) if bound and bound.theirs else []
        lost.append(f"missing  {path}: {wanted}{f' (nearest: {near[0]})' if near else ''}")
      else:
        bounds.append(bound)
    used = {name for bound in bounds for name in bound.theirs}
    spare = [n for n in names if n not in used and not any(fnmatch.fnmatchcase(n, p) for p in self.ignore)]
    if lost or spare:
      raise CheckpointError(
        f"the mapping is not complete: {len(lost)} of our leaves have no source, "
        f"{len(spare)} of their arrays no use.",
        details="\n".join([*lost[:12], *(f"unused   {name}" for name in spare[:12])]),
        fix="add rules, leave our leaves out by name (skip=[...]), or theirs (Mapping(..., ignore=[...])).",
      )
    return bounds

  def check_layers(self, ours: Iterable[str], wanted: Container[str], theirs: MappingType[str, View]) -> None:
    """Checks that their arrays that are cut into layers have as many of them as we have.

    Args:
      ours: all of our paths; a layer of theirs that belongs to one that is not wanted is left out with it.
      wanted: those that are made of theirs.
      theirs: their arrays.

    Raises:
      CheckpointError: layers that are left over on either side.
    """
    found: dict[tuple[str, int], dict[int, str]] = {}
    for path in ours:
      bound = self._bind_one(path, None)
      if bound is not None and isinstance(bound.rule.layers, Unstack) and bound.theirs[0] in theirs:
        found.setdefault((bound.theirs[0], bound.rule.layers.dim), {})[bound.layer or 0] = path
    lost: list[str] = []
    spare: list[str] = []
    for (name, dim), layers in found.items():
      shape = theirs[name].shape
      size = shape[dim] if dim < len(shape) else 0
      has = f"{name} has {size} layers: shape {shape}, dim {dim}"
      lost += [f"missing  {layers[i]}: {has}" for i in sorted(layers) if i >= size and layers[i] in wanted]
      unused = [str(i) for i in range(size) if i not in layers]
      spare += [f"unused   {', '.join(unused)} of {name}: {has}"] if unused else []
    if lost or spare:
      raise CheckpointError(
        f"the mapping is not complete: {len(lost)} of our layers have no source, "
        f"{len(spare)} of their stacked arrays have layers of no use.",
        details="\n".join([*lost[:12], *spare[:12]]),
        fix="make a model of as many layers, or leave ours out by name: skip=[...].",
      )

  def names_for(self, ours: Iterable[str]) -> list[Bound]:
    """The rule behind each of our paths when their arrays are yet to be written.

    The names of a stacked rule are patterns still: `with_layers` fills them in.

    Raises:
      CheckpointError: a path without a rule, or layers that do not make up a whole array.
    """
    bounds = [(path, self._bind_one(path, None)) for path in ours]
    lost = [path for path, bound in bounds if bound is None]
    if lost:
      raise CheckpointError(
        f"the mapping is not complete: {len(lost)} of our leaves have no rule.",
        details="\n".join(f"no rule  {path}" for path in lost[:12]),
        fix="add rules for them, or leave them out by name: skip=[...].",
      )
    found = [bound for _, bound in bounds if bound is not None]
    for name, count in layer_counts(found).items():
      there = {bound.layer for bound in found if bound.theirs[0] == name}
      if len(there) < count:
        raise CheckpointError(
          f"cannot write {name}: of its {count} layers there are only {sorted(i or 0 for i in there)}.",
          fix="leave out all of them by name, or none.",
        )
    return found

  def find(self, path: str, parameters: Container[str]) -> Bound | None:
    """The rule behind a parameter, or behind a leaf whose path ends with a parameter's: its moment.

    What comes before the parameter in the path is put before their names too.
    """
    starts = [0, *(match.end() for match in re.finditer(r"(?<!\\)\.", path))]
    start = next((start for start in starts if path[start:] in parameters), None)
    bound = None if start is None else self._bind_one(path[start:], None)
    if bound is None:
      return None
    return dataclasses.replace(bound, ours=path, theirs=tuple(path[:start] + name for name in bound.theirs))

  def _bind_one(self, path: str, names: list[str] | None) -> Bound | None:
    for rule in self.rules:
      for pattern in rule.ours:
        match = _regex(pattern).fullmatch(path)
        if match is not None:
          return _bound(rule, path, match.groupdict(), names)
    return None


class Identity(Mapping):
  """Their names are our paths."""

  def _bind_one(self, path: str, names: list[str] | None) -> Bound | None:
    return Bound(path, (path,), None, Rule(path.replace("{", "[").replace("}", "]"), "x"))


def stack_size(bound: Bound, ours: Spec) -> int:
  """How many of their arrays a stacked leaf of ours is made of."""
  spec = ours
  for operation in reversed(bound.rule.operations):
    spec = operation.theirs(spec)
  return spec.shape[bound.rule.layers.dim] if bound.rule.layers is not None else 1


def layer_counts(bounds: Iterable[Bound]) -> dict[str, int]:
  """How many of our leaves each of their stacked arrays holds, by its name."""
  counts: dict[str, int] = {}
  for bound in bounds:
    if isinstance(bound.rule.layers, Unstack):
      counts[bound.theirs[0]] = max(counts.get(bound.theirs[0], 0), (bound.layer or 0) + 1)
  return counts


def with_layers(bound: Bound, layers: int) -> Bound:
  """Fills in the names of a stacked rule, when they are numbered from 0."""
  names = tuple(_fill(name, {_only_field(name): str(i)}) for name in bound.theirs for i in range(layers))
  return dataclasses.replace(bound, theirs=names)


def _bound(rule: Rule, path: str, numbers: dict[str, str], names: list[str] | None) -> Bound:
  their = _fill(rule.theirs, numbers)
  if isinstance(rule.layers, Unstack):
    (field,) = _fields(rule.ours[0]) - _fields(rule.theirs)
    return Bound(path, (their,), int(numbers[field]), rule)
  if isinstance(rule.layers, Stack) and names is not None:
    pattern, field = _regex(their), _only_field(their)
    found = {int(m[field]): m[0] for name in names if (m := pattern.fullmatch(name))}
    ordered = tuple(found[i] for i in sorted(found))
    if sorted(found) != list(range(len(found))) or not found:
      raise CheckpointError(
        f"cannot stack {their} into {path}: the numbers found are {sorted(found)}.",
        fix="their layers must be numbered from 0 without a gap.",
      )
    return Bound(path, ordered, None, rule)
  return Bound(path, (their,), None, rule)


def _fields(pattern: str) -> set[str]:
  return set(re.findall(r"\{(\w+)\}", pattern))


def _only_field(pattern: str) -> str:
  (field,) = _fields(pattern)
  return field


def _regex(pattern: str) -> re.Pattern[str]:
  parts = re.split(r"\{(\w+)\}", pattern)
  text = [re.escape(part) if i % 2 == 0 else f"(?P<{part}>[0-9]+)" for i, part in enumerate(parts)]
  return re.compile("".join(text))


def _fill(pattern: str, numbers: dict[str, str]) -> str:
  return re.sub(r"\{(\w+)\}", lambda m: numbers.get(m[1], m[0]), pattern)


def load_mapping(file: str) -> Mapping:
  """Runs a Python file and returns its `MAPPING`.

  Raises:
    CheckpointError: no such file, or it defines no `MAPPING`.
  """
  try:
    found = runpy.run_path(file).get("MAPPING")
  except OSError as error:
    raise CheckpointError(
      f"cannot read the mapping {file}: {error.strerror}.", fix="check the path."
    ) from error
  if not isinstance(found, Mapping):
    raise CheckpointError(
      f"{file} defines no MAPPING.",
      details=f"MAPPING is a {type(found).__name__}",
      fix='write MAPPING = Mapping(Rule("their.{i}.weight", "our.{i}.kernel", Transpose(1, 0)), ...).',
    )
  return found
