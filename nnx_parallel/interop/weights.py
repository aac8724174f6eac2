"""Weight maps: rules that make the leaves of a model from the arrays of another program's file, and back.

    weight_map = WeightMap(
      Rule("model.embed_tokens.weight", "embed.embedding"),
      Rule("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.up.kernel", "o i -> i o"),
      Rule("model.layers.{i}.q_proj.weight", "layers.{i}.q.kernel", "(h d) e -> e h d", d=64),
      ignore=["*.rotary_emb.inv_freq"],
    )

A rule has a name in the file, a path in the model, and an einops pattern from the file to the model. A
`{name}` matches a number. If only the name in the file has it, the arrays of all numbers are stacked along
the first dim of the pattern's left side. If only the path has it, the array is cut into layers along the
first dim of the right side. A rule may have several paths: these leaves are tied, and written once.

The same rules serve import, export and restore. The arrays of the file are read evenly sharded over the
devices, and one compiled program makes the leaves; an export runs the inverse program.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
import functools
import re
import runpy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import einops
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from nnx_parallel.checkpoint import diff, encoding, targets
from nnx_parallel.checkpoint.diff import Found, Target, TargetLeaf
from nnx_parallel.core import together as multihost
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import is_key, path_str, variables
from nnx_parallel.core.padding import pad
from nnx_parallel.core.text import format_array, format_spec
from nnx_parallel.core.types import AnyArray, DType
from nnx_parallel.create.relayout import auto_layout, even_layout, on_auto_axes
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.dry_run import DryRun, Row
from nnx_parallel.layout.plan import Plan

Shape = tuple[int, ...]
Side = Literal["model", "file"]


@dataclasses.dataclass(frozen=True)
class Transform:
  """The einops pattern from the file to the model (or none). Equal transforms share compiled programs.

  `stacked`: several arrays of the file make one of the model; `cut`: one of the file holds several layers.
  """

  pattern: str
  sizes: tuple[tuple[str, int], ...]
  stacked: bool
  cut: bool

  def apply(self, arrays: Sequence[jax.Array], to: Side) -> list[jax.Array]:
    """The leaves of the model, one for each layer, from arrays of the file; `to="file"` is the inverse."""
    left, arrow, right = self.pattern.partition("->")
    pattern = self.pattern if to == "model" else f"{right}{arrow}{left}"
    joined, split = (self.stacked, self.cut) if to == "model" else (self.cut, self.stacked)
    array = jnp.stack(arrays) if joined else arrays[0]
    if pattern:
      array = einops.rearrange(array, pattern, **dict(self.sizes))
    return [*jnp.unstack(array)] if split else [array]

  def spec_of_file(self, leaf: PartitionSpec, rank: int) -> PartitionSpec:
    """The spec of an array of the file with `rank` dims, so that its rule moves nothing between devices."""
    # Each dim gets the axes of the leaf's dim that starts with the same axis of the pattern.
    entries = [*([None] if self.cut else []), *leaf]
    if "..." in self.pattern:
      return PartitionSpec()
    if not self.pattern:
      return PartitionSpec(*entries[int(self.stacked) :][:rank])
    left, right = (
      [part.strip("()").split() for part in _PART.findall(side)] for side in self.pattern.split("->")
    )
    axes = {part[0]: entry for part, entry in zip(right, entries, strict=False) if part}
    return PartitionSpec(*(axes.get(part[0]) if part else None for part in left[int(self.stacked) :]))


@check_arguments(CheckpointError)
@dataclasses.dataclass(frozen=True, init=False)
class Rule:
  """One correspondence between a name in the file and a path, or tied paths, in the model.

  Args:
    file: the name in the file; `{name}` matches a number.
    model: the path in the model, or several paths.
    pattern: the einops pattern that turns the array in the file into the array in the model; empty if the
      dims are the same.
    dtype: the dtype of the array in the file, if the model has another dtype. An export writes this dtype. An
      import then casts arrays of any floating-point dtype of 16 bits or more to the dtype of the model.
    **sizes: the sizes of axes of the pattern that do not follow from the shape of the array.

  Raises:
    CheckpointError: a side has more than one `{name}` that the other side lacks, or the pattern has no arrow.

  Example:
    >>> rule = Rule("h.{i}.q.weight", "layers.{i}.q", "(h d) e -> e h d", d=4)
    >>> [array.shape for array in rule.transform.apply([jnp.zeros((8, 6))], "model")]
    [(6, 2, 4)]
  """

  file: str
  model: tuple[str, ...]
  dtype: DType | None
  transform: Transform

  def __init__(
    self,
    file: str,
    model: str | tuple[str, ...],
    pattern: str = "",
    *,
    dtype: DTypeLike | None = None,
    **sizes: int,
  ):
    paths = (model,) if isinstance(model, str) else tuple(model)
    object.__setattr__(self, "file", file)
    object.__setattr__(self, "model", paths)
    object.__setattr__(self, "dtype", None if dtype is None else np.dtype(dtype))
    if not paths:
      raise CheckpointError(
        f"the rule {file!r} names no path.", fix='nxp.interop.Rule("h.{i}.w", "layers.{i}.kernel")'
      )
    only_file = [sorted(_fields(file) - _fields(path)) for path in paths]
    only_model = [sorted(_fields(path) - _fields(file)) for path in paths]
    stacked, cut = bool(only_file[0]), bool(only_model[0])
    kinds = {(len(names), len(others)) for names, others in zip(only_file, only_model, strict=True)}
    if kinds != {(int(stacked), int(cut))}:
      raise CheckpointError(
        f"the rule {file!r} -> {model!r} has numbers that do not correspond.",
        details=f"only in the file: {only_file}, only in the model: {only_model}",
        fix="let each side have at most one {name} that the other side lacks: the stacked or cut dim.",
      )
    if pattern and pattern.count("->") != 1:
      raise CheckpointError(
        f"the rule {file!r} -> {model!r} has the pattern {pattern!r}, which has no arrow.",
        fix='write dims of the file, "->", dims of the model: "o i -> i o".',
      )
    object.__setattr__(self, "transform", Transform(pattern, tuple(sorted(sizes.items())), stacked, cut))


@dataclasses.dataclass(frozen=True)
class Group:
  """The leaves, by number of the layer (0 if nothing is cut), that one array or stack of the file makes.

  A `{name}` in `file` is the number in the stack; `names` are the names in the file, once they are known.
  """

  rule: Rule
  file: str
  layers: Mapping[int, str]
  names: tuple[str, ...] = ()

  @property
  def paths(self) -> str:
    """The paths, as errors print them."""
    return ", ".join([*self.layers.values()][:3])

  def shapes(self, to: Side, shapes: Iterable[Shape]) -> list[Shape]:
    """Shapes of all layers of the model that arrays of these shapes make; `to="file"` is the reverse."""
    structs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    try:
      made = jax.eval_shape(functools.partial(self.rule.transform.apply, to=to), structs)
      return [array.shape for array in made]
    except (einops.EinopsError, ValueError, TypeError) as error:
      raise CheckpointError(
        f"{self.paths} and {self.file} do not fit the pattern of their rule.",
        details=f"pattern {self.rule.transform.pattern!r}: {str(error).strip().splitlines()[-1]}\n"
        f"shapes in the {'file' if to == 'model' else 'model'}: {sorted({x.shape for x in structs})}",
        fix="correct the pattern, which goes from the file to the model, or name the size of an axis: d=64.",
      ) from error

  def in_file(self, array: str) -> tuple[str, str]:
    """The name in the file and the array, as tables show them: `*` for the numbers of a stack."""
    count = f"{len(self.names)} x " if len(self.names) > 1 else ""
    return re.sub(r"\{\w+\}", "*", self.file), count + array

  def misfit(self, path: str, shape: Shape, sources: Sequence[Source], wanted: TargetLeaf) -> str:
    """Why the arrays of the file, which make this shape, do not make a leaf; or an empty text."""
    dtype, kinds = wanted.struct.dtype, {str(source.dtype) for source in sources}
    is_cast = self.rule.dtype is not None and all(map(is_real, (dtype, *kinds)))
    if shape == wanted.shape and (is_cast or kinds == {encoding.dtype_name(self.rule.dtype or dtype)}):
      return ""
    return (
      f"{path} does not fit: its rule makes {'/'.join(sorted(kinds))}{list(shape)} of "
      f"{', '.join(self.names[:3])}, the model has {encoding.dtype_name(dtype)}{list(wanted.shape)}."
    )

  def numbered(self, leaves: Mapping[str, Shape]) -> tuple[Group, list[Shape]]:
    """Adds the names in the file, and returns the shapes there."""
    found = {leaves[path] for path in self.layers.values()}
    if len(found) > 1:
      raise CheckpointError(
        f"{self.paths} cannot be layers of {self.file}: their shapes differ.",
        details=f"shapes {sorted(found)}",
        fix="give each its own name in the file.",
      )
    shapes = self.shapes("file", [*found] * (max(self.layers) + 1))
    names = (self.file,)
    if self.rule.transform.stacked:
      names = tuple(re.sub(r"\{\w+\}", str(i), self.file) for i in range(len(shapes)))
    return dataclasses.replace(self, names=names), shapes

  @no_mesh()
  def make_leaves(
    self, sources: Sequence[Source], wanted: Mapping[str, TargetLeaf], layers: Mapping[int, str] | None = None
  ) -> dict[str, AnyArray]:
    """Makes leaves of the model, of these layers or all, from the arrays of the file, ordered as `names`."""
    kept = self.layers if layers is None else layers
    structs = [wanted[path].struct for path in kept.values()]
    outs = tuple(x.update(sharding=x.sharding and auto_layout(x.sharding)) for x in structs)
    if self.rule.transform == _COPY and _is_placed(sources[0], outs[0]):
      made = sources
    else:
      for name, source in zip(self.names, sources, strict=False):
        if jax.dtypes.canonicalize_dtype(source.dtype, allow_extended_dtype=True) != source.dtype:
          raise CheckpointError(
            f"{name} is {source.dtype}, which its rule would cut to 32 bits.",
            details=f"rule {self.rule}",
            fix="jax.config.update('jax_enable_x64', True) first, or restore it without a rule.",
          )
      program = _program(self.rule.transform, "model", tuple(kept), None, outs)
      # One at a time: many programs that communicate at once can starve each other on simulated devices.
      made = jax.block_until_ready(program([on_auto_axes(jnp.asarray(source)) for source in sources]))
    placed = [
      np.asarray(one) if struct.sharding is None else jax.device_put(one, struct.sharding)
      for one, struct in zip(made, structs, strict=True)
    ]
    return dict(zip(kept.values(), placed, strict=True))

  @no_mesh()
  def make_arrays(self, leaves: Sequence[jax.Array], shape: Shape, near: Sharding) -> list[jax.Array]:
    """Makes the arrays of the file, evenly sharded, from the leaves of all layers; `shape` has no padding."""
    outs = tuple(
      jax.ShapeDtypeStruct(made, leaves[0].dtype, sharding=self.layout(near, made))
      for made in self.shapes("file", [shape] * len(leaves))
    )
    program = _program(self.rule.transform, "file", tuple(range(len(outs))), shape, outs)
    return jax.block_until_ready(program([on_auto_axes(leaf) for leaf in leaves]))

  def layout(self, sharding: Sharding | None, shape: Shape) -> Any:
    """The layout in which an array of the file is read or written: evenly sharded, near the leaf's."""
    if isinstance(sharding, NamedSharding):
      spec = self.rule.transform.spec_of_file(sharding.spec, len(shape))
      sharding = NamedSharding(sharding.mesh, spec)
    return None if sharding is None else even_layout(sharding, shape, keep=True)


class WeightMap:
  """Rules from names in a file to paths in a model. The first rule that matches a path applies.

  Args:
    *rules: the rules, in order.
    ignore: patterns of names in the file that the model does not use.

  Example:
    >>> weight_map = WeightMap(Rule("h.{i}.w", "layers.{i}.kernel", "o i -> i o"))
    >>> [(group.file, group.layers) for group in weight_map.to_write(["layers.0.kernel"])]
    [('h.0.w', {0: 'layers.0.kernel'})]
  """

  @check_arguments(CheckpointError)
  def __init__(self, *rules: Rule, ignore: Iterable[str] = ()):
    self.rules, self.ignore = rules, tuple(ignore)

  @check_arguments(CheckpointError)
  def compare(
    self, wanted: Mapping[str, TargetLeaf], arrays: Mapping[str, Source], skip: Container[str] = ()
  ) -> tuple[list[Group], DryRun]:
    """Finds the arrays of a file for the leaves of a model, and what is left over.

    Args:
      wanted: the leaves of the model, by path.
      arrays: of the file, by name.
      skip: paths that need no source; a layer of such a path may stay unused.

    Returns:
      The arrays that make leaves; and what happens to each array and leaf.

    Raises:
      CheckpointError: a pattern does not fit the arrays of its rule.
    """
    groups, lost = self._groups(wanted)
    # Rows: arrays that are read, or do not fit; missing leaves; unused layers and arrays; initialised leaves.
    missing = {path: "no rule names it" for path in lost if path not in skip}
    rows: list[Row] = []
    cut: list[Row] = []
    found: list[Group] = []
    for group in groups:
      layers = {layer: path for layer, path in group.layers.items() if path not in skip}
      if not layers:
        continue
      names = _stack_of(group, arrays) if group.rule.transform.stacked else (group.file,)
      if not all(name in arrays for name in names):
        near = difflib.get_close_matches(group.file, arrays, 1)
        hint = f" (nearest: {near[0]})" if near else ""
        missing |= dict.fromkeys(layers.values(), f"needs {', '.join(names)}{hint}")
        continue
      group = dataclasses.replace(group, names=names)
      sources = [arrays[name] for name in names]
      made = group.shapes("model", (source.shape for source in sources))
      has = f"{group.file} has {len(made)} layers, shape {sources[0].shape}"
      file = group.in_file(format_array(sources[0].dtype, sources[0].shape))
      for layer, path in layers.items():
        if layer >= len(made):
          missing[path] = has
          continue
        wrong = group.misfit(path, made[layer], sources, wanted[path])
        note = wrong or format_spec(wanted[path].struct.sharding.spec)
        rows.append(Row("does not fit" if wrong else "read", *file, path, in_model(wanted[path]), note))
      if unused := [str(layer) for layer in range(len(made)) if layer not in group.layers]:
        cut.append(Row("unused", note=f"layers {', '.join(unused)}: {has}"))
      found.append(group)
    rows += [Row("missing", "", "", path, in_model(wanted[path]), why) for path, why in missing.items()]
    rows += cut
    used = {name for group in found for name in group.names}
    for name, array in arrays.items():
      if name not in used:
        is_ignored = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)
        status = "ignored" if is_ignored else "unused"
        rows.append(Row(status, name, format_array(array.dtype, array.shape)))
    rows += [Row("initialised", model=p, leaf=in_model(leaf)) for p, leaf in wanted.items() if p in skip]
    return found, DryRun(rows)

  @check_arguments(CheckpointError)
  def to_write(self, paths: Iterable[str]) -> list[Group]:
    """Finds the arrays of a file that is to be written from the leaves of a model.

    Args:
      paths: the paths of the leaves.

    Returns:
      The arrays of the file, and for each array the leaves that it is made of.

    Raises:
      CheckpointError: a path has no rule, or some layers of an array are missing.
    """
    groups, lost = self._groups(paths)
    if lost:
      raise CheckpointError(
        f"the weight map is not complete: {len(lost)} leaves of the model have no rule.",
        details="\n".join(f"no rule  {path}" for path in lost[:12]),
        fix="add rules for them, or leave them out by name: skip=[...], --skip.",
      )
    for group in groups:
      if len(group.layers) <= max(group.layers):
        raise CheckpointError(
          f"cannot write {group.file}: of its {max(group.layers) + 1} layers there are only "
          f"{sorted(group.layers)}.",
          fix="leave out all of them by name, or none of them.",
        )
    return groups

  @check_arguments(CheckpointError)
  def names_of(self, paths: Iterable[str]) -> dict[str, str]:
    """Finds the names in the file of those leaves of a model that have a rule.

    Args:
      paths: the paths of the leaves.

    Returns:
      A dict: path -> name in the file.
    """
    return {path: group.file for group in self._groups(paths)[0] for path in group.layers.values()}

  def through(self, target: Target) -> Target:
    """Returns a target for a restore of leaves that were saved with the names and forms of the file.

    The names in the file are the saved paths. Paths without a rule stay as they are. A rule for a parameter
    holds for its moments in the optimizer too.

    Args:
      target: a target of `Checkpointer.restore`.

    Returns:
      A target of the saved leaves, whose `build` makes the leaves of the given target.
    """
    parameters = target.leaves["model"]
    wanted: dict[str, dict[str, TargetLeaf]] = {}
    tables: dict[str, list[Group]] = {}
    for item, leaves in target.leaves.items():
      arrays = [path for path, one in leaves.items() if not is_key(one.struct.dtype)]
      groups, _ = self._groups(arrays, parameters)
      ruled = {path for group in groups for path in group.layers.values()}
      wanted[item] = {path: one for path, one in leaves.items() if path not in ruled}
      tables[item] = []
      for group in groups:
        leaf = leaves[next(iter(group.layers.values()))]
        group, shapes = group.numbered({path: one.shape for path, one in leaves.items()})
        tables[item].append(group)
        for name, shape in zip(group.names, shapes, strict=True):
          layout = group.layout(leaf.struct.sharding, shape)
          struct = jax.ShapeDtypeStruct(shape, group.rule.dtype or leaf.struct.dtype, sharding=layout)
          wanted[item][name] = TargetLeaf(struct, shape)

    def build(found: Found) -> Any:
      return target.build(
        {
          item: _make_leaves(have, tables.get(item, []), target.leaves.get(item, {}))
          for item, have in found.items()
        }
      )

    return dataclasses.replace(target, leaves=wanted, build=build)

  def _groups(self, paths: Iterable[str], parameters: Container[str] = ()) -> tuple[list[Group], list[str]]:
    """The groups, and the paths without a rule; a path may end with one of `parameters`."""
    table: dict[tuple[Rule, str, str], dict[int, str]] = {}
    lost: list[str] = []
    for path in paths:
      start = _start_of(path, parameters) if parameters else 0
      found = None if start is None else self._find(path[start:])
      if start is None or found is None:
        lost.append(path)
        continue
      rule, pattern, numbers = found
      (layer,) = (_fields(pattern) - _fields(rule.file)) or ("",)
      key = (rule, pattern, path[:start] + _fill(rule.file, numbers))
      table.setdefault(key, {})[int(numbers.get(layer, 0))] = path
    return [Group(rule, name, layers) for (rule, _, name), layers in table.items()], lost

  def _find(self, path: str) -> tuple[Rule, str, dict[str, str]] | None:
    for rule in self.rules:
      for pattern in rule.model:
        match = _regex(pattern).fullmatch(path)
        if match is not None:
          return rule, pattern, match.groupdict()
    return None


class SameNames(WeightMap):
  """The names in the file are the paths in the model."""

  def _find(self, path: str) -> tuple[Rule, str, dict[str, str]] | None:
    return Rule(path, path), path, {}


@check_arguments(CheckpointError)
def load_weight_map(file: str) -> WeightMap:
  """Runs a Python file that defines a weight map.

  Args:
    file: the file. It is executed, so you must trust it.

  Returns:
    Its `WEIGHT_MAP`.

  Raises:
    CheckpointError: the file does not exist, or it defines no `WEIGHT_MAP`.

  Example:
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "names.py")
    >>> rule = "Rule('h.{i}.weight', 'layers.{i}.kernel', 'o i -> i o')"
    >>> text = f"from nnx_parallel.interop import Rule, WeightMap; WEIGHT_MAP = WeightMap({rule})"
    >>> _ = file.write_text(text)
    >>> load_weight_map(str(file)).rules[0].file
    'h.{i}.weight'
  """
  try:
    found = runpy.run_path(file).get("WEIGHT_MAP")
  except (OSError, ImportError) as error:
    raise CheckpointError(
      f"cannot read the weight map {file}: {getattr(error, 'strerror', None) or error}.",
      fix="check the path.",
    ) from error
  if not isinstance(found, WeightMap):
    raise CheckpointError(
      f"{file} defines no WEIGHT_MAP.",
      details=f"WEIGHT_MAP is a {type(found).__name__}",
      fix="write WEIGHT_MAP = nxp.interop.WeightMap("
      'nxp.interop.Rule("h.{i}.weight", "layers.{i}.kernel", "o i -> i o"), ...).',
    )
  return found


class Source(Protocol):
  """An array that may lie in a file, such as a numpy array."""

  @property
  def shape(self) -> Shape:
    """In elements."""
    ...

  @property
  def dtype(self) -> DType:
    """Of the array."""
    ...

  def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray:
    """A part of the array on the host; all of it for `()`."""
    ...


def import_arrays(
  origin: object,
  sources: Callable[[], Mapping[str, Source]],
  plan: Plan,
  weight_map: WeightMap,
  skip: Iterable[str],
) -> Any:
  """Makes a model, and its optimizer, from the arrays that `sources` finds; each process reads its share."""
  # An error on one process is raised on all. Leaves that `skip` names and random state are initialised.
  target = targets.read(plan, optimizer="drop" if plan.tx is None else "fresh")
  wanted = target.leaves["model"]

  with multihost.together():
    left_out = find_initialised(plan, wanted, skip)
    arrays = sources()
    groups, found = weight_map.compare(wanted, arrays, left_out)
    found.require_complete()
  leaves: dict[str, AnyArray] = {}
  for group in groups:
    layers = {layer: path for layer, path in group.layers.items() if path not in left_out}
    structs = [wanted[path].struct for path in layers.values()]
    try:
      with multihost.together():
        made = _read(group, arrays, structs)
    except OSError as error:
      raise CheckpointError(f"cannot read {origin}: {error}.", fix="copy or download it again.") from error
    leaves |= group.make_leaves(made, wanted, layers)
  return target.build({"model": leaves})


def _read(
  group: Group, tensors: Mapping[str, Source], leaves: Sequence[jax.ShapeDtypeStruct]
) -> list[AnyArray]:
  """Reads this process's share of the arrays behind some leaves."""
  dtypes = {leaf.dtype for leaf in leaves}

  def block(tensor: Source, index: tuple[slice, ...] | None) -> np.ndarray:
    values = np.asarray(tensor[index or ()])
    return values.astype(leaves[0].dtype, copy=False) if len(dtypes) == 1 else values

  sources = [tensors[name] for name in group.names]
  layouts = [group.layout(leaves[0].sharding, one.shape) for one in sources]
  return [
    jax.make_array_from_callback(one.shape, layout, functools.partial(block, one))
    for one, layout in zip(sources, layouts, strict=True)
  ]


def model_leaves(plan: Plan) -> dict[str, TargetLeaf]:
  """The leaves of a plan's model by path, also on an abstract mesh."""
  leaves = plan.of("model").items()
  return {path_str(path): TargetLeaf(leaf.struct, leaf.shape) for path, leaf in leaves}


def find_initialised(plan: Plan, paths: Iterable[str], skip: Iterable[str]) -> set[str]:
  """The paths that an import leaves as they are initialised: skipped paths, and random state."""
  return _left_out(paths, skip) | _random_state(plan.abstract_model)


def leaves_to_write(model: object, skip: Iterable[str]) -> dict[str, AnyArray]:
  """The leaves of a model that an export writes: all but skipped leaves and random state."""
  leaves = targets.saved_roots(model, None)["model"]
  away = _left_out(leaves, skip) | _random_state(model)
  return {path: leaf for path, leaf in leaves.items() if path not in away}


def _left_out(paths: Iterable[str], skip: Iterable[str]) -> set[str]:
  patterns = diff.Patterns(None, skip)
  found = {path for path in paths if patterns.leaves_out(path)}
  if unused := patterns.unused():
    raise CheckpointError(f"skip={unused} matches no leaf.", fix="use paths, or patterns such as '*rngs*'.")
  return found


def in_model(leaf: TargetLeaf) -> str:
  """A leaf of the model, as tables show it."""
  return format_array(encoding.dtype_name(leaf.struct.dtype), leaf.shape)


def is_real(dtype: DTypeLike) -> bool:
  """Whether it is of floating point and not of 8 bits, which need scales."""
  return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1


def _random_state(model: object) -> set[str]:
  """The paths of a module's random keys and counters."""
  if not isinstance(model, nnx.Module):
    return set()
  return {path_str(path) for path, leaf in variables(model).items() if isinstance(leaf, nnx.RngState)}


_PART = re.compile(r"\([^)]*\)|[^\s()]+")  # one dim of a side of a pattern
_COPY = Transform("", (), stacked=False, cut=False)


def _make_leaves(
  have: dict[str, AnyArray], groups: Iterable[Group], wanted: Mapping[str, TargetLeaf]
) -> dict[str, AnyArray]:
  """Makes the leaves that have rules. Each array is dropped from `have` at its last use, to save memory."""
  groups = list(groups)
  uses = collections.Counter(name for group in groups for name in group.names)
  made: dict[str, AnyArray] = {}
  for group in groups:
    uses.subtract(group.names)
    is_whole = all(name in have for name in group.names)
    sources = [have[name] if uses[name] else have.pop(name) for name in group.names if name in have]
    if is_whole:
      made |= group.make_leaves(sources, wanted)
  return have | made


@functools.lru_cache(maxsize=256)
def _program(
  transform: Transform, to: Side, kept: tuple[int, ...], shape: Shape | None, outs: tuple[Any, ...]
) -> jax.stages.Wrapped:
  """The program of a transform; it cuts its inputs to `shape`, where given, and pads its outputs."""

  def make(arrays: list[jax.Array]) -> list[jax.Array]:
    if shape is not None:
      arrays = [array[tuple(map(slice, shape))] for array in arrays]
    made = transform.apply(arrays, to)
    return [pad(made[i].astype(out.dtype), out.shape) for i, out in zip(kept, outs, strict=True)]

  return jax.jit(make, out_shardings=[out.sharding for out in outs])


def _is_placed(source: Any, out: jax.ShapeDtypeStruct) -> bool:
  """Whether an array already has the shape, dtype and layout of the leaf."""
  if source.shape != out.shape or source.dtype != out.dtype:
    return False
  return out.sharding is None or source.sharding.is_equivalent_to(out.sharding, source.ndim)


def _start_of(path: str, parameters: Container[str]) -> int | None:
  """Where a parameter's path starts at the end of a path."""
  starts = [0, *(match.end() for match in re.finditer(r"\.", path))]
  return next((start for start in starts if path[start:] in parameters), None)


def _stack_of(group: Group, names: Iterable[str]) -> tuple[str, ...]:
  pattern = _regex(group.file)
  found = {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
  if not found:
    return (group.file,)
  if sorted(found) != list(range(len(found))):
    raise CheckpointError(
      f"cannot stack {group.file} into {group.paths}: the numbers found are {sorted(found)}.",
      fix="number the arrays of the file from 0 without a gap.",
    )
  return tuple(found[i] for i in sorted(found))


def _fields(pattern: str) -> set[str]:
  return set(re.findall(r"\{(\w+)\}", pattern))


@functools.lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
  parts = re.split(r"\{(\w+)\}", pattern)
  text = [re.escape(part) if i % 2 == 0 else f"(?P<{part}>[0-9]+)" for i, part in enumerate(parts)]
  return re.compile("".join(text))


def _fill(pattern: str, numbers: Mapping[str, str]) -> str:
  return re.sub(r"\{(\w+)\}", lambda match: numbers.get(match[1], match[0]), pattern)
