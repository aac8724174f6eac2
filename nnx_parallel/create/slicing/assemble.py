"""Runs a cut constructor: compiles each group of equal slices once, and runs it for each member."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import is_key
from nnx_parallel.create.slicing.cut import FLOATS, Cut, Slice, evaluate, is_tiny, read
from nnx_parallel.layout.resolve import add_axes

IN_FLIGHT = 64 * 2**20
"""Bytes of results that may be under way before the next slice waits; each slice also holds temporaries."""


def assemble(pieces: Cut, shardings: Sequence[NamedSharding], mesh: Mesh) -> list[jax.Array]:
  """Makes every output of a cut constructor, slice by slice.

  Args:
    pieces: the cut constructor.
    shardings: the sharding of each output, on `mesh`.
    mesh: real devices, Auto axes.

  Returns:
    One array (global shape) for each output, each in buffers of its own.
  """
  feed = Feed(pieces, shardings, mesh)
  programs = compile_groups(pieces, feed, shardings, mesh)
  _return_freed_memory()
  made = run_slices(pieces, programs, feed)
  made.update((i, put(feed.host(value), shardings[i])) for i, value in pieces.given.items())
  return [made[i] for i in range(len(shardings))]


def _return_freed_memory() -> None:
  """Gives what the compiler has freed (some 30 MB) back to the system before the arrays are made beside it.

  glibc keeps freed memory in the arena of the thread that had it, where no array finds it.
  """
  with contextlib.suppress(AttributeError, OSError, TypeError):  # another libc
    ctypes.CDLL(None).malloc_trim(0)


def compile_groups(
  pieces: Cut, feed: Feed, shardings: Sequence[NamedSharding], mesh: Mesh
) -> list[jax.stages.Compiled]:
  """Compiles the program of each group of equal slices.

  Args:
    pieces: the cut constructor.
    feed: says how inputs are placed.
    shardings: the sharding of each output, on `mesh`.
    mesh: real devices, Auto axes.

  Returns:
    One program for each group.
  """
  with jax.set_mesh(mesh):
    lowered = [lower_slice(group[0], feed, shardings) for group in pieces.groups]
  # XLA compiles outside the interpreter lock, so several programs compile at a time.
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    return list(pool.map(lambda stage: stage.compile(), lowered))


def run_slices(pieces: Cut, programs: Sequence[jax.stages.Compiled], feed: Feed) -> dict[int, jax.Array]:
  """Runs every slice, with not much more than `IN_FLIGHT` bytes of results under way.

  Args:
    pieces: the cut constructor.
    programs: one for each group.
    feed: gives the inputs.

  Returns:
    Position of the output -> its array (global shape).
  """
  made: dict[int, jax.Array] = {}
  under_way = 0
  for group, program in zip(pieces.groups, programs, strict=True):
    for piece in group:
      arrays = program(*[feed(value, piece) for value in piece.inputs])
      made.update(zip(piece.outputs, arrays, strict=True))
      under_way += sum(array.nbytes for array in arrays)
      if under_way > IN_FLIGHT:
        jax.block_until_ready(arrays)
        under_way = 0
  return made


def put(value: Any, sharding: NamedSharding) -> jax.Array:
  """Places an array in its shards, in buffers that nothing else holds.

  Args:
    value: a numpy array (global shape), of which only what local devices need is read; or a jax array.
    sharding: where to.

  Returns:
    The array in that sharding.
  """
  if isinstance(value, jax.Array):
    placed = jax.device_put(value, sharding, may_alias=False)
    # From one device to several, jax (0.12) hands on the first device's buffer all the same.
    return jax.jit(jnp.copy, out_shardings=sharding)(placed) if _buffers(placed) & _buffers(value) else placed
  # jax may use numpy's own memory for an array, so each shard is copied.
  return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))


def _buffers(array: jax.Array) -> set[tuple[Any, int]]:
  numbers = jax.random.key_data(array) if is_key(array.dtype) else array
  return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in numbers.addressable_shards}


class Feed:
  """What goes into slices: tiny values and numbers, placed once each; constants, in pieces."""

  def __init__(self, pieces: Cut, shardings: Sequence[NamedSharding], mesh: Mesh):
    self.mesh, self.shardings = mesh, shardings
    self.values = dict(pieces.constants)
    # Tiny values need one device and no mesh; eager operations on all devices would take ten times as long.
    with jax.set_mesh(Mesh(np.empty((), object), ())), jax.default_device(mesh.local_devices[0]):
      evaluate(pieces.first, self.values)
    self.placed: dict[Any, jax.Array] = {}

  def host(self, value: Any) -> Any:
    """The array of a variable or literal: numpy, or jax for keys and for constants that are jax arrays."""
    array = read(value, self.values)
    return array if isinstance(array, jax.Array) else np.asarray(array, dtype=value.aval.dtype)

  def __call__(self, value: Any, piece: Slice) -> jax.Array:
    """The array as a slice wants it: on all devices, keys as numbers."""
    array = self.host(value)
    sharding = self.sharding(value, piece)
    if not is_tiny(value.aval):
      # Not kept: a constant is read once, and would stay on the devices beside what is made of it.
      return jax.device_put(array, sharding)
    if is_key(value.aval.dtype):
      array = jax.random.key_data(array)
    array = np.asarray(array)
    name = (array.dtype, array.shape, array.tobytes())
    if name not in self.placed:
      self.placed[name] = jax.device_put(array, sharding)
    return self.placed[name]

  def sharding(self, value: Any, piece: Slice) -> NamedSharding:
    """Tiny values are whole; a constant is cut like the result of its shape, or over the whole mesh."""
    shape = value.aval.shape
    whole = PartitionSpec(*([None] * len(shape)))
    if is_tiny(value.aval):
      return NamedSharding(self.mesh, PartitionSpec())
    for position, result in zip(piece.outputs, piece.results, strict=True):
      if result.aval.shape == shape:
        return NamedSharding(self.mesh, self.shardings[position].spec)
    if value.aval.size <= FLOATS:
      return NamedSharding(self.mesh, whole)
    return NamedSharding(self.mesh, add_axes(whole, shape, self.mesh.axis_names, axis_sizes(self.mesh)).spec)


def lower_slice(piece: Slice, feed: Feed, shardings: Sequence[NamedSharding]) -> jax.stages.Lowered:
  """Lowers one slice as a program of its inputs; call it under the mesh.

  Args:
    piece: the slice; its program serves all slices with its key.
    feed: says how inputs are placed.
    shardings: the sharding of each output of the trace.

  Returns:
    The lowered program.
  """

  def run(*arrays: jax.Array) -> list[jax.Array]:
    values: dict[Any, Any] = {}
    for value, array in zip(piece.inputs, arrays, strict=True):
      if is_key(value.aval.dtype):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(feed.host(value)))
      values[id(value) if isinstance(value, jex.Literal) else value] = array
    evaluate(piece.steps, values, apart=True)
    return [read(result, values) for result in piece.results]

  arguments = [_abstract(value, feed.sharding(value, piece)) for value in piece.inputs]
  targets = [shardings[i] for i in piece.outputs]
  return jax.jit(run, out_shardings=targets).lower(*arguments)


def _abstract(value: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  aval = jax.eval_shape(jax.random.key_data, value.aval) if is_key(value.aval.dtype) else value.aval
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
