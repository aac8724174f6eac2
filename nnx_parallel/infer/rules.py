"""Rules for a module, inferred from one abstract trace.

The idea: dims with the same meaning share a class. Two dims are linked if an operation carries a split of one
dim over to the other: elementwise, through a transpose, a reshape (the major dims), a batch or contracted
pair of a matrix product, a lookup. The hidden width of an MLP is then one class, which contains the output
dim of `up` and the input dim of `down`; the heads of attention are one class with a dim of the query, key,
value and output kernels. Splitting a class splits all of its dims at once, which gives Megatron's pair of a
column-parallel and a row-parallel layer. It costs a collective wherever the class is summed over. So classes
are taken in order of elements split per collective, at most one for a parameter.

The dims with one logical name are linked too: the proposal has a rule for each name that the module uses, and
path rules for the Variables without names.

Source: Megatron-LM, arXiv:1909.08053; the propagation of splits follows GSPMD, arXiv:2105.04663.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from nnx_parallel.core.axes import axes_in
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.mesh import AnyMesh, abstract_mesh, axis_sizes, is_explicit
from nnx_parallel.core.nodes import Names, Path, array_leaves, is_rng, names_of, path_str, value_of, variables
from nnx_parallel.core.types import Leaf, PyTree
from nnx_parallel.errors import ShardingError
from nnx_parallel.infer.classes import Classes
from nnx_parallel.layout.batch import AXES
from nnx_parallel.layout.constrain import Scope, scoped
from nnx_parallel.layout.tracing import state_paths, trace_module, without_mesh
from nnx_parallel.rules.fallback import MIN_SIZE, Fallback, fsdp, replicate
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.paths import PathRules
from nnx_parallel.rules.ruleset import RuleSet

_TENSOR_AXES = ("tensor", "model", "tp", "mp")
_FSDP_AXES = ("fsdp", "data", "dp")


@check_arguments(ShardingError, "init", "mesh", min_size=0)
def infer_rules(
  init: Callable[[], nnx.Module] | nnx.Module,
  mesh: AnyMesh,
  *inputs: PyTree,
  call: Callable[..., PyTree] | None = None,
  tensor_axis: str | None = None,
  fsdp_axis: str | None = None,
  min_size: int = MIN_SIZE,
) -> RuleSet:
  """Proposes rules for a module. Print the result, edit it, and paste it into your code.

  The module is traced abstractly with `inputs`: no array is made. The function shards pairs of layers over
  the tensor axis: the first layer of a pair along its outputs, and the second layer along its inputs. It also
  shards embeddings and heads over the tensor axis, along the vocabulary. It shards large parameters over the
  fsdp axis along a remaining dim. A tied parameter is counted once. The proposal fits every mesh with these
  axes whose sizes divide the same dims. You may change any rule in it: rules never change results, only the
  layout. Logical names that the module has get logical rules, and the rest gets path rules.

  Args:
    init: the constructor, or a live module.
    mesh: a real or an abstract mesh. The sizes of its axes decide which dims can be sharded.
    *inputs: the arguments of a call of the module, as arrays or `jax.ShapeDtypeStruct`s.
    call: the function to trace, `call(module, *inputs)`, if it is not `module(*inputs)`.
    tensor_axis: the mesh axis for pairs of layers; by default an axis called `tensor`, `model`, `tp` or `mp`,
      if the mesh has one.
    fsdp_axis: the mesh axis for large parameters; by default an axis called `fsdp`, `data` or `dp`, if the
      mesh has one.
    min_size: parameters, and groups of dims that belong together, with at most this many elements are not
      sharded.

  Returns:
    A `RuleSet`, which prints as a list of rules in Python code.

  Raises:
    ShardingError: there are no inputs, or the mesh does not have an axis.

  Example:
    >>> import jax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> class MLP(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.up, self.down = nnx.Linear(512, 2048, rngs=rngs), nnx.Linear(2048, 512, rngs=rngs)
    ...   def __call__(self, x):
    ...     return self.down(nnx.relu(self.up(x)))
    >>> mesh = nxp.abstract_mesh(fsdp=4, tensor=2)
    >>> nxp.infer_rules(lambda: MLP(nnx.Rngs(0)), mesh, jax.ShapeDtypeStruct((8, 512), "float32"))
    [LogicalRules(batch='fsdp'), PathRules([
      (('down', 'kernel'), ('tensor', None)),
      (('up', 'bias'), ('tensor',)),
      (('up', 'kernel'), (None, 'tensor')),
    ]), fsdp('fsdp', min_size=262144, extend=True)]
  """
  is_explicit(mesh)  # refuses values that are not meshes
  sizes = axis_sizes(mesh)
  tensor = _axis(tensor_axis, _TENSOR_AXES, sizes)
  shard = _axis(fsdp_axis, _FSDP_AXES, sizes)
  if not inputs and call is None:
    raise ShardingError(
      "infer_rules needs example inputs to trace the module with.",
      fix="nxp.infer_rules(init, mesh, jax.ShapeDtypeStruct((8, 128), 'int32')); arrays work too.",
    )
  check_arrays(ShardingError, "inputs", inputs)
  batch = tuple(axis for axis in sizes if axis in AXES)
  module = init if isinstance(init, nnx.Module) else trace_module(init, mesh).made.node
  named = _Named.of(module, sizes)
  logical: dict[str, Any] = dict.fromkeys(named.logical)
  found: dict[Path, Names] = {}
  if tensor is not None:
    found, split, used = _tensor_parallel(module, inputs, call, tensor, sizes, min_size, named)
    logical = dict.fromkeys((*named.logical, *used)) | dict.fromkeys(split, tensor)
  logical |= {"batch": batch} if batch else {}
  fallback: Fallback = replicate() if shard is None else fsdp(shard, min_size=min_size)
  paths = (_as_rules(found),) if any(map(any, found.values())) else ()
  return RuleSet(LogicalRules(logical), paths, fallback)


@dataclasses.dataclass
class _Named:
  """The Variables of a module that have names."""

  names: dict[Path, Names]  # the names by path
  logical: list[str]  # all names that need a rule
  single: list[str]  # those that are always alone in their dim
  # the paths of Variables that name mesh axes, bring rules, or have several names in one dim
  fixed: set[Path]

  @classmethod
  def of(cls, module: nnx.Module, sizes: Mapping[str, int]) -> _Named:
    found = {
      path: own
      for path, leaf in array_leaves(module).items()
      if not is_rng(leaf) and (own := names_of(leaf, where=path_str(path))) is not None
    }
    ruled = {path: own.rules.keys() | sizes.keys() for path, own in found.items()}
    fixed = {
      path
      for path, own in found.items()
      if ruled[path] & {*axes_in(own.names)} or any(isinstance(entry, tuple) for entry in own.names)
    }
    names = [name for path, own in found.items() for name in axes_in(own.names) if name not in ruled[path]]
    joint = {*axes_in(entry for own in found.values() for entry in own.names if isinstance(entry, tuple))}
    logical = [*dict.fromkeys(names)]
    single = [name for name in logical if name not in joint]
    return cls({path: own.names for path, own in found.items()}, logical, single, fixed)


class _Asked(LogicalRules):
  """No rules; it keeps the names of the activations."""

  def __init__(self) -> None:
    super().__init__(unknown="replicate")
    self.names: dict[str, None] = {}

  def __contains__(self, name: object) -> bool:
    self.names[str(name)] = None
    return False


def _axis(given: str | None, known: Iterable[str], sizes: dict[str, int]) -> str | None:
  if given is None:
    return next((axis for axis in known if axis in sizes), None)
  if given not in sizes:
    raise ShardingError(
      f"infer_rules got the axis {given!r}, which is not in the mesh.",
      details=f"mesh {sizes}",
      fix=f"use one of {', '.join(sizes)}, or leave the argument out.",
    )
  return given


def _tensor_parallel(
  module: nnx.Module,
  inputs: Sequence[PyTree],
  call: Callable[..., PyTree] | None,
  axis: str,
  sizes: Mapping[str, int],
  min_size: int,
  named: _Named,
) -> tuple[dict[Path, Names], list[str], list[str]]:
  """Names by path for Variables without names; the names to split; the names of activations."""
  leaves = variables(module)
  graphdef, state = nnx.split(module)
  # The module may lay out activations. No rules are known yet, and example inputs need not divide.
  asked = _Asked()
  scope = Scope(asked, abstract_mesh(dict.fromkeys(sizes, 1)))

  def run(state: PyTree, *args: PyTree) -> PyTree:
    merged = nnx.merge(graphdef, state)
    with scoped(scope):
      return call(merged, *args) if call is not None else merged(*args)  # pyright: ignore[reportCallIssue]

  with without_mesh():
    traced = jax.make_jaxpr(run)(state, *inputs)
  classes = Classes(traced)
  paths = state_paths(state)
  dims = [  # the example inputs follow the arrays of the state
    (name, i, d)
    for i, path in enumerate(paths)
    for d, name in enumerate(named.names.get(path, ()))
    if isinstance(name, str)
  ]
  nodes = classes.inputs
  first = {name: nodes[i][d] for name, i, d in reversed(dims)}
  for name, i, d in dims:
    classes.link(first[name], nodes[i][d])
  own = dict(zip(paths, classes.inputs, strict=False))
  parameters = {p: own[p] for p in own if isinstance(leaves[p], nnx.Param) or p in named.names}
  chosen = _choose(parameters, classes, leaves, sizes[axis], min_size, named.fixed)
  found = {p: tuple(axis if c in chosen else None for c in own[p]) for p in parameters.keys() - named.names}
  whole = {name for name, i, d in dims if own[paths[i]][d] not in chosen}
  split = [name for name in named.single if name in first and name not in whole]
  used = [name for name in asked.names if name not in sizes]
  return {p: found[p] for p in parameters if p in found}, split, used


def _choose(
  parameters: dict[Path, list[int]],
  classes: Classes,
  leaves: dict[Path, Leaf],
  shards: int,
  min_size: int,
  fixed: set[Path],
) -> set[int]:
  users: dict[int, list[Path]] = {}
  for path, own in parameters.items():
    for c in dict.fromkeys(own):
      users.setdefault(c, []).append(path)
  elements = {c: sum(math.prod(value_of(leaves[path]).shape) for path in users[c]) for c in users}
  # A class that is never summed over leaves the trace split, and costs a collective there.
  gain = {c: elements[c] / max(1, classes[c].collectives) for c in users}
  taken = {*fixed}
  chosen: set[int] = set()
  # Equal gains are settled by path, so that the proposal is the same on every run.
  for c in sorted(users, key=lambda c: (-gain[c], path_str(users[c][0]))):
    fits = classes[c].is_product and all(size % shards == 0 for size in classes[c].sizes)
    twice = any(parameters[path].count(c) > 1 for path in users[c])
    if fits and not twice and elements[c] > min_size and not taken.intersection(users[c]):
      chosen.add(c)
      taken.update(users[c])
  return chosen


Window = tuple[str, ...]


def _as_rules(found: dict[Path, Names]) -> PathRules:
  r"""One rule for each set of similar paths: list indices become `\d+`, alternatives `(q|k|v)`."""
  grouped: dict[Window, set[Names]] = {}
  for path, names in found.items():
    grouped.setdefault(_pattern(path, any_index=True), set()).add(names)
  rules: dict[Window, Names] = {}
  for path, names in found.items():
    window = _pattern(path, any_index=True)
    if any(names):
      rules[window if len(grouped[window]) == 1 else _pattern(path, any_index=False)] = names
  joined = _join_alternatives(rules)
  windows = PathRules(joined)
  # A window may also match a part of a longer path; a pattern for the full path never does.
  matches = {path: windows.match(path) for path in found}
  right = all(
    (rule.names if rule else None) == (found[p] if any(found[p]) else None) for p, rule in matches.items()
  )
  if right and len({rule.pattern for rule in matches.values() if rule}) == len(joined):
    return windows
  return PathRules([(r"\.".join(window), names) for window, names in joined])


def _pattern(path: Path, *, any_index: bool) -> Window:
  return tuple(r"\d+" if any_index and isinstance(part, int) else re.escape(str(part)) for part in path)


def _join_alternatives(rules: dict[Window, Names]) -> list[tuple[Window, Names]]:
  # Siblings under one parent with the same last part: `q.kernel`, `k.kernel` -> `(q|k).kernel`.
  families: dict[tuple[Window, str, Names], list[str]] = {}
  for window, names in rules.items():
    *head, last = window
    families.setdefault((tuple(head[:-1]), last, names), []).extend(head[-1:])
  joined: list[tuple[Window, Names]] = []
  for (parent, last, names), options in families.items():
    middle = (options[0] if len(options) == 1 else f"({'|'.join(options)})",) if options else ()
    joined.append(((*parent, *middle, last), names))
  return joined
