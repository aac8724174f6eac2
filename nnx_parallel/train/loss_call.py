"""Calls a loss function, and restates internal errors of flax and jax in terms of the user's model."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from flax import errors, nnx

from nnx_parallel.core.nodes import path_str
from nnx_parallel.errors import TrainError

_NO_LAYER = "the loss function"


def call_loss(loss_fn: Callable[[Any, Any], Any], models: Any, batch: Any) -> Any:
  """`loss_fn(models, batch)` on traced arrays.

  Raises:
    TrainError: it takes other arguments, or takes them in the opposite order; it changes a Variable of a
      module that is not an argument of the step; or a layer cannot run on the Explicit axes of its mesh.
  """
  _check_signature(loss_fn)
  with _explained(loss_fn, models):
    return loss_fn(models, batch)


@contextlib.contextmanager
def _explained(loss_fn: Callable[[Any, Any], Any], models: Any) -> Generator[None]:
  """Raises a `TrainError` for errors of the body whose text names no module; other errors get a note."""
  try:
    yield
  except errors.TraceContextError as error:
    raise _of_another_module(loss_fn, error) from error
  except Exception as error:
    # From the frame of the body on: the first frame is this function, the second is `call_loss`.
    trace = error.__traceback__ and error.__traceback__.tb_next
    # jax does not export this class.
    if type(error).__name__ == "ShardingTypeError":
      raise _on_explicit_axes(_layer(models, trace), error) from error
    if isinstance(error, TypeError) and str(error).endswith("object is not callable") and _is_own(trace):
      raise TrainError(
        "the loss function calls its second argument, which is the batch.",
        details=_first_line(error),
        fix="def loss_fn(model, batch): ..., in this order.",
      ) from error
    layer = _layer(models, trace)
    if layer != _NO_LAYER and not isinstance(error, TrainError):
      error.add_note(f"in the layer {layer}")
    raise


def _check_signature(loss_fn: Callable[[Any, Any], Any]) -> None:
  try:
    signature = inspect.signature(loss_fn)
  except (TypeError, ValueError):  # no Python function
    return
  try:
    signature.bind(None, None)
  except TypeError as error:
    raise TrainError(
      f"the loss function takes {signature}, and a step calls it with (model, batch).",
      details=str(error),
      fix="one batch of several arrays, and a loss function that unpacks it:\n"
      "lambda model, batch: loss_fn(model, *batch)",
    ) from None


def _is_own(trace: TracebackType | None) -> bool:
  """Whether the loss function raised an error directly, and not a function that it called."""
  return len(list(traceback.walk_tb(trace))) == 2


def _first_line(error: BaseException) -> str:
  return str(error).split("\n")[0].split(" (https://")[0]


def _of_another_module(loss_fn: Callable[[Any, Any], Any], error: BaseException) -> TrainError:
  try:
    found = inspect.getclosurevars(inspect.unwrap(loss_fn))
    outside = {**found.nonlocals, **found.globals}
  except (TypeError, ValueError):  # not a Python function, or a name that is not assigned yet
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
  shown = _NO_LAYER
  for frame, line in traceback.walk_tb(trace):
    module = frame.f_locals.get("self")
    if id(module) in paths:
      name = f"{paths[id(module)]} " if paths[id(module)] else ""
      shown = f"{name}({type(module).__name__}, line {line} of {frame.f_code.co_name})"
  return shown
