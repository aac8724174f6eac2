"""Makes the arrays of a traced constructor one by one: each distinct initializer is compiled once.

A large model has few initializers: 96 blocks hold 96 equal kernels, drawn from 96 keys. Of one layer,

    k = random_fold_in(key, 5)            a tiny value: evaluated first, as eager Python would
    x = random_bits(k); w = mul(x, 0.02)  the slice behind the Variable: a program of `k` and the number 0.02

The compiler cannot fold numbers that are inputs, so layers that differ in them share a program. With a
barrier after each operation, a slice rounds where eager execution rounds. Only one slice needs temporaries at
a time. Variables that share work, such as a parameter and its average, each compute it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_parallel.core.interpret import inline_calls, is_literal, read, walk
from nnx_parallel.core.jaxprs import bind, is_call
from nnx_parallel.core.keys import Keys, value_of_constant
from nnx_parallel.core.mesh import axis_sizes, use_mesh
from nnx_parallel.core.nodes import is_key, key_implementation
from nnx_parallel.core.types import AnyArray, Aval, ClosedJaxpr, JaxprEqn, Var
from nnx_parallel.layout.resolve import add_axes

# Arrays of at most so many floats, or so many keys or integers (one per layer), are evaluated first.
FLOATS, COUNTS = 64, 4096
# Bytes of results that may be under way before the next slice waits; each slice also holds temporaries.
IN_FLIGHT = 64 * 2**20
Phase = tuple[ClosedJaxpr, Sequence[int]]
"""A program, and where its inputs are among the results of the phases before it."""


class Number:
  """A variable for a number that is written in the trace."""

  def __init__(self, aval: Aval):
    self.aval = aval


class Slice(NamedTuple):
  """The operations behind one output (of a group, with its first slice), and the known values they read."""

  output: int
  operations: Sequence[JaxprEqn]
  inputs: Sequence[Var]


class Cut(NamedTuple):
  """A constructor in groups of equal slices; the outputs that are `given` are among the known values."""

  known: dict[Var, AnyArray]
  outputs: list[Var]
  groups: list[list[Slice]]
  given: list[int]


def cut(
  phases: Sequence[Phase], outputs: Sequence[int], shardings: Sequence[NamedSharding], device: object
) -> Cut:
  """Cuts a traced constructor without side effects into groups of equal slices that make these results."""
  known, operations, made = dict[Var, AnyArray](), list[JaxprEqn](), list[Var]()
  for program, reads in phases:
    program = inline_calls(program, _is_opened) if any(map(_is_opened, program.eqns)) else program
    jaxpr = program.jaxpr
    known.update(zip(jaxpr.constvars, program.consts, strict=True))
    names = dict(zip(jaxpr.invars, (made[i] for i in reads), strict=True))
    for eqn in jaxpr.eqns:
      operations.append(eqn.replace(invars=[_variable(value, names, known) for value in eqn.invars]))
    made += [_variable(value, names, known) for value in jaxpr.outvars]
  results = [made[i] for i in outputs]
  first, slices = _split(operations, results, known)
  # Tiny values need one device and no mesh; eager operations on all devices would take ten times as long.
  with jax.default_device(device):
    walk(first, known, _run_eagerly)
  groups, keys = dict[Hashable, list[Slice]](), Keys()
  for output, behind in slices.items():
    numbers, inputs, target = dict[Var, int](), list[Var](), shardings[output]
    code = keys.code(behind, numbers, inputs)
    group = groups.setdefault((code, numbers[results[output]], target.spec, target.memory_kind), [])
    # The trace of a deep model is large compared with a shard.
    group.append(Slice(output, () if group else behind, inputs))
  return Cut(known, results, [*groups.values()], [i for i in range(len(results)) if i not in slices])


def _is_opened(eqn: JaxprEqn) -> bool:
  # Of a constructor under `nnx.jit`, which also returns its counters, each slice would run all calls before.
  return is_call(eqn) and len(eqn.outvars) > 1


def _variable(value: Var, names: dict[Var, Var], known: dict[Var, AnyArray]) -> Var:
  if not is_literal(value):
    return names.get(value, value)
  aval: Aval = value.aval
  number = Number(aval)
  known[number] = np.asarray(value.val, dtype=aval.dtype)
  return number


def _split(
  operations: list[JaxprEqn], results: list[Var], known: Iterable[Var]
) -> tuple[list[JaxprEqn], dict[int, list[JaxprEqn]]]:
  """The operations to evaluate first, and by result those behind it."""
  # By the maker of each value: to look through all operations for each result would be quadratic.
  values, first, maker = set(known), list[JaxprEqn](), dict[Var, int]()
  for i, op in enumerate(operations):
    if values.issuperset(op.invars) and all(is_tiny(value.aval) for value in (*op.invars, *op.outvars)):
      first.append(op)
      values.update(op.outvars)
    else:
      maker.update(dict.fromkeys(op.outvars, i))
  slices = dict[int, list[JaxprEqn]]()
  for output, result in enumerate(results):
    needed, todo = set[int](), [result]
    while todo:
      at = maker.get(todo.pop())
      if at is not None and at not in needed:
        needed.add(at)
        todo += operations[at].invars
    if needed:
      slices[output] = [operations[i] for i in sorted(needed)]
  return first, slices


def is_tiny(aval: Aval) -> bool:
  """Whether an array of this shape and dtype is evaluated first; slices get all of it."""
  return math.prod(aval.shape) <= (FLOATS if jnp.issubdtype(aval.dtype, np.inexact) else COUNTS)


def _run_eagerly(op: JaxprEqn, inputs: list[Var]) -> Sequence[jax.Array]:
  # Only the settings that change values: a mesh would run tiny operations on all devices.
  with jax.threefry_partitionable(op.ctx.threefry_partitionable):
    results = op.primitive.bind(*inputs, **op.primitive.get_bind_params(op.params))
  return results if op.primitive.multiple_results else [results]


def _run_alone(op: JaxprEqn, inputs: list[Var]) -> Sequence[jax.Array]:
  """Keeps the compiler from merging floating-point operations that eager execution rounds one by one."""
  results = bind(op, inputs)
  rounds = any(jnp.issubdtype(value.aval.dtype, np.inexact) for value in op.outvars)
  return jax.lax.optimization_barrier([*results]) if rounds else results


def assemble(found: Cut, shardings: Sequence[NamedSharding], mesh: Mesh) -> list[jax.Array]:
  """Makes every result of a cut constructor, slice by slice; each array has its own buffers."""
  with use_mesh(mesh):
    lowered = [lower_slice(found, group[0], shardings) for group in found.groups]
  # XLA compiles outside the interpreter lock, so several programs compile at a time.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    programs = list(pool.map(lambda stage: stage.compile(), lowered))
  made = run_slices(found, programs, shardings)
  made |= {i: put(found.known[found.outputs[i]], shardings[i]) for i in found.given}
  return [made[i] for i in range(len(shardings))]


def lower_slice(found: Cut, one: Slice, shardings: Sequence[NamedSharding]) -> jax.stages.Lowered:
  """Lowers a slice, for all slices of its group, as a program of its inputs; call it under the mesh."""
  result, target = found.outputs[one.output], shardings[one.output]

  def run(*arrays: jax.Array) -> jax.Array:
    values: dict[Var, jax.Array] = {}
    for var, array in zip(one.inputs, arrays, strict=True):
      if is_key(var.aval.dtype):  # it comes as numbers, which jax places in a third of the time
        array = jax.random.wrap_key_data(array, impl=cast(Any, key_implementation(var.aval.dtype)))
      values[var] = array
    walk(one.operations, values, _run_alone)
    return read(result, values)

  layouts = [_layout(value.aval, result.aval, target) for value in one.inputs]
  numbers = [jax.eval_shape(_numbers, jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)) for x in one.inputs]
  structs = [x.update(sharding=where) for x, where in zip(numbers, layouts, strict=True)]
  return jax.jit(run, out_shardings=target).lower(*structs)


def _numbers(x: AnyArray) -> AnyArray:
  return jax.random.key_data(x) if is_key(x.dtype) else x


def run_slices(
  found: Cut, programs: Sequence[jax.stages.Compiled], shardings: Sequence[NamedSharding]
) -> dict[int, jax.Array]:
  """Runs every slice, with not much more than `IN_FLIGHT` bytes of results under way; arrays by position."""
  made, under_way = dict[int, jax.Array](), 0
  # Most slices have the same numbers, and to place them for each would take as long as to run it.
  tiny = dict[Hashable, jax.Array]()

  def place(var: Var, result: Aval, target: NamedSharding) -> jax.Array:
    value, where = _numbers(found.known[var]), _layout(var.aval, result, target)
    if not is_tiny(var.aval):
      return put(value, where)
    key = value_of_constant(value), where
    if key not in tiny:
      tiny[key] = jax.device_put(np.asarray(value), where)
    return tiny[key]

  for group, program in zip(found.groups, programs, strict=True):
    for one in group:
      result, target = found.outputs[one.output].aval, shardings[one.output]
      array = made[one.output] = program(*(place(x, result, target) for x in one.inputs))
      under_way += array.nbytes
      if under_way > IN_FLIGHT:
        jax.block_until_ready(array)
        under_way = 0
  return made


def _layout(aval: Aval, result: Aval, target: NamedSharding) -> NamedSharding:
  """Of an input: tiny ones are replicated; a constant is split as the result, or over all mesh axes."""
  if is_tiny(aval):
    return NamedSharding(target.mesh, PartitionSpec())
  if aval.shape == result.shape:
    return NamedSharding(target.mesh, target.spec)  # in device memory
  whole, axes = PartitionSpec(*([None] * len(aval.shape))), target.mesh.axis_names
  return NamedSharding(target.mesh, add_axes(whole, aval.shape, axes, axis_sizes(target.mesh)).spec)


def put(value: AnyArray, sharding: NamedSharding) -> jax.Array:
  """Places an array in its shards, in new buffers; of a numpy array only the local part is read."""
  if isinstance(value, jax.Array) and value.is_fully_addressable and not sharding.is_fully_addressable:
    # jax refuses to move a committed array of one process to the devices of several processes.
    if is_key(value.dtype):
      numbers = put(np.asarray(jax.random.key_data(value)), sharding)
      return _keys(jax.random.key_impl(value), sharding)(numbers)
    value = np.asarray(value)
  if isinstance(value, jax.Array):
    placed = jax.device_put(value, sharding, may_alias=False)
    # From one device to several, jax (0.12) still hands on the first device's buffer.
    return jax.jit(jnp.copy, out_shardings=sharding)(placed) if _buffers(placed) & _buffers(value) else placed
  # jax may use numpy's own memory for an array, so each shard is copied.
  return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))


@functools.cache
def _keys(impl: Hashable, sharding: NamedSharding) -> Callable[..., jax.Array]:
  """A compiled function from numbers to keys, kept so that it is compiled once."""
  return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=sharding)


def _buffers(array: jax.Array) -> set[tuple[Hashable, int]]:
  return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in _numbers(array).addressable_shards}
