"""Runs a cut constructor: compiles each group of equal slices once, and runs it for each member."""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_parallel.core.interpret import is_literal, read
from nnx_parallel.core.mesh import axis_sizes, use_mesh
from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.types import AnyArray, Var
from nnx_parallel.create.slicing.cut import FLOATS, Cut, Slice, Value, evaluate, is_tiny
from nnx_parallel.layout.resolve import add_axes

IN_FLIGHT = 64 * 2**20
"""Bytes of results that may be under way before the next slice waits; each slice also holds temporaries."""


def assemble(sliced: Cut, shardings: Sequence[NamedSharding], mesh: Mesh) -> list[jax.Array]:
  """Makes every output of a cut constructor, slice by slice; each array has its own buffers."""
  inputs = Inputs(sliced, shardings, mesh)
  programs = compile_groups(sliced, inputs, shardings, mesh)
  made = run_slices(sliced, programs, inputs)
  made.update((i, put(inputs.host(value), shardings[i])) for i, value in sliced.given.items())
  return [made[i] for i in range(len(shardings))]


def compile_groups(
  sliced: Cut, inputs: Inputs, shardings: Sequence[NamedSharding], mesh: Mesh
) -> list[jax.stages.Compiled]:
  """Compiles one program for each group of equal slices."""
  with use_mesh(mesh):
    lowered = [lower_slice(group[0], inputs, shardings) for group in sliced.groups]
  # XLA compiles outside the interpreter lock, so several programs compile at a time.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    return list(pool.map(lambda stage: stage.compile(), lowered))


def run_slices(sliced: Cut, programs: Sequence[jax.stages.Compiled], inputs: Inputs) -> dict[int, jax.Array]:
  """Runs every slice, with not much more than `IN_FLIGHT` bytes of results under way; arrays by position."""
  made: dict[int, jax.Array] = {}
  under_way = 0
  for group, program in zip(sliced.groups, programs, strict=True):
    for part in group:
      arrays = program(*[inputs(value, part) for value in part.inputs])
      made.update(zip(part.outputs, arrays, strict=True))
      under_way += sum(array.nbytes for array in arrays)
      if under_way > IN_FLIGHT:
        jax.block_until_ready(arrays)
        under_way = 0
  return made


def put(value: AnyArray, sharding: NamedSharding) -> jax.Array:
  """Places an array in its shards, in buffers that nothing else holds.

  Of a numpy array (global shape) only the part of the local devices is read.
  """
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
  numbers = jax.random.key_data(array) if is_key(array.dtype) else array
  return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in numbers.addressable_shards}


class Inputs:
  """The inputs of slices on their devices: tiny values and numbers are placed once; constants are split."""

  def __init__(self, sliced: Cut, shardings: Sequence[NamedSharding], mesh: Mesh):
    self.mesh, self.shardings = mesh, shardings
    self.values = dict(sliced.constants)
    # Tiny values need one device and no mesh; eager operations on all devices would take ten times as long.
    with jax.default_device(mesh.local_devices[0]):
      evaluate(sliced.prologue, self.values)
    self.placed: dict[Hashable, jax.Array] = {}

  def host(self, value: Var) -> jax.Array | np.ndarray:
    """The array of a variable or literal: numpy, or jax for keys and for constants that are jax arrays."""
    array = read(value, self.values)
    return array if isinstance(array, jax.Array) else np.asarray(array, dtype=value.aval.dtype)

  def __call__(self, value: Var, part: Slice) -> jax.Array:
    """The array on all devices; a key as numbers."""
    array = self.host(value)
    sharding = self.sharding(value, part)
    if not is_tiny(value.aval):
      # Not kept: a constant is read once, and would stay on the devices in addition to its results.
      return jax.device_put(array, sharding)
    if is_key(value.aval.dtype):
      array = jax.random.key_data(array)
    array = np.asarray(array)
    name = (array.dtype, array.shape, array.tobytes())
    if name not in self.placed:
      self.placed[name] = jax.device_put(array, sharding)
    return self.placed[name]

  def sharding(self, value: Var, part: Slice) -> NamedSharding:
    """Tiny values are replicated; a constant is split as the result of its shape, or over all mesh axes."""
    shape = value.aval.shape
    whole = PartitionSpec(*([None] * len(shape)))
    if is_tiny(value.aval):
      return NamedSharding(self.mesh, PartitionSpec())
    for position, result in zip(part.outputs, part.results, strict=True):
      if result.aval.shape == shape:
        return NamedSharding(self.mesh, self.shardings[position].spec)
    if value.aval.size <= FLOATS:
      return NamedSharding(self.mesh, whole)
    return NamedSharding(self.mesh, add_axes(whole, shape, self.mesh.axis_names, axis_sizes(self.mesh)).spec)


def lower_slice(part: Slice, inputs: Inputs, shardings: Sequence[NamedSharding]) -> jax.stages.Lowered:
  """Lowers one slice as a program of its inputs, for all slices with its key; call it under the mesh."""

  def run(*arrays: jax.Array) -> list[jax.Array]:
    values: dict[Var, jax.Array] = {}
    numbers = {id(value): Value(value.aval) for value in part.inputs if is_literal(value)}
    for value, array in zip(part.inputs, arrays, strict=True):
      if is_key(value.aval.dtype):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(inputs.host(value)))
      values[numbers[id(value)] if is_literal(value) else value] = array
    named = [op.replace(invars=[numbers.get(id(v), v) for v in op.invars]) for op in part.operations]
    evaluate(named, values, isolated=True)
    return [read(result, values) for result in part.results]

  arguments = [_abstract(value, inputs.sharding(value, part)) for value in part.inputs]
  targets = [shardings[i] for i in part.outputs]
  return jax.jit(run, out_shardings=targets).lower(*arguments)


def _abstract(value: Var, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  aval = jax.eval_shape(jax.random.key_data, value.aval) if is_key(value.aval.dtype) else value.aval
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
