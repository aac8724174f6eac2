"""Calls a loss function, and restates internal errors of flax and jax in terms of the user's model."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from flax import errors, nnx

from nnx_parallel.core.nodes import path_str
from nnx_parallel.errors import TrainError


def call_loss(loss_fn: Callable[[Any, Any], Any], models: Any, batch: Any) -> Any:
  """`loss_fn(models, batch)` on traced arrays.

  Raises:
    TrainError: it changes a Variable of a module that is no argument of the step; or a layer cannot run on
      the Explicit axes of its mesh.
  """
  with _Explained(loss_fn, models):
    return loss_fn(models, batch)


class _Explained:
  """Raises a `TrainError` from two errors of the body whose text names no module."""

  def __init__(self, loss_fn: Callable[[Any, Any], Any], models: Any):
    self.loss_fn, self.models = loss_fn, models

  def __enter__(self) -> None:
    """Nothing to prepare."""

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    """Looks at the error, if there is one."""
    if error is None:
      return
    if isinstance(error, errors.TraceContextError):
      raise _of_another_module(self.loss_fn, error) from error
    # jax does not export this class.
    if kind is not None and kind.__name__ == "ShardingTypeError":
      raise _on_explicit_axes(_layer(self.models, trace), error) from error


def _first_line(error: BaseException) -> str:
  return str(error).split("\n")[0].split(" (https://")[0]


def _of_another_module(loss_fn: Callable[[Any, Any], Any], error: BaseException) -> TrainError:
  try:
    found = inspect.getclosurevars(inspect.unwrap(loss_fn))
    outside = {**found.nonlocals, **found.globals}
  except (TypeError, ValueError):  # no Python function, or one with a name that is not assigned yet
    outside = {}
  modules = [f"{name} ({type(x).__name__})" for name, x in outside.items() if isinstance(x, nnx.Pytree)]
  shown = ", ".join(modules) or "a module"
  return TrainError(
    f"the loss function changes a Variable of {shown}, which it does not get as an argument.",
    details=_first_line(error),
    fix='step({"model": model, "other": other}, {"model": optimizer}, batch), with a loss function of that'
    " dict; or make it part of the model.",
  )


def _on_explicit_axes(layer: str, error: BaseException) -> TrainError:
  return TrainError(
    f"{layer} does not give the sharding of its result, which this mesh with Explicit axes needs.",
    details=_first_line(error),
    fix="a mesh with Auto axes (nxp.make_mesh without explicit=True), where the compiler decides; or pass"
    " out_sharding=... to that operation.",
  )


def _layer(models: Any, trace: TracebackType | None) -> str:
  """The innermost layer of `models` on the stack of an error, and its line of code."""
  paths = {id(module): path_str(path) for path, module in nnx.iter_modules(models)}
  shown = "the loss function"
  for frame, line in traceback.walk_tb(trace):
    module = frame.f_locals.get("self")
    if id(module) in paths:
      name = f"{paths[id(module)]} " if paths[id(module)] else ""
      shown = f"{name}({type(module).__name__}, line {line} of {frame.f_code.co_name})"
  return shown
