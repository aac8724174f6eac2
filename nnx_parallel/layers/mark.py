"""Marks the calls of layers: each is one closed call in the trace of a loss.

A trace has no modules. Within `marked`, the call of a layer becomes one `jit` operation, named after its
path, with its Variables and arrays as inputs, and its results and state changes as outputs. The modules must
be copies that belong to the trace, as `nnx.merge` makes them: their class is replaced by a subclass whose
`__call__` does this. The user's class and live modules stay untouched.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_parallel.core.layers import Layers
from nnx_parallel.core.nodes import Path, path_str
from nnx_parallel.errors import TrainError

MARK = "layer:"
"""Starts the name of each marked call."""
_NONE: Mapping[int, tuple[str, Any]] = MappingProxyType({})
_LAYERS: contextvars.ContextVar[Mapping[int, tuple[str, Any]]] = contextvars.ContextVar(
  "layers", default=_NONE
)


@contextlib.contextmanager
def marked(model: Any, found: Iterable[Layers]) -> Generator[None]:
  """Marks the calls of layers while its body is traced.

  Args:
    model: modules that belong to this trace, or a tuple or dict of them.
    found: their layers.

  Yields:
    Nothing.
  """
  layers = {path: _at(model, path) for group in found for path in group.paths}
  kinds = [_marking(type(layer), not jax.tree_util.all_leaves([layer])) for layer in layers.values()]
  for layer, kind in zip(layers.values(), kinds, strict=True):
    # No attribute of the module, so that its structure stays the same.
    object.__setattr__(layer, "__class__", kind)
  # Held, so that no other object gets the id.
  token = _LAYERS.set({id(layer): (path_str(path), layer) for path, layer in layers.items()})
  try:
    yield
  finally:
    _LAYERS.reset(token)
    for layer in layers.values():
      object.__setattr__(layer, "__class__", type(layer).__mro__[1])


def layer_of(eqn: Any) -> str:
  """The dotted path of the layer whose call this is."""
  return str(eqn.params["name"]).removeprefix(MARK)


def is_marked(eqn: Any) -> bool:
  """Whether an operation of a trace is the call of a layer."""
  return str(eqn.params.get("name", "")).startswith(MARK)


@functools.cache
def _marking(kind: type, pytree: bool) -> type:
  """The subclass of a layer's class whose calls are marked.

  Raises:
    TrainError: the class refuses to have one.
  """

  def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
    found = _LAYERS.get().get(id(self))
    if found is None:
      return kind.__call__(self, *args, **kwargs)
    return _closed_call(found[0], kind, self, args, kwargs)

  body = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
  options: dict[str, Any] = {} if pytree else {"pytree": False}
  try:
    return type(kind)(kind.__name__, (kind,), body, **options)
  except TypeError as error:
    raise TrainError(
      f"the calls of {kind.__qualname__} cannot be marked as those of layers: it refuses a subclass.",
      details=str(error),
      fix="@nnx.remat on its __call__, and no roll=; or an __init_subclass__ whose arguments have defaults.",
    ) from error


def _closed_call(name: str, kind: type, layer: Any, args: Any, kwargs: Any) -> Any:
  leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
  # NumPy arrays stay what they are: Python may compute with them.
  dynamic = {n: x for n, x in enumerate(leaves) if _is_node(x) or isinstance(x, jax.Array)}
  result: list[Any] = []

  def call(layer: Any, given: dict[int, Any]) -> dict[int, Any]:
    inner_args, inner_kwargs = jax.tree.unflatten(tree, [given.get(n, x) for n, x in enumerate(leaves)])
    token = _LAYERS.set(_NONE)  # no layers inside a layer
    try:
      returned = kind.__call__(layer, *inner_args, **inner_kwargs)
    finally:
      _LAYERS.reset(token)
    out, structure = jax.tree.flatten(returned, is_leaf=_is_node)
    result[:] = structure, out
    return {n: x for n, x in enumerate(out) if _is_node(x) or isinstance(x, (jax.Array, np.ndarray))}

  call.__name__ = f"{MARK}{name}"
  found = nnx.jit(call)(layer, dynamic)
  structure, out = result
  return jax.tree.unflatten(structure, [found.get(n, x) for n, x in enumerate(out)])


def _is_node(x: Any) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def _at(model: Any, path: Path) -> Any:
  for part in path:
    key: Any = part
    model = model[key] if isinstance(model, (nnx.List, list, tuple, dict)) else getattr(model, str(key))
  return model
