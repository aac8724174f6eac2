"""Facts about the operations of traces (jaxprs), in the forms of all supported versions of jax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core, source_info_util
from jax.sharding import AxisType, NamedSharding

from nnx_parallel.core.types import (
  AnyArray,
  Aval,
  ClosedJaxpr,
  Jaxpr,
  JaxprEqn,
  P,
  Program,
  PyTree,
  Value,
  Var,
)

T = TypeVar("T")
_CHECKPOINTS = ("checkpoint", "remat", "remat2")
CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
_OBJECT = "_prim"
"""The parameter with the object of an operation (`call_hi_primitive`)."""
HELD = "nxp_held"
"""The scope of sharding constraints that a step adds: reports tell them from the user's by their names."""


@dataclasses.dataclass(frozen=True)
class ScanCounts:
  """How the flat inputs of a scan divide: constants, then carried values, then rows."""

  constants: int
  carried: int

  def split(self, some: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """The constants, the carried values and the rows among the inputs, or something of each input."""
    first = self.constants + self.carried
    return [*some[: self.constants]], [*some[self.constants : first]], [*some[first:]]


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
  """The parameters of an operation, even if jax keeps them in an object: `jax_remat3` and similar."""
  held = eqn.params.get(_OBJECT)
  return eqn.params if held is None else held.params


def change_params(eqn: JaxprEqn, changed: Mapping[str, Any]) -> dict[str, Any]:
  """The original parameters of an operation, with changes to some parameters of `params_of`."""
  held = eqn.params.get(_OBJECT)
  if held is None or not changed:
    return {**eqn.params, **changed}
  return {_OBJECT: type(held)(**{**held.params, **changed})}


def is_checkpoint(eqn: JaxprEqn) -> bool:
  """Whether an operation is a `jax.checkpoint`."""
  return eqn.primitive.name in _CHECKPOINTS or (_OBJECT in eqn.params and "policy" in params_of(eqn))


def is_call(eqn: JaxprEqn) -> bool:
  """Whether an operation calls a program and does nothing else, as `jax.jit` does."""
  return eqn.primitive.name in CALLS


MARK = "layer:"
"""Starts the name of each marked call; see `layers/mark.py`."""


def is_marked(eqn: JaxprEqn) -> bool:
  """Whether an operation of a trace is the call of a layer."""
  return str(eqn.params.get("name", "")).startswith(MARK)


def is_call_or_checkpoint(eqn: JaxprEqn) -> bool:
  """Whether an operation calls a program, and perhaps computes it again in the backward pass."""
  return is_call(eqn) or is_checkpoint(eqn)


def open_jaxpr(jaxpr: Program) -> Jaxpr:
  """The jaxpr itself, closed or not."""
  inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
  return inner


def constants(jaxpr: Program) -> Sequence[jax.Array]:
  """The constants that a closed jaxpr carries."""
  return getattr(jaxpr, "consts", ())


def as_function(jaxpr: Program) -> Callable[..., Sequence[jax.Array]]:
  """A jaxpr as a function of flat arrays."""
  inner: Any = open_jaxpr(jaxpr)
  closed = core.ClosedJaxpr(inner, constants(jaxpr))  # pyright: ignore[reportPrivateImportUsage]
  return core.jaxpr_as_fun(closed)


def by_trace(
  run: Callable[..., PyTree], evaluate: Callable[[ClosedJaxpr, tuple[PyTree, ...]], Sequence[jax.Array]]
) -> Callable[..., PyTree]:
  """A function of pytrees of arrays whose flat results come from `evaluate(its trace, its arguments)`."""

  @functools.wraps(run)  # jax names the arguments of a program after the parameters of `run`
  def other(*args: PyTree) -> PyTree:
    traced, shape = jax.make_jaxpr(run, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), evaluate(traced, args))

  return other


def at_place_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
  """Gives operations that are traced in its body the source line and the name stack of an operation."""
  # Otherwise every operation of a loss that is evaluated again would seem to come from a line of this
  # package. JAX drops the user's lines inside its own jitted functions (`jnp.take`): these get their caller's
  # line.
  source = eqn.source_info
  names = source_info_util.current_name_stack() + source.name_stack
  of = source if source_info_util.summarize(source) else source_info_util.current()
  return source_info_util.user_context(of.traceback, name_stack=names)


def scope_of(eqn: JaxprEqn) -> str:
  """The names of `jax.named_scope` around an operation, and the transforms of JAX around it."""
  return str(eqn.source_info.name_stack)


def place_of(eqn: JaxprEqn) -> str:
  """The user's line of an operation, with its function."""
  return source_info_util.summarize(eqn.source_info)


def bind(eqn: JaxprEqn, inputs: Sequence[Value], **changed: Any) -> Sequence[jax.Array]:
  """The results of an operation for other inputs, with some of its parameters changed."""
  # Inside a `shard_map`, its axes are also manual for operations that were traced outside of it.
  active = jax.sharding.get_abstract_mesh()
  inside = AxisType.Manual in active.axis_types
  where = changed.get("sharding", eqn.params.get("sharding"))
  if inside and isinstance(where, NamedSharding):
    changed = {**changed, "sharding": NamedSharding(active, where.spec)}
  with eqn.ctx.manager, jax.sharding.use_abstract_mesh(active) if inside else contextlib.nullcontext():
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(change_params(eqn, changed)))
  return results if eqn.primitive.multiple_results else [results]


def map_shards_as(eqn: JaxprEqn, function: Callable[..., PyTree], mesh: Any) -> Callable[..., Any]:
  """A function of shards in place of the program of a `shard_map`, with its specs, on this mesh."""
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=tuple(eqn.params["in_specs"]),
    out_specs=list(eqn.params["out_specs"]),
    axis_names=eqn.params["newly_manual_axes"],
    check_vma=eqn.params["check_vma"],
  )


def program_of(eqn: JaxprEqn) -> Any:
  """The program that an operation holds (a call, a checkpoint, a custom rule), or None."""
  params = params_of(eqn)
  found: Any = next(
    (params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "traced") if key in params), None
  )
  return open_jaxpr(found) if "traced" in params else found


def programs(eqn: JaxprEqn) -> list[Program]:
  """The programs that an operation holds: a scan's body, a cond's branches, an inner `jit`."""
  values = [
    x for value in params_of(eqn).values() for x in (value if isinstance(value, (tuple, list)) else (value,))
  ]
  return [x for x in values if hasattr(open_jaxpr(x), "eqns")]


def equations(jaxpr: Program, enters: Callable[[JaxprEqn], bool] = lambda _: True) -> Iterator[JaxprEqn]:
  """Every equation of a jaxpr, and of its inner jaxprs, or of the inner jaxprs of some equations."""
  for eqn in open_jaxpr(jaxpr).eqns:
    yield eqn
    if enters(eqn):
      for program in programs(eqn):
        yield from equations(program, enters)


def inner_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
  """Every equation of the programs that an operation holds."""
  for program in programs(eqn):
    yield from equations(program)


def gradient_of(eqn: JaxprEqn) -> ClosedJaxpr:
  """The trace of the gradient of one operation, by its own rules."""
  fixed = eqn.params.get("num_consts", 0)  # constants of a rule have no gradient

  def gradient(given: list[jax.Array]) -> list[jax.Array]:
    def run(*xs: jax.Array) -> list[jax.Array]:
      return [*bind(eqn, [*given[:fixed], *xs])]

    out, back = jax.vjp(run, *given[fixed:])
    slopes: list[Any] = [x if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in out]
    found = zip(given[fixed:], back(slopes), strict=True)
    return [slope for x, slope in found if is_inexact(x)]

  return jax.make_jaxpr(gradient)([var.aval for var in eqn.invars])


def rules(jaxpr: Program, wanted: Callable[[JaxprEqn], bool]) -> Iterator[JaxprEqn]:
  """The operations of a trace, and of its inner programs, that have such a rule for their gradient."""

  # Rules inside a `shard_map` are left out: they cannot be traced without it.
  def enters(eqn: JaxprEqn) -> bool:
    return not wanted(eqn) and eqn.primitive.name not in ("shard_map", "pallas_call")

  return filter(wanted, equations(jaxpr, enters))


def reads_tracers(jaxpr: Program, wanted: Callable[[JaxprEqn], bool]) -> JaxprEqn | None:
  """The first operation whose own gradient reads an array of the trace directly, not by an argument."""
  # A trace with such a rule of `jax.custom_jvp` or `jax.custom_vjp` cannot be evaluated again.
  found = rules(jaxpr, wanted)
  return next((eqn for eqn in found if any(map(is_tracer, constants(gradient_of(eqn))))), None)


def has_reverse_rule(eqn: JaxprEqn) -> bool:
  """Whether an operation is a `jax.custom_vjp` function, also if JAX keeps its rules in an object."""
  return eqn.primitive.name.startswith("custom_vjp_call") or "bwd" in params_of(eqn)


def has_rule(eqn: JaxprEqn) -> bool:
  """Whether an operation has a custom gradient, by `jax.custom_jvp` or `jax.custom_vjp`."""
  return eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")) or "traced" in params_of(eqn)


def among(var: Var, some: Container[Var]) -> bool:
  """Whether an input or result of an operation is one of some variables; a literal is not."""
  return not isinstance(var, core.Literal) and var in some


def dependents(jaxpr: Program | Sequence[JaxprEqn], first: Iterable[Var]) -> set[Var]:
  """Some variables of a program, or of a list of its operations, and the variables that depend on them."""
  found = {*first}
  eqns: Any = getattr(jaxpr, "eqns", jaxpr)
  for eqn in eqns:
    if any(among(var, found) for var in eqn.invars):
      found.update(eqn.outvars)
  return found


def makers(jaxpr: Program) -> dict[Var, JaxprEqn]:
  """The operation that makes each variable of a program."""
  return {out: eqn for eqn in open_jaxpr(jaxpr).eqns for out in eqn.outvars}


def maker(var: Var, made: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
  """The operation that makes a value, given `makers`; None for an input or a literal."""
  return None if isinstance(var, core.Literal) else made.get(var)


def origin(var: Var, made: Mapping[Var, JaxprEqn], through: Container[str]) -> Var:
  """The value behind operations with some names, each followed to its first operand."""
  while among(var, made) and made[var].primitive.name in through:
    var = made[var].invars[0]
  return var


def is_tracer(x: object) -> bool:
  """Whether a value is a tracer."""
  return isinstance(x, Tracer)


def is_inexact(x: AnyArray) -> bool:
  """Whether an array may have a gradient."""
  return jnp.issubdtype(x.dtype, jnp.inexact)


def nbytes(x: AnyArray) -> int:
  """Bytes of an array, abstract or not."""
  return math.prod(x.shape) * x.dtype.itemsize


def scan_counts(eqn: JaxprEqn) -> ScanCounts:
  """Counts constants and carried values by rank: a row has one more dim outside the loop than inside."""
  # The parameters with these counts have different names in different versions.
  inner = open_jaxpr(eqn.params["jaxpr"])
  inputs, results = zip(eqn.invars, inner.invars, strict=True), zip(eqn.outvars, inner.outvars, strict=True)
  rows = sum(len(a.aval.shape) > len(b.aval.shape) for a, b in inputs)
  carried = sum(len(a.aval.shape) == len(b.aval.shape) for a, b in results)
  return ScanCounts(len(eqn.invars) - rows - carried, carried)


def struct(aval: Aval) -> jax.ShapeDtypeStruct:
  """The shape and dtype of a variable, and its sharding on Explicit axes."""
  where = getattr(aval, "sharding", None)
  explicit = where is not None and AxisType.Explicit in where.mesh.axis_types
  return jax.ShapeDtypeStruct(
    aval.shape, aval.dtype, sharding=where if explicit else None, weak_type=aval.weak_type
  )


def trace_like(function: Callable[..., PyTree], like: Program) -> ClosedJaxpr:
  """The closed jaxpr of a function of flat arrays with the types of the inputs of another."""
  avals = [var.aval for var in open_jaxpr(like).invars]
  # In a `shard_map` a type also says over which axes values differ.
  return jax.make_jaxpr(function)(*[aval if aval.mat.varying else struct(aval) for aval in avals])


def operations_behind(
  eqns: Sequence[JaxprEqn], wanted: Iterable[Var], *, effects: bool = False
) -> list[JaxprEqn]:
  """The operations, in order, that some variables need; on request, also operations with effects."""
  used = {var for var in wanted if not isinstance(var, core.Literal)}
  kept: list[JaxprEqn] = []
  for eqn in reversed(eqns):
    if (effects and eqn.effects) or not used.isdisjoint(eqn.outvars):
      kept.append(eqn)
      used.update(var for var in eqn.invars if not isinstance(var, core.Literal))
  return kept[::-1]


def without_unused(jaxpr: P) -> P:
  """A jaxpr, closed or not, without the operations whose results nobody reads."""
  inner = open_jaxpr(jaxpr)
  if inner is not jaxpr:
    return jaxpr.replace(jaxpr=without_unused(inner))
  return jaxpr.replace(eqns=operations_behind(inner.eqns, inner.outvars, effects=True))
