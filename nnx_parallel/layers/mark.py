"""Marks the calls of layers: each is one closed call in the trace of a loss.

A trace has no modules. Within `marked`, the call of a layer becomes one `jit` operation, named after its
path. Its inputs are the layer's Variables and arrays; its outputs are the results and the Variables that the
call changes. The modules must be copies that belong to the trace, as `nnx.merge` makes them: their class is
replaced by a subclass whose `__call__` does this. Copies that `nnx.vmap` makes of them keep the subclass. The
user's class and live modules stay untouched.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.core.jaxprs import (
  CALLS,
  among,
  called,
  is_checkpoint,
  is_inexact,
  is_tracer,
  opened,
  scan_counts,
)
from nnx_parallel.core.layers import Layers, modules_of
from nnx_parallel.core.nodes import is_key, path_str
from nnx_parallel.core.types import DType, Jaxpr, JaxprEqn, Model, Program, PyTree, Value, Var
from nnx_parallel.errors import TrainError

MARK = "layer:"
"""Starts the name of each marked call."""
_MARKS: contextvars.ContextVar[bool] = contextvars.ContextVar("whether calls are marked", default=False)


@dataclasses.dataclass
class Scalars:
  """Numbers of Python among the arguments of layers: `aux = 0.0`, to which each layer adds an array.

  Without it, the first layer would be traced with a constant, and its program would differ from later layers.

  Attributes:
    given: the arguments that were Python numbers -> the numbers.
    arrays: the arguments that were scalar arrays -> their dtype; None where the dtype differs between calls.
    traced: the arguments that become arrays of this dtype.
  """

  given: dict[Hashable, list[float]] = dataclasses.field(default_factory=dict[Hashable, list[float]])
  arrays: dict[Hashable, DType | None] = dataclasses.field(default_factory=dict[Hashable, DType | None])
  traced: Mapping[Hashable, DType | None] = dataclasses.field(default_factory=dict[Hashable, DType | None])

  @property
  def mixed(self) -> dict[Hashable, DType | None]:
    """The arguments that are numbers in some calls and arrays in others -> the dtype of the arrays."""
    return {place: dtype for place in self.given if (dtype := self.arrays.get(place)) is not None}

  def array(self, place: Hashable, x: Value) -> jax.Array | None:
    """A scalar as the array that the layer receives; None: the scalar stays as it is."""
    if is_tracer(x):
      self.arrays[place] = x.dtype if self.arrays.get(place, x.dtype) == x.dtype else None
      return x
    dtype = self.traced.get(place)
    kind = jnp.inexact if isinstance(x, float) else jnp.number
    own = getattr(x, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, kind) if own is None else own == dtype):
      return jnp.asarray(x, dtype)
    self.given.setdefault(place, []).append(float(x))
    return None


_SCALARS: contextvars.ContextVar[Scalars | None] = contextvars.ContextVar("scalars", default=None)


@contextlib.contextmanager
def scalars_as(scalars: Scalars) -> Generator[None]:
  """Notes in its body the numbers that layers get, and makes arrays of some of them."""
  token = _SCALARS.set(scalars)
  try:
    yield
  finally:
    _SCALARS.reset(token)


class _NewStructure(Exception):
  """A layer changes more than the values of Variables, or returns a module."""


@contextlib.contextmanager
def marked(model: Model, found: Iterable[Layers]) -> Generator[None]:
  """Marks the calls of layers of modules that belong to a trace, while its body is traced."""
  modules = dict(modules_of(model))
  layers = {path: modules[path] for group in found for path in group.paths}
  kinds = {
    path: _marking(type(layer), path_str(path), not jax.tree_util.all_leaves([layer]))
    for path, layer in layers.items()
  }
  for path, layer in layers.items():
    # No attribute of the module, so that its structure stays the same.
    object.__setattr__(layer, "__class__", kinds[path])
  token = _MARKS.set(True)
  try:
    yield
  finally:
    _MARKS.reset(token)
    for layer in layers.values():
      object.__setattr__(layer, "__class__", type(layer).__mro__[1])


def layer_of(eqn: JaxprEqn) -> str:
  """The dotted path of the layer whose call this is."""
  return str(eqn.params["name"]).split(":", 2)[2]


def kind_of_layer(eqn: JaxprEqn) -> str:
  """The name of the class of the layer whose call this is."""
  return str(eqn.params["name"]).split(":", 2)[1]


def is_marked(eqn: JaxprEqn) -> bool:
  """Whether an operation of a trace is the call of a layer."""
  return str(eqn.params.get("name", "")).startswith(MARK)


def calls_layers(jaxpr: Program) -> bool:
  """Whether a program calls marked layers, also inside calls, checkpoints and scans."""
  return any(map(is_or_has_layers, opened(jaxpr).eqns))


def is_or_has_layers(eqn: JaxprEqn) -> bool:
  """Whether an operation is the call of a layer, or a call, checkpoint or scan that contains one."""
  inside = eqn.primitive.name in (*CALLS, "scan") or is_checkpoint(eqn)
  return is_marked(eqn) or (inside and calls_layers(called(eqn)))


def repeats_layers(eqn: JaxprEqn) -> bool:
  """Whether a scan calls the same layers in each step, as `jax.lax.map` does with a model."""
  body = opened(eqn.params["jaxpr"])
  _, _, rows = scan_counts(eqn).split(body.invars)
  found = [*_reads_of_layers(body, {var for var in rows if is_inexact(var.aval)})]
  return bool(found) and not all(found)


def _reads_of_layers(body: Jaxpr, rows: set[Var]) -> Iterator[bool]:
  """For each call of a layer, whether it reads any of the given inputs."""
  for eqn in body.eqns:
    if is_marked(eqn):
      yield any(among(var, rows) for var in eqn.invars)
    elif is_or_has_layers(eqn):
      inner = opened(called(eqn))
      own = {own for own, var in zip(inner.invars, eqn.invars, strict=True) if among(var, rows)}
      yield from _reads_of_layers(inner, own)


@functools.cache
def _marking(kind: type, name: str, pytree: bool) -> type:
  """The subclass of a layer's class whose calls are marked with its name."""

  def __call__(self: object, *args: object, **kwargs: object) -> object:
    if not _MARKS.get():
      return kind.__call__(self, *args, **kwargs)
    return _closed_call(name, kind, self, args, kwargs)

  body = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
  options: dict[str, Any] = {} if pytree else {"pytree": False}
  try:
    return type(kind)(kind.__name__, (kind,), body, **options)
  except TypeError as error:
    raise TrainError(
      f"the calls of {kind.__qualname__} cannot be marked as a layer's: it refuses a subclass.",
      details=str(error),
      fix="@nnx.remat on its __call__, and no scan_layers=; or an __init_subclass__ whose arguments have"
      " defaults.",
    ) from error


def _closed_call(
  name: str, kind: type, layer: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> PyTree:
  leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
  # NumPy arrays stay as they are: Python may compute with them.
  nodes = {n: x for n, x in enumerate(leaves) if _is_node(x)}
  scalars = _SCALARS.get() or Scalars()
  arrays: dict[int, jax.Array] = {}
  for n, x in enumerate(leaves):
    if type(x) in (int, float) or _is_number(x):
      # A scalar that is not a tracer stays as it is too.
      array = scalars.array((kind, tree, n), x)
      arrays |= {} if array is None else {n: array}
    elif isinstance(x, jax.Array):
      arrays[n] = x
  result: list[PyTree] = []

  def call(modules: tuple[Any, dict[int, Value]], given: dict[int, Value]) -> dict[int, Value]:
    given = {**given, **modules[1]}
    inner_args, inner_kwargs = jax.tree.unflatten(tree, [given.get(n, x) for n, x in enumerate(leaves)])
    token = _MARKS.set(False)  # no layers inside a layer
    try:
      returned = kind.__call__(modules[0], *inner_args, **inner_kwargs)
    finally:
      _MARKS.reset(token)
    out, structure = jax.tree.flatten(returned, is_leaf=_is_node)
    result[:] = structure, out
    return {n: x for n, x in enumerate(out) if _is_node(x) or isinstance(x, (jax.Array, np.ndarray))}

  call.__name__ = f"{MARK}{kind.__name__}:{name}"
  try:
    found = _with_changes(call, (layer, nodes), arrays)
  except _NewStructure:
    found = nnx.jit(call)((layer, nodes), arrays)
  structure, out = result
  return jax.tree.unflatten(structure, [found.get(n, x) for n, x in enumerate(out)])


def _with_changes(call: Callable[..., dict[int, Value]], modules: PyTree, arrays: PyTree) -> dict[int, Value]:
  """`nnx.jit(call)(modules, arrays)`, but writes only the Variables that the call changes.

  `nnx.jit` writes all Variables. Inside `jax.vmap` and other transforms, a model from outside must not be
  written.

  Raises:
    _NewStructure: the call changes more than the values of Variables and arrays, or returns a module.
  """
  graphdef, state = nnx.split(modules)
  leaves, structure = jax.tree.flatten(state)
  changed: list[int] = []

  def pure(leaves: list[jax.Array], arrays: PyTree) -> tuple[dict[int, jax.Array], list[jax.Array]]:
    inner = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
    found = call(inner, arrays)
    graph, state = nnx.split(inner)
    after, form = jax.tree.flatten(state)
    if graph != graphdef or form != structure or any(map(_is_node, found.values())):
      raise _NewStructure
    changed[:] = [n for n, (x, y) in enumerate(zip(leaves, after, strict=True)) if x is not y]
    return found, [after[n] for n in changed]

  pure.__name__ = call.__name__
  found, values = jax.jit(pure)(leaves, arrays)
  if changed:
    new = dict(zip(changed, values, strict=True))
    flat = nnx.to_flat_state(jax.tree.unflatten(structure, [new.get(n, x) for n, x in enumerate(leaves)]))
    nnx.update(modules, nnx.from_flat_state([(path, x) for n, (path, x) in enumerate(flat) if n in new]))
  return found


def _is_number(x: object) -> bool:
  if not isinstance(x, (jax.Array, np.generic)) or x.ndim:
    return False
  return not is_key(x.dtype) and not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _is_node(x: object) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))
