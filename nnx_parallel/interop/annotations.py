"""Writes the shardings that make a model run on Explicit axes, as a patch of its source.

Two traces of the loss find them. On Auto axes, where all operations work, mesh axes are followed from the
parameters and the batch to each result (`core/flow.py`). On Explicit axes, each call that jax refuses is
called again: with `out_sharding=` of that layout where it has such an argument, else with resharded operands.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import operator
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import axes_by_dim, entry_of, without
from nnx_parallel.core.flow import Axes, Flow, constraint, flow_facts, meeting, result_axes, shard_map_axes
from nnx_parallel.core.interpret import DEFAULT, facts_of, wiring
from nnx_parallel.core.jaxprs import scope_of
from nnx_parallel.core.mesh import AnyMesh, abstract_mesh, axis_sizes
from nnx_parallel.core.nodes import is_key, path_str, value_of, variables
from nnx_parallel.core.text import few, listed
from nnx_parallel.core.types import AnyArray, JaxprEqn, PyTree
from nnx_parallel.errors import RecipeError, TrainError
from nnx_parallel.interop.source import LIBRARIES, Change, Place, Program
from nnx_parallel.layout.constrain import scoped
from nnx_parallel.layout.planning import plan
from nnx_parallel.rules.ruleset import Rules
from nnx_parallel.train.binding import Template
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.losses import mean, terms

_MARK = "nnx_parallel annotate <{}>"
_MARKED = re.compile(_MARK.format("(.*?)"))
_RESHARDS = (jax.sharding.reshard, jax.reshard)
_UNFIT = (NotImplementedError, TypeError, ValueError)
_LIBRARIES = (
  *LIBRARIES,
  *(str(Path(str(package.__file__)).parent) for package in (jax, nnx, optax)),
  str(Path(__file__).parents[1]),
)
"""The folders of code that a patch cannot change."""
_STATED = ("out_sharding", "qkv_sharding")


@dataclasses.dataclass(frozen=True)
class Annotation:
  """What `annotate` found.

  Attributes:
    patch: the changes as a unified diff; empty if the model needs no changes.
    texts: the changed text of each file.
    missing: the place that could not be annotated, with the reason. There is at most one, because jax stops
      there.
    notes: the places where the patch gathers the batch, which costs communication and memory.
  """

  patch: str
  texts: Mapping[str, str]
  missing: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()

  def __str__(self) -> str:
    missing = [f"not annotated: {text}" for text in self.missing]
    return "\n".join([self.patch.rstrip("\n"), *missing, *(f"note: {text}" for text in self.notes)])


def annotate(
  file: str | os.PathLike[str],
  mesh: AnyMesh,
  rules: Rules,
  batch: PyTree,
  *,
  init: str = "init",
  loss: str = "loss",
  modules: Iterable[str | os.PathLike[str]] = (),
) -> Annotation:
  """Writes a patch that adds to a model's file the shardings that Explicit axes require.

  The patch adds `out_sharding=` arguments and calls of `jax.sharding.reshard`. The patched model runs on
  Explicit axes in plain jax and flax, without `jax.sharding.auto_axes`; on Auto axes, jax refuses it. The
  function itself does not change the file.

  Args:
    file: the Python file that defines `init` and `loss`. The patch changes this file.
    mesh: a mesh, real or abstract, with axes of any type.
    rules: how names or paths map to mesh axes, as for `nxp.plan`.
    batch: a batch of arrays or `ShapeDtypeStruct`s.
    init: the name of the function that makes the model.
    loss: the name of the function `loss(model, batch)`.
    modules: other files that the patch may change and that the file imports, such as the file of the model.

  Returns:
    The patch, and the places that could not be annotated.

  Raises:
    RecipeError: the file does not define the functions.
    TrainError: the plan pads an array, which is not possible on Explicit axes.

  Example:
    >>> import nnx_parallel as nxp
    >>> recipe = nxp.recipes.load_recipe("starter")
    >>> found = nxp.interop.annotate(
    ...   recipe.source, nxp.abstract_mesh(fsdp=8), recipe.rules(), next(recipe.batches())
    ... )
    >>> 'self.embed(x, out_sharding=P("fsdp", None, None))' in found.texts[recipe.source], found.missing
    (True, ())
  """
  program = Program.read(map(Path, (file, *modules)))
  finder = _Finder(program)
  with program.loaded(finder.call) as module:
    hooked = _Traced(module, mesh, rules, batch, init, loss)
    finder.follow(hooked)
    missing = finder.refused(hooked)
    while finder.again and not missing:
      missing = finder.refused(hooked)
  made = program.edited({site: way.change for site, way in sorted(finder.found.items())})
  if not missing:
    with made.loaded() as module:
      missing = finder.refused(_Traced(module, mesh, rules, batch, init, loss), made)
  texts = {str(source.path): source.text for source in made.sources}
  return Annotation(_patch(program, made), texts, missing, finder.notes)


def _patch(before: Program, after: Program) -> str:
  """The differences as `git apply` and `patch` read them."""
  paths = [source.path for source in before.sources]
  folder = Path(os.path.commonpath([path.parent for path in paths])) if paths[0].is_absolute() else Path()
  lines = list[str]()
  for one, other in zip(before.sources, after.sources, strict=True):
    name = Path(os.path.relpath(one.path, folder)).as_posix()
    name += "\t" * (" " in name)  # as git writes it: else patch takes the first word
    was, now = one.text.splitlines(keepends=True), other.text.splitlines(keepends=True)
    lines += difflib.unified_diff(was, now, f"a/{name}", f"b/{name}")
  return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _Traced:
  """The loss of a module of Python, planned on Explicit axes."""

  def __init__(self, module: ModuleType, mesh: AnyMesh, rules: Rules, batch: PyTree, init: str, loss: str):
    for name in (init, loss):
      if not callable(getattr(module, name, None)):
        raise RecipeError(
          f"{module.__file__} does not define {name}().",
          fix=f"def {name}(...), or the name of your function.",
        )
    self._loss = getattr(module, loss)
    self.plan = plan(getattr(module, init), abstract_mesh(axis_sizes(mesh), explicit=True), rules)
    rows = self.plan.of("model")
    for row in rows.values():
      if any(row.padding):
        raise TrainError(
          f"the plan pads {row.name}, and arrays on Explicit axes cannot have hidden padding.",
          details=f"shape {row.shape}, stored as {row.storage_shape}",
          fix='uneven="next" or "replicate" instead of "pad".',
        )
    self._template = Template(self.plan.abstract["model"].node)
    arrays = [rows[self._template.paths[i]].struct for i in self._positions]
    examples = jax.tree.map(self._example, batch)
    self.inputs: tuple[list[jax.ShapeDtypeStruct], PyTree] = arrays, examples

  @property
  def _positions(self) -> list[int]:
    return sorted([*self._template.variables, *self._template.raw])

  def _example(self, x: AnyArray) -> jax.ShapeDtypeStruct:
    spec = self.plan.batch_spec(jnp.ndim(x))
    where = jax.NamedSharding(self.plan.mesh, spec)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=where)

  def loss(self, arrays: Sequence[jax.Array], batch: PyTree) -> jax.Array:
    """The loss as a function of arrays."""
    given = {**self._template.constants, **dict(zip(self._positions, arrays, strict=True))}
    with nnx.use_eager_sharding(False):
      model = self._template.build([given[i] for i in range(len(given))])
      found = terms(call_loss(self._loss, model, batch))
    return mean(found.sums["loss"], found.counts["loss"])

  def gradients(self) -> None:
    """Traces the loss and its gradients on Explicit axes."""
    arrays, batch = self.inputs
    floats = [n for n, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def gradients(arrays: list[jax.Array], batch: PyTree) -> PyTree:
      def loss(trained: list[jax.Array]) -> jax.Array:
        given = {**dict(enumerate(arrays)), **dict(zip(floats, trained, strict=True))}
        return self.loss([*given.values()], batch)

      return jax.grad(loss)([arrays[n] for n in floats])

    with scoped(self.plan.activation_rules):
      jax.eval_shape(gradients, arrays, batch)


@dataclasses.dataclass(frozen=True)
class _Way:
  """How to state a sharding at a site: `Change`, with mesh axes in place of text."""

  keywords: Mapping[str, Axes] = dataclasses.field(default_factory=dict[str, Axes])
  operands: Mapping[Place, Axes] = dataclasses.field(default_factory=dict[Place, Axes])
  form: str = ""

  def run(self, function: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The call of a site in this way; `method` is the name of a method as it is written."""
    inputs = [*args]
    for place, axes in self.operands.items():
      if not place:
        function = getattr(jax.sharding.reshard(function.__self__, _spec(axes)), method)
      elif len(place) == 1:
        inputs[place[0]] = jax.sharding.reshard(inputs[place[0]], _spec(axes))
      else:
        elements = [*inputs[place[0]]]
        elements[place[1]] = jax.sharding.reshard(elements[place[1]], _spec(axes))
        inputs[place[0]] = elements
    stated = {key: _spec(axes) for key, axes in self.keywords.items()}
    if self.form == "matmul":
      return jnp.matmul(*inputs, **stated)
    if self.form:
      return inputs[0].at[inputs[1]].get(**stated, mode="fill" if self.form == "take" else None)
    return function(*inputs, **kwargs, **stated)

  @property
  def change(self) -> Change:
    """The same, as text."""
    keywords = {name: _text(axes) for name, axes in self.keywords.items()}
    operands = {place: _text(axes) for place, axes in self.operands.items()}
    return Change(keywords, operands, self.form)


def _spec(axes: Axes) -> PartitionSpec:
  return PartitionSpec(*map(entry_of, axes))


def _text(axes: Axes) -> str:
  """The entries of a spec as they are written.

  Example:
    >>> _text((("data", "fsdp"), (), ("tensor",)))
    '("data", "fsdp"), None, "tensor"'
  """
  return ", ".join(repr(entry_of(dim)).replace("'", '"') for dim in axes)


class _Refused(Exception):
  """A site that no way of stating a sharding helps."""


class _Finder:
  """Calls the sites of a program: as they are, marked on Auto axes, or as Explicit axes need them.

  Attributes:
    found: how to state a sharding, by site.
    again: whether the last trace has found a way, so that its earlier calls may have another type now.
  """

  def __init__(self, program: Program):
    self._program = program
    self._mode = ""
    self._layouts: dict[int, Axes] = {}
    self._batch: frozenset[str] = frozenset()
    self._data: set[tuple[int, Place]] = set()
    self._failed: dict[int, list[_Way]] = {}
    self._gathers: dict[int, str] = {}
    self.found: dict[int, _Way] = {}
    self.again = False

  def call(self, site: int, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The hook."""
    if self._mode == "auto":
      return self._marked(site, function, args, kwargs)
    if self._mode == "explicit":
      return self._stated(site, function, args, kwargs)
    return function(*args, **kwargs)

  def _marked(self, site: int, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result on Auto axes, which refuse the shardings that a model states already."""
    for place in self._program.of(site).operands(site):
      _mark(_operand(place, function, args), site, place)
    stated = {key: x for key, x in kwargs.items() if key not in _STATED or _is_users(function)}
    return _mark(args[0] if any(function is x for x in _RESHARDS) else function(*args, **stated), site)

  def _stated(self, site: int, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result on Explicit axes."""
    way, method = self.found.get(site, _Way()), self._program.of(site).method(site)
    try:
      return way.run(function, method, args, kwargs)
    except Exception as error:
      if not _is_refusal(error) or self._program.is_inside(error):
        raise
      refusal = error
    self._failed.setdefault(site, []).append(way)
    places = {place: _operand(place, function, args) for place in self._program.of(site).operands(site)}
    arrays = {place: x for place, x in places.items() if _is_array(x)}
    resharded = [*self._resharded(site, arrays)]
    resharded.sort(key=lambda way: bool(self._gathered(site, way, arrays)))
    for way in (*self._of_result(site, function, kwargs), *resharded):
      if way in self._failed[site]:
        continue
      try:
        result = way.run(function, method, args, kwargs)
      except Exception as error:
        if not (_is_refusal(error) or isinstance(error, (AttributeError, *_UNFIT))):
          raise
        self._failed[site].append(way)
        continue
      self.found[site], self.again = way, True
      self._gathers.pop(site, None)
      if axes := self._gathered(site, way, arrays):
        why = self._why(function) + _elsewhere(refusal)
        self._gathers[site] = f"  gathers the batch over {listed(sorted(axes))}{why}"
      return result
    where = self._program.of(site).where(site)
    more = (
      self._why(function) + _elsewhere(refusal) or "\n  Fix: use rules that replicate the arrays of this line"
    )
    raise _Refused(_said(where, refusal) + more) from refusal

  @property
  def notes(self) -> tuple[str, ...]:
    """What costs more than on Auto axes: the sites that gather the batch."""
    return tuple(
      f"{self._program.of(site).where(site)}\n{text}" for site, text in sorted(self._gathers.items())
    )

  def _gathered(self, site: int, way: _Way, arrays: Mapping[Place, Any]) -> frozenset[str]:
    """The axes of the batch that an operand which depends on the batch loses."""
    lost = set[str]()
    for place, axes in way.operands.items():
      if (site, place) in self._data:
        lost.update({*itertools.chain(*_axes(arrays[place]))} - {*itertools.chain(*axes)})
    return self._batch & lost

  def _why(self, function: Any) -> str:
    """The vectors of a layer that the axes of the batch split, and what helps."""
    own = variables(function) if isinstance(function, nnx.Module) else {}
    vectors = {path_str(path): x for path, x in own.items() if jnp.ndim(value_of(x)) == 1}
    names = [name for name, x in vectors.items() if self._batch & {*itertools.chain(*_axes(x))}]
    if not names:
      return ""
    axes, each = listed(sorted(self._batch)), "it" if len(names) == 1 else "each"
    return f"\n  the batch and {few(names)} of this layer are split over {axes}; replicate {each} by a rule"

  def _of_result(self, site: int, function: Any, kwargs: Mapping[str, Any]) -> Iterator[_Way]:
    """The ways that state the sharding of the result."""
    layout, names = self._layouts.get(site), _parameters(function, self._program.of(site).method(site))
    if layout is None:
      return
    stated = {"out_sharding": layout}
    if isinstance(function, nnx.MultiHeadAttention):
      stated["qkv_sharding"] = self._of_heads(function, layout)
    if names - kwargs.keys() >= stated.keys():
      yield _Way(stated)
    if function is operator.matmul:
      yield _Way(stated, form="matmul")
    if function is operator.getitem:
      yield _Way(stated, form="get")
    if function is jnp.take and self._program.of(site).is_take(site):
      yield _Way(stated, form="take")

  def _resharded(self, site: int, arrays: Mapping[Place, Any]) -> Iterator[_Way]:
    """The ways that reshard operands: like the result, off the axes of the batch, or off all other axes."""
    layout = self._layouts.get(site)
    if layout is not None:
      yield from self._of_operands({place: _aligned(x, layout) for place, x in arrays.items()}, arrays)
    for kept in (self._axes - self._batch, self._batch, frozenset[str]()):
      layouts = {p: tuple(without(dim, self._axes - kept) for dim in _axes(x)) for p, x in arrays.items()}
      yield from self._of_operands(layouts, arrays)

  def _of_operands(self, layouts: Mapping[Place, Axes], arrays: Mapping[Place, Any]) -> Iterator[_Way]:
    """Each operand alone in its layout, then all, as far as that changes something."""
    changed = {n: axes for n, axes in layouts.items() if axes != _axes(arrays[n])}
    for n, axes in changed.items():
      yield _Way(operands={n: axes})
    if len(changed) > 1:
      yield _Way(operands=changed)

  def _of_heads(self, attention: Any, layout: Axes) -> Axes:
    """The layout of queries in `nnx.MultiHeadAttention`: (batch, length, heads, head size)."""
    kernel = _axes(attention.query.kernel[...])
    return (*layout[:-1], *(without(dim, self._batch) for dim in kernel[-2:]))

  def follow(self, traced: _Traced) -> None:
    """Traces on Auto axes, and finds the layout of the result of each site."""
    arrays, batch = traced.inputs
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.inputs)
    self._mode = "auto"
    with scoped(traced.plan.activation_rules.on_auto_axes()):
      try:
        program = jax.make_jaxpr(traced.loss)(*plain)
      except Exception as error:
        if "of type Auto" not in str(error):
          raise
        where, _, fix = _elsewhere(error).partition("\n  Fix: ")
        raise RecipeError(
          "the model states a sharding where it is not seen, so it cannot be traced on Auto axes.",
          details=str(error).split("\n")[0] + where.replace("\n  ", "\n"),
          fix=fix or "state it in the call, not in a functools.partial.",
        ) from error
    self._mode, sizes = "", axis_sizes(traced.plan.mesh)
    self._batch, self._axes = frozenset(traced.plan.batch_axes), frozenset(sizes)
    marked: dict[tuple[int, int], Axes] = {}

    def followed(eqn: JaxprEqn, flows: list[Flow]) -> Any:
      if eqn.primitive.name != "shard_map" and wiring(eqn).inner:
        return DEFAULT
      found = _followed(eqn, flows, self._batch)
      if eqn.primitive.name == "optimization_barrier" and (mark := _MARKED.search(scope_of(eqn))):
        site, rank, place = ast.literal_eval(mark[1])
        shape = eqn.outvars[0].aval.shape
        dims = [_dividing(dim, size, sizes) for dim, size in zip(found[0].axes, shape, strict=True)]
        if place is None:
          marked[site, id(eqn)] = tuple(dims[len(dims) - rank :])  # `jax.vmap` adds dims in front
        elif found[0].data:
          self._data.add((site, place))
      return found

    flows = [_flow(x, data=False) for x in arrays] + [_flow(x, data=True) for x in jax.tree.leaves(batch)]
    facts_of(program, flows, flow_facts(followed))
    for (site, _), axes in marked.items():
      self._layouts[site] = _common(self._layouts.get(site, axes), axes)

  def refused(self, traced: _Traced, program: Program | None = None) -> tuple[str, ...]:
    """Traces on Explicit axes; returns what jax refuses still."""
    self._mode, self.again = "explicit", False
    try:
      traced.gradients()
    except _Refused as error:
      return (str(error),)
    except Exception as error:
      refusal = error.__cause__ if isinstance(error, TrainError) and error.__cause__ else error
      if not _is_refusal(refusal):
        raise
      fix = "Fix: use rules that replicate the arrays of this line; or x = x @ w in place of x @= w"
      return (f"{_said((program or self._program).on_stack(refusal), refusal)}\n  {fix}",)
    finally:
      self._mode = ""
    return ()


def _is_users(function: Any) -> bool:
  """Whether a function is not of a library, which is called without shardings on Auto axes."""
  found = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
  return found is not None and not found.co_filename.startswith(_LIBRARIES)


def _said(where: str, error: BaseException) -> str:
  said = str(error).split("\n")[0]
  return f"{where}\n  {type(error).__name__}: {said}"


def _elsewhere(error: BaseException) -> str:
  """The line of another file of the user that raised an error of jax, and how to change that file too."""
  for frame in reversed(traceback.extract_tb(error.__traceback__)):
    if frame.filename.endswith(".py") and not frame.filename.startswith(_LIBRARIES):
      line = f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
      return f"\n  for {line}\n  Fix: change that file too: modules=[{frame.filename!r}]"
  return ""


def _is_refusal(error: BaseException) -> bool:
  """Whether jax asks for a sharding; it does not export the classes of most of these errors."""
  named = type(error).__name__ in ("DuplicateSpecError", "ShardingTypeError")
  said = str(error)
  return named or (isinstance(error, _UNFIT) and ("sharding" in said or "Incompatible types" in said))


def _mark(x: Any, site: int, place: Place | None = None) -> Any:
  """An array of a trace with a mark that the trace keeps; other values as they are."""
  if not isinstance(x, Tracer) or is_key(x.dtype):
    return x
  with jax.named_scope(_MARK.format((site, x.ndim, place))):
    return jax.lax.optimization_barrier(x)


def _parameters(function: Any, method: str) -> set[str]:
  """The names of the arguments of a function, or of a method of an array."""
  if _is_array(getattr(function, "__self__", None)):
    function = getattr(jax.Array, method, function)
  try:
    return {*inspect.signature(function).parameters}
  except (TypeError, ValueError):  # written in C
    return set()


def _operand(place: Place, function: Any, args: Sequence[Any]) -> Any:
  if not place:
    return getattr(function, "__self__", None)
  return args[place[0]] if len(place) == 1 else args[place[0]][place[1]]


def _is_array(x: object) -> bool:
  return isinstance(x, (jax.Array, nnx.Variable)) and jnp.ndim(value_of(x)) > 0


def _axes(x: Any) -> Axes:
  x = value_of(x)
  return axes_by_dim(jax.typeof(x).sharding.spec, x.ndim)


def _aligned(x: Any, layout: Axes) -> Axes:
  """The layout of a result for an operand that is broadcast to it."""
  dims = ((), *layout[-x.ndim :]) if x.ndim > len(layout) else layout[len(layout) - x.ndim :]
  return tuple(axes if size > 1 else () for size, axes in zip(x.shape, dims, strict=False))


def _dividing(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
  """The first axes that divide a dim."""
  while size % math.prod(sizes[axis] for axis in axes):
    axes = axes[:-1]
  return axes


def _common(one: Axes, other: Axes) -> Axes:
  """What two layouts of one site have in common."""
  if len(one) != len(other):
    return one
  return tuple(a if a == b else () for a, b in zip(one, other, strict=True))


def _flow(x: jax.ShapeDtypeStruct, *, data: bool) -> Flow:
  return Flow(axes_by_dim(x.sharding.spec, x.ndim), data, weight=not data)  # pyright: ignore


def _followed(eqn: JaxprEqn, flows: list[Flow], batch: frozenset[str]) -> list[Flow]:
  """The layouts of the results of an operation."""
  data, weight = any(flow.data for flow in flows), any(flow.weight for flow in flows)
  found = result_axes(eqn, flows)
  product = meeting(eqn)
  if eqn.primitive.name == "sharding_constraint":
    found = [constraint(eqn, flows[0].axes)]
  elif eqn.primitive.name == "shard_map":
    manual, specs = frozenset(eqn.params["newly_manual_axes"]), eqn.params["out_specs"]
    found = [shard_map_axes(spec, axes, manual) for spec, axes in zip(specs, found, strict=True)]
  elif product is not None:
    found = [product.meet(flows[0], flows[1], batch).axes]
  return [Flow(axes, data, weight) for axes in found]
