"""Layouts that a constructor states in the types of its arrays, on a mesh with Explicit axes.

There, a sharding is a part of an array's type, and `init` may say it where it makes an array:

    self.w = nnx.Param(jnp.zeros((8, 8), out_sharding=P(None, "model")))

`init` is traced on the mesh's own axes, and the type of each result is a source of its layout. Creation then
compiles the same operations without shardings, since it decides by itself where each array is made:

    a:f32[8,8@model] = broadcast_in_dim[sharding=P(None, "model")] 0.0
    b:f32[8@data,8] = reshard[dst_sharding=P("data", None)] a
->
    a:f32[8,8] = broadcast_in_dim 0.0
    b = a
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_in
from nnx_parallel.core.interpret import interpret, wiring
from nnx_parallel.core.jaxprs import (
  as_function,
  change_params,
  has_rule,
  is_call,
  is_checkpoint,
  map_shards_as,
  open_jaxpr,
  program_of,
)
from nnx_parallel.core.mesh import auto_mesh
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, Program, Value

_PLACES = frozenset(("device_put", "mesh_cast", "reshard", "sharding_constraint"))
"""Operations that only say where an array is."""
_SAYS = ("out_sharding", "sharding")
"""Parameters with the sharding of the result."""


def stated_specs(program: ClosedJaxpr) -> list[PartitionSpec | None]:
  """For each result of a program, the spec in its type; None if no Explicit axis shards it."""
  wheres: list[Any] = [getattr(var.aval, "sharding", None) for var in program.jaxpr.outvars]
  specs = [where.spec if isinstance(where, NamedSharding) else PartitionSpec() for where in wheres]
  return [spec if axes_in(spec) else None for spec in specs]


def without_shardings(program: Program) -> ClosedJaxpr:
  """The same operations on arrays whose types have no sharding."""
  # By the id of a program that is traced, once, with the program, so that its id stays.
  done: dict[int, tuple[Program, ClosedJaxpr, Callable[..., Any]]] = {}

  def trace(program: Program) -> tuple[Program, ClosedJaxpr, Callable[..., Any]]:
    if id(program) not in done:
      avals = [var.aval for var in open_jaxpr(program).invars]
      plain = [ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
      made = jax.make_jaxpr(lambda *inputs: interpret(program, inputs, run))(*plain)
      done[id(program)] = program, made, jax.jit(as_function(made))
    return done[id(program)]

  def run(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if eqn.primitive.name in _PLACES:
      return inputs[: len(eqn.outvars)]
    if is_call(eqn):  # compiled as one, as outside of a trace: the same bits
      return trace(program_of(eqn))[2](*inputs)
    if is_checkpoint(eqn) or has_rule(eqn):  # nobody differentiates a constructor
      return interpret(program_of(eqn), inputs, run)
    if eqn.primitive.name == "shard_map":
      mapped, mesh = eqn.params["jaxpr"], auto_mesh(eqn.params["mesh"])
      return map_shards_as(eqn, lambda *parts: interpret(mapped, parts, run), mesh)(*inputs)
    changed: dict[str, Any] = {key: None for key in _SAYS if key in eqn.params}
    new = [(inner.key, trace(inner.program)[1]) for inner in wiring(eqn).inner]
    changed |= dict(new)
    if "branches" in changed:
      changed["branches"] = tuple(branch for _, branch in new)
    # The operation was traced on Explicit axes.
    active: Any = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(active):
      params = eqn.primitive.get_bind_params(change_params(eqn, changed))
      results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]

  return trace(program)[1]
