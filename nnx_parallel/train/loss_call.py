"""Calls a loss function, and restates internal errors of flax and jax in terms of the user's model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import traceback
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import errors, nnx

from nnx_parallel.core.nodes import named_leaves, parts_of_type, path_str, value_of, variables
from nnx_parallel.core.text import few, with_article
from nnx_parallel.core.types import AnyArray, LossFn, Model, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.tracing import NEEDS_VALUES

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_loss(loss_fn: LossFn, models: Model, batch: PyTree) -> PyTree:
  """`loss_fn(models, batch)` on traced arrays; `loss_fn(models, *batch)` where it takes several arrays."""
  given = _arguments(loss_fn, batch)
  with _explain(loss_fn, models, batch):
    return loss_fn(models, *given)


def takes_several(loss_fn: LossFn) -> bool:
  """Whether a loss function takes each array of a batch as an argument."""
  # It does when it requires several arguments after the model, or has `*batch` there: `lambda model, x, y:
  # ...`, and not `lambda model, batch, smoothing=0.1: ...`, since an argument with a default is an option.
  signature = _signature(loss_fn)
  if signature is None:
    return False
  named = [p for p in signature.parameters.values() if p.kind in _NAMED]
  required = [p for p in named if p.default is p.empty]
  rest = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
  return len(required) > 2 or (rest and bool(named))


def check_several(loss_fns: Iterable[Callable[..., Any]], count: int, *, has_optimizer: bool) -> None:
  """Refuses (`TrainError`) several arguments, or an optimizer, for a loss that takes one batch."""
  for loss_fn in loss_fns:
    if not takes_several(loss_fn):
      if has_optimizer:
        raise TrainError(
          "the step of nxp.eval_step takes no optimizer.",
          fix="step(model, batch), or nxp.train_step(loss_fn).",
        )
      raise TrainError(
        f"the step got {count} arrays after its objects, and its loss function takes one batch.",
        details=f"the loss function takes {_signature(loss_fn)}",
        fix="pass them as one tuple: step(model, optimizer, (x, y)), with def loss_fn(model, batch);\n"
        "or require an argument for each: def loss_fn(model, x, y), without defaults.",
      )


def _signature(loss_fn: LossFn) -> inspect.Signature | None:
  try:
    return inspect.signature(loss_fn)
  except (TypeError, ValueError):  # no Python function
    return None


def _arguments(loss_fn: LossFn, batch: PyTree) -> Sequence[PyTree]:
  """The arguments of a loss function after the model."""
  signature, several = _signature(loss_fn), takes_several(loss_fn)
  if several and not isinstance(batch, (tuple, list)):
    kind = "one array" if hasattr(batch, "shape") else with_article(type(batch).__name__)
    raise TrainError(
      f"the loss function takes {signature}, and the batch is {kind}.",
      fix="give it each array: step(model, optimizer, x, y), or a batch that is a tuple, (x, y);\n"
      "or def loss_fn(model, batch): ..., which gets the batch as it is.",
    )
  given = tuple(cast("Sequence[Any]", batch)) if several else (batch,)
  try:
    if signature is not None:
      signature.bind(None, *given)
  except TypeError as error:
    shown = f"the {len(given)} arrays of a tuple" if several else "one batch"
    raise TrainError(
      f"the loss function takes {signature}, and a step calls it with the model and {shown}.",
      details=str(error),
      fix="def loss_fn(model, batch): ..., or def loss_fn(model, x, y): ... for a batch (x, y).",
    ) from None
  return given


@contextlib.contextmanager
def _explain(loss_fn: LossFn, models: Model, batch: PyTree) -> Generator[None]:
  """Raises a `TrainError` for errors of the body whose text names no module; other errors get a note."""
  try:
    yield
  except errors.TraceContextError as error:
    raise _of_another_module(loss_fn, batch, error) from error
  except Exception as error:
    # From the frame of the body on: the first frame is this function, the second is `call_loss`.
    trace = error.__traceback__ and error.__traceback__.tb_next
    layer, module = _layer(models, trace)
    # jax does not export this class.
    if type(error).__name__ == "ShardingTypeError":
      raise _on_explicit_axes(loss_fn, layer, error) from error
    if isinstance(error, NameError) and (axis := _UNBOUND.search(str(error))):
      raise _of_axis_name(layer, axis[1]) from error
    own = len(list(traceback.walk_tb(trace))) == 2  # of the loss function, and not of one that it calls
    if isinstance(error, TypeError) and str(error).endswith("object is not callable") and own:
      raise TrainError(
        "the loss function calls its second argument, which is the batch.",
        details=_first_line(error),
        fix="def loss_fn(model, batch): ..., in this order.",
      ) from error
    if isinstance(error, NEEDS_VALUES) and (flags := [x for x in named_leaves(batch) if jnp.ndim(x[1]) == 0]):
      error.add_note(
        f"{flags[0][0]} is an array of the compiled step. A flag is a keyword: step(model, optimizer, batch,"
        " train=True), for def loss_fn(model, batch, train): ..."
      )
    if module is not None and not isinstance(error, TrainError):
      error.add_note(_note(layer, module, batch))
    raise


_UNBOUND = re.compile(r"unbound axis name: (\w+)")


def _of_axis_name(layer: str, axis: str) -> TrainError:
  return TrainError(
    f"{layer} reduces over the axis name {axis!r}, which only jax.pmap, jax.vmap and jax.shard_map have.",
    details="a step computes on global arrays: means and statistics are over the whole batch without it",
    fix="leave out axis_name=, for example nnx.BatchNorm(n, rngs=rngs); or call jax.shard_map in the model.",
  )


def _first_line(error: BaseException) -> str:
  return str(error).split("\n")[0].split(" (https://")[0]


def _of_another_module(loss_fn: LossFn, batch: PyTree, error: BaseException) -> TrainError:
  for kind in (type(part).__name__ for part in parts_of_type(batch, nnx.Pytree)):
    return TrainError(
      f"the loss function changes a Variable of {with_article(kind)} that is a part of the batch.",
      details=_first_line(error),
      fix='step({"model": model, "rngs": rngs}, {"model": optimizer}, batch), with a loss function of that'
      " dict, whose Variables the step writes back.",
    )
  outside = _outside(loss_fn).items()
  modules = [f"{name} ({type(x).__name__})" for name, x in outside if isinstance(x, nnx.Pytree)]
  shown = ", ".join(modules) or "a module"
  return TrainError(
    f"the loss function changes a Variable of {shown}, which it does not get as an argument.",
    details=_first_line(error),
    fix='step({"model": model, "other": other}, {"model": optimizer}, batch), with a loss function of that'
    " dict; or make it part of the model.",
  )


_AS_ARGUMENT = 'step({"model": model, "other": other}, {"model": optimizer}, batch)'


def _outside(loss_fn: Any) -> dict[str, Any]:
  """What a loss function could read, and does not get as an argument, by name: modules, Variables, arrays."""
  found: dict[str, Any] = {}
  seen: set[int] = set()

  def look(name: str, value: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_live):
      if _is_live(x) or isinstance(x, jax.Array):
        found.setdefault(name + jax.tree_util.keystr(path), x)
      elif isinstance(x, types.FunctionType) and x.__module__ == module:  # a helper beside the loss
        read(x)

  def read(function: Any) -> None:
    if id(function) in seen:
      return
    seen.add(id(function))
    if isinstance(function, functools.partial):
      look("an argument", (function.args, function.keywords))
      return read(function.func)
    if isinstance(function, types.MethodType):
      look("self", getattr(function.__self__, "__dict__", None))
    try:
      held = inspect.getclosurevars(inspect.unwrap(function))
    except (TypeError, ValueError):  # not a Python function, or a name that is not assigned yet
      return None
    for name, value in {**held.nonlocals, **held.globals}.items():
      look(name, value)
    return None

  inner = loss_fn
  while isinstance(inner, functools.partial):
    inner = inner.func
  module = getattr(inner, "__module__", None)
  read(loss_fn)
  return found


def _is_live(x: object) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def check_reads(loss_fns: Iterable[LossFn], read: Iterable[AnyArray], own: Mapping[str, AnyArray]) -> None:
  """Refuses (`TrainError`) a loss function that reads arrays of live modules beside its arguments."""
  # `read` are the constants of its compiled program; `own` are the arrays of the step, by label. Arrays that
  # the loss function holds itself are constants on purpose.
  constants = {id(x) for x in read}
  if not constants:
    return
  outside = [item for loss_fn in loss_fns for item in _outside(loss_fn).items()]
  constants -= {id(x) for _, x in outside if not _is_live(x)}
  names = [label for label, x in own.items() if id(x) in constants]
  fix = "read them from the argument of the loss function: def loss_fn(model, batch)."
  if not names:
    held = {
      name: variables(x) if isinstance(x, nnx.Pytree) else {(): x} for name, x in outside if _is_live(x)
    }
    live = [((name, *path), leaf) for name, leaves in held.items() for path, leaf in leaves.items()]
    names = [path_str(path) for path, leaf in live if id(value_of(leaf)) in constants]
    fix = f'{_AS_ARGUMENT},\nwith a loss of that dict; evaluate({{"model": model, "other": other}}, batch).'
  if names:
    raise TrainError(
      f"the loss function reads {few(names)} of a live module, and not from its arguments.",
      details="they would be constants of the compiled step, which neither trains them nor sees them change",
      fix=fix,
    )


def _on_explicit_axes(loss_fn: LossFn, layer: str, error: BaseException) -> TrainError:
  others = [name for name, x in _outside(loss_fn).items() if _is_live(x)]
  told = f"\nit reads {few(others)}, and not from its arguments: {_AS_ARGUMENT}" if others else ""
  return TrainError(
    f"{layer} does not give the sharding of its result, and other operations of the model state theirs.",
    details=_first_line(error) + told,
    fix="out_sharding=... for that operation too; or state no shardings, or use nxp.constrain: the step then"
    " computes on Auto axes, where the compiler decides.",
  )


def _layer(models: Model, trace: types.TracebackType | None) -> tuple[str, Any]:
  """The innermost layer on the stack of an error: path, class and line of code; and the module, or None."""
  paths = {id(module): path_str(path) for path, module in nnx.iter_modules(models)}
  found = "the loss function", None
  for frame, line in traceback.walk_tb(trace):
    module = frame.f_locals.get("self")
    if id(module) in paths:
      name = f"{paths[id(module)]} " if paths[id(module)] else ""
      found = f"{name}({type(module).__name__}, line {line} of {frame.f_code.co_name})", module
  return found


def _note(layer: str, module: nnx.Module, batch: PyTree) -> str:
  """Where an error was raised, with the shapes there."""
  held = {path_str(path): value_of(leaf) for path, leaf in variables(module).items()}
  own = [f"{path} {x.dtype}{[*x.shape]}" for path, x in held.items() if hasattr(x, "shape")]
  given = [f"{name} {jnp.result_type(x)}{[*jnp.shape(x)]}" for name, x in named_leaves(batch)]
  return f"in the layer {layer}\n  its arrays: {few(own) or 'none'}\n  {few(given)}"
