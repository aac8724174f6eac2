"""Modules and optimizers without arrays: what a constructor would build, and the program that computes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.nodes import Path, array_leaves, is_rng, kind_of, value_of, variables
from nnx_parallel.errors import PlanError
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.layout.tracing import Trace, make_optimizer, run_init, trace


def trace_module(init: Callable[[], nnx.Module], mesh: AnyMesh | None = None) -> Trace:
  """Traces a constructor, keeping every annotation; its constraints may name the axes of `mesh`."""
  is_module = isinstance(init, nnx.Module)
  if is_module or not callable(init):
    shown = type(init).__name__
    raise PlanError(
      f"init must be a function that builds the module, and not of type {shown}.",
      fix=f"lambda: {shown if is_module else 'MyModule'}(..., rngs=nnx.Rngs(0))",
    )
  called = init if isinstance(init, functools.partial) else functools.partial(init)
  shown = getattr(called.func, "__name__", type(called.func).__name__).replace("<lambda>", "init")
  missing = _missing(called)
  if missing:
    values = [f"{name}={'nnx.Rngs(0)' if name == 'rngs' else '...'}" for name in missing]
    given = "..., " if called.args or called.keywords else ""
    raise PlanError(
      f"init must take no arguments, and {shown} needs {', '.join(missing)}.",
      fix=f"lambda: {shown}({given}{', '.join(values)})",
    )
  return trace(lambda: run_init(init, mesh))


def _missing(init: functools.partial[Any]) -> list[str]:
  """The parameters without a default."""
  if inspect.isclass(init.func):  # the signature of an nnx.Module's metaclass hides that of `__init__`
    init = functools.partial(init.func.__init__, None, *init.args, **init.keywords)
  return [
    p.name
    for p in inspect.signature(init).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def check_transformation(tx: object) -> None:
  """Raises a `PlanError` for anything but an optax transformation."""
  if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
    return
  kind = type(tx).__name__
  if isinstance(tx, nnx.Optimizer):
    what = f"an nnx.Optimizer ({kind}), which belongs to a live model"
    fix = "optimizer=optimizer.tx; create_sharded_model(plan) returns a model and its nnx.Optimizer."
  elif callable(tx):
    name = getattr(tx, "__name__", kind)
    room = "optax." if getattr(tx, "__module__", "").startswith("optax.") else ""
    what, fix = f"the function {name}, which was not called", f"optimizer={room}{name}(1e-3)"
  else:
    rate = tx if isinstance(tx, float) else 1e-3
    what, fix = f"{tx!r:.60}", f"optimizer=optax.adamw({rate})"
  raise PlanError(f"optimizer must be an optax transformation, and is {what}.", fix=fix)


def trace_optimizer(model: nnx.Module, tx: optax.GradientTransformation, wrt: Any) -> Trace:
  """Traces the optimizer of an abstract module."""
  check_transformation(tx)
  if not jax.tree.leaves(nnx.state(model, wrt)):
    raise nothing_selected(wrt, model)
  # The model is an argument so that optimizers that compute with parameters see arrays, not shapes.
  return trace(lambda traced: make_optimizer(traced, tx, wrt), model)


def nothing_selected(wrt: Any, model: nnx.Module) -> PlanError:
  """The error for a filter that matches no Variable."""
  kinds = sorted({kind_of(leaf) for leaf in variables(model).values() if not is_rng(leaf)})
  return PlanError(
    f"wrt={wrt!r} selects none of the model's Variables, so there is nothing to train.",
    details=f"Variable types in the model: {', '.join(kinds) or 'none'}",
    fix="wrt=nnx.Param, or a filter that matches some of them.",
  )


def factored_dims(
  model: nnx.Module, tx: optax.GradientTransformation, wrt: Any, optimizer: nnx.Optimizer[Any]
) -> dict[Path, tuple[int | None, ...]]:
  """Which parameter dims a factored state array keeps; shapes alone are ambiguous for square parameters.

  The optimizer is built once more for parameters whose equal dims differ by one element each.
  """
  rows = {path: tuple(value_of(leaf).shape) for path, leaf in array_leaves(model).items()}
  probes = {path: optimizer_layout.distinct_sizes(shape) for path, shape in rows.items()}
  state = array_leaves(optimizer)
  owned = optimizer_layout.parameters_of(state, rows)
  unclear = {
    path: parameter
    for path, parameter in owned.items()
    if probes[parameter] != rows[parameter] and 0 < len(value_of(state[path]).shape) < len(rows[parameter])
  }
  if not unclear:
    return {}
  graphdef, values = nnx.split(model)
  probed: list[Any] = [
    (path, leaf.copy(jax.ShapeDtypeStruct(probes[path], value_of(leaf).dtype)) if path in rows else leaf)
    for path, leaf in nnx.to_flat_state(values)
  ]
  other = array_leaves(trace_optimizer(nnx.merge(graphdef, nnx.from_flat_state(probed)), tx, wrt).node)
  found = {
    path: optimizer_layout.matching_dims(tuple(value_of(other[path]).shape), probes[parameter])
    for path, parameter in unclear.items()
    if path in other
  }
  return {path: dims for path, dims in found.items() if dims is not None}
