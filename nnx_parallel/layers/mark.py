"""Marks the calls of layers: each is one closed call in the trace of a loss.

A trace has no modules. Within `marked`, the call of a layer becomes one `jit` operation, named after its
path. Its inputs are the layer's Variables and arrays; its outputs are the results and the Variables that the
call changes. Inside it, `jax.checkpoint` applies the policy of `remat=`, and with a rule for `seq` the
positions of what comes in and goes out are split (arXiv:2205.05198):

  x = block(x)   ->   x = jit[name=layer:Block:blocks.0](checkpoint(body))(Variables of block, x)

The modules must be copies that belong to the trace, as `nnx.merge` makes them: `layers/calls.py` carries the
mark to each call.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.core.jaxprs import (
  CALLS,
  MARK,
  among,
  is_checkpoint,
  is_inexact,
  is_marked,
  is_tracer,
  open_jaxpr,
  program_of,
  scan_counts,
)
from nnx_parallel.core.layers import Layers, modules_of
from nnx_parallel.core.nodes import Path, is_key, path_str
from nnx_parallel.core.types import Jaxpr, JaxprEqn, Model, Program, PyTree, Value, Var
from nnx_parallel.layers.calls import around_calls
from nnx_parallel.layers.remat import Remat, checkpoint_layer
from nnx_parallel.layout.constrain import split_positions


@dataclasses.dataclass(frozen=True)
class _Mark:
  """The mark of a module; the marks of equal layers are equal, so that their structures stay equal."""

  remat: Remat  # what its calls save. JAX keeps traces of functions by the structure of what they get.
  group: str  # the layers that it belongs to
  # None: each call is a layer's. Otherwise, only a call with arrays of fewer dims is, of one slice of a
  # module whose layers are stacked.
  ranks: tuple[int, ...] | None
  path: Path = dataclasses.field(compare=False)  # of the module

  def __call__(
    self, call: Callable[..., Any], layer: object, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> PyTree:
    marking = _MARKING.get()
    if marking is None or (self.ranks is not None and not _is_slice(layer, self.ranks)):
      return call(layer, *args, **kwargs)
    return _closed_call(call, self, marking, layer, args, kwargs)


@dataclasses.dataclass
class Marking:
  """What is marked in one trace."""

  # the calls so far, by group
  calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
  # the paths of modules that were called slice by slice
  stacks: set[Path] = dataclasses.field(default_factory=set[Path])


_MARKING: contextvars.ContextVar[Marking | None] = contextvars.ContextVar("marking", default=None)


class _NewStructure(Exception):
  """A layer changes more than the values of Variables, or returns a module."""


@contextlib.contextmanager
def marked(model: Model, found: Iterable[Layers], remat: Remat, *, stacks: bool = True) -> Generator[Marking]:
  """Marks the calls of layers while its body is traced; with `stacks`, also of slices of other modules."""
  modules = dict(modules_of(model))
  layers = {path: _Mark(remat, some.pattern, None, path) for some in found for path in some.paths}
  outside = [path for path in modules if not any(path[:n] in layers for n in range(len(path) + 1))]
  states = {path: jax.tree.leaves(nnx.state(modules[path])) for path in outside if stacks}
  ranks = {path: tuple(map(jnp.ndim, leaves)) for path, leaves in states.items()}
  slices = {
    path: _Mark(remat, path_str(path), own, path)
    for path, own in ranks.items()
    if max(own, default=0) > 2  # a slice has a matrix
  }
  marks = layers | slices
  marking = Marking()
  token = _MARKING.set(marking)
  try:
    with around_calls((modules[path], mark) for path, mark in marks.items()):
      yield marking
  finally:
    _MARKING.reset(token)


def layer_of(eqn: JaxprEqn) -> str:
  """The dotted path of the layer whose call this is."""
  return str(eqn.params["name"]).split(":", 2)[2]


def kind_of_layer(eqn: JaxprEqn) -> str:
  """The name of the class of the layer whose call this is."""
  return str(eqn.params["name"]).split(":", 2)[1]


def calls_layers(jaxpr: Program) -> bool:
  """Whether a program calls marked layers, also inside calls, checkpoints and scans."""
  return any(map(is_or_has_layers, open_jaxpr(jaxpr).eqns))


def is_or_has_layers(eqn: JaxprEqn) -> bool:
  """Whether an operation is the call of a layer, or a call, checkpoint or scan that contains one."""
  inside = eqn.primitive.name in (*CALLS, "scan") or is_checkpoint(eqn)
  return is_marked(eqn) or (inside and calls_layers(program_of(eqn)))


def repeats_layers(eqn: JaxprEqn) -> bool:
  """Whether a scan calls the same layers in each step, as `jax.lax.map` does with a model."""
  body = open_jaxpr(eqn.params["jaxpr"])
  _, _, rows = scan_counts(eqn).split(body.invars)
  found = [*_reads_of_layers(body, {var for var in rows if is_inexact(var.aval)})]
  return bool(found) and not all(found)


def _reads_of_layers(body: Jaxpr, rows: set[Var]) -> Iterator[bool]:
  """For each call of a layer, whether it reads any of the given inputs."""
  for eqn in body.eqns:
    if is_marked(eqn):
      yield any(among(var, rows) for var in eqn.invars)
    elif is_or_has_layers(eqn):
      inner = open_jaxpr(program_of(eqn))
      own = {own for own, var in zip(inner.invars, eqn.invars, strict=True) if among(var, rows)}
      yield from _reads_of_layers(inner, own)


def _is_slice(module: object, ranks: tuple[int, ...]) -> bool:
  """Whether a module has arrays of fewer dims than the model has, and not because `jax.vmap` hides a dim."""
  leaves = jax.tree.leaves(nnx.state(module))
  if len(leaves) != len(ranks) or any(map(is_batched, leaves)):
    return False
  return any(jnp.ndim(x) < rank for x, rank in zip(leaves, ranks, strict=True))


def is_batched(x: object) -> bool:
  """Whether `jax.vmap` hides a dim of a value."""
  return is_tracer(x) and hasattr(x, "batch_dim")


def _closed_call(
  run: Callable[..., object],
  mark: _Mark,
  marking: Marking,
  layer: object,
  args: tuple[object, ...],
  kwargs: Mapping[str, object],
) -> PyTree:
  number = marking.calls[mark.group]
  marking.calls[mark.group] += 1
  if mark.ranks is not None:
    marking.stacks.add(mark.path)
  leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
  # NumPy arrays and known numbers stay as they are: Python may compute with them.
  nodes = {n: x for n, x in enumerate(leaves) if _is_node(x)}
  arrays = {
    n: x
    for n, x in enumerate(leaves)
    if isinstance(x, jax.Array) and (is_tracer(x) or x.ndim or is_key(x.dtype))
  }
  result: list[PyTree] = []

  def call(modules: tuple[Any, dict[int, Value]], given: dict[int, Value]) -> dict[int, Value]:
    given = {**{n: split_positions(x) for n, x in given.items()}, **modules[1]}
    inner_args, inner_kwargs = jax.tree.unflatten(tree, [given.get(n, x) for n, x in enumerate(leaves)])
    token = _MARKING.set(None)  # no layers inside a layer
    try:
      returned = run(modules[0], *inner_args, **inner_kwargs)
    finally:
      _MARKING.reset(token)
    out, structure = jax.tree.flatten(returned, is_leaf=_is_node)
    result[:] = structure, out
    found = {n: split_positions(x) if isinstance(x, jax.Array) else x for n, x in enumerate(out)}
    return {n: x for n, x in found.items() if _is_node(x) or isinstance(x, (jax.Array, np.ndarray))}

  call.__name__ = f"{MARK}{type(layer).__name__}:{path_str(mark.path)}"
  policy = functools.partial(checkpoint_layer, remat=mark.remat, call=number)
  try:
    found = _with_changes(call, (layer, nodes), arrays, policy)
  except _NewStructure:
    recomputed = policy(call, checkpoint=nnx.remat)
    recomputed.__name__ = call.__name__
    found = nnx.jit(recomputed)((layer, nodes), arrays)
  structure, out = result
  return jax.tree.unflatten(structure, [found.get(n, x) for n, x in enumerate(out)])


def _with_changes(
  call: Callable[..., dict[int, Value]],
  modules: PyTree,
  arrays: PyTree,
  checkpoint: Callable[..., Callable[..., Any]],
) -> dict[int, Value]:
  """`nnx.jit(checkpoint(call))(modules, arrays)`, but writes only the Variables that the call changes.

  `nnx.jit` writes all, and inside `jax.vmap` a model from outside must not be written. `_NewStructure` if the
  call changes more than the values of Variables and arrays, or returns a module.
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

  recomputed = checkpoint(pure)
  recomputed.__name__ = call.__name__
  found, values = jax.jit(recomputed)(leaves, arrays)
  if changed:
    new = dict(zip(changed, values, strict=True))
    flat = nnx.to_flat_state(jax.tree.unflatten(structure, [new.get(n, x) for n, x in enumerate(leaves)]))
    nnx.update(modules, nnx.from_flat_state([(path, x) for n, (path, x) in enumerate(flat) if n in new]))
  return found


def _is_node(x: object) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))
