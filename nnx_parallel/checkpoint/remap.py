"""Restores a checkpoint of a model that was built otherwise: a list of layers into a stacked one, and so on.

The saved leaves are read, verified, evenly spread over the target's devices, and put together there. So each
byte of a leaf is read by one device only, and goes to where the target wants it between devices, not through
the file system. A mesh axis that divides no dim of a saved leaf is the exception: the leaf is read once for
each index of that axis by different processes, as a small bias may be.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Container
from collections.abc import Mapping as MappingType
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nnx_parallel.checkpoint import encoding
from nnx_parallel.checkpoint.mapping import Bound, Mapping, Spec, Stack, layer_counts, stack_size, with_layers
from nnx_parallel.checkpoint.placement import on_auto_axes, spread
from nnx_parallel.checkpoint.preflight import Wanted
from nnx_parallel.checkpoint.targets import Found, Target


def through(mapping: Mapping, target: Target) -> Target:
  """A target in the checkpoint's terms, whose `build` puts the leaves together and fills the real one.

  Args:
    mapping: their names are the saved paths, ours the target's; paths without a rule stay as they are.
      A rule for a parameter holds for its moments in the optimizer too.
    target: what is to be filled.
  """
  parameters = target.wanted["model"]
  bounds = {item: _bind(mapping, leaves, parameters) for item, leaves in target.wanted.items()}
  wanted = {item: _sources(bounds[item], leaves) for item, leaves in target.wanted.items()}

  def build(found: Found) -> Any:
    return target.build(
      {
        item: _put_together(leaves, bounds.get(item, {}), target.wanted.get(item, {}))
        for item, leaves in found.items()
      }
    )

  return dataclasses.replace(target, wanted=wanted, build=build)


def _bind(mapping: Mapping, leaves: MappingType[str, Wanted], parameters: Container[str]) -> dict[str, Bound]:
  table: dict[str, Bound] = {}
  for path, wanted in leaves.items():
    bound = None if encoding.is_key(wanted.struct.dtype) else mapping.find(path, parameters)
    if bound is None:
      continue
    if isinstance(bound.rule.layers, Stack):
      bound = with_layers(bound, stack_size(bound, _spec(wanted)))
    table[path] = bound
  return table


def _sources(table: MappingType[str, Bound], leaves: MappingType[str, Wanted]) -> dict[str, Wanted]:
  """The saved leaves to read: those behind a rule spread evenly, the others as the target has them."""
  counts = layer_counts(table.values())
  found = {path: wanted for path, wanted in leaves.items() if path not in table}
  for path, bound in table.items():
    specs = bound.their_specs(_spec(leaves[path]), counts.get(bound.theirs[0], 1))
    for name, spec in specs.items():
      layout = _even(leaves[path].struct.sharding, spec.shape)
      found[name] = Wanted(jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=layout), spec.shape)
  return found


def _put_together(
  have: dict[str, Any], table: MappingType[str, Bound], wanted: MappingType[str, Wanted]
) -> dict[str, Any]:
  """Makes the leaves behind rules, taking each saved one out of `have` at its last use: few exist twice."""
  uses = collections.Counter(name for bound in table.values() for name in bound.theirs)
  made: dict[str, Any] = {}
  for path, bound in table.items():
    whole = all(name in have for name in bound.theirs)
    uses.subtract(bound.theirs)
    sources = [have[name] if uses[name] else have.pop(name, None) for name in bound.theirs if name in have]
    if whole:
      made[path] = _make(bound, sources, wanted[path])
  have.update(made)
  return have


def _spec(wanted: Wanted) -> Spec:
  return Spec(wanted.shape, np.dtype(wanted.struct.dtype))


def _even(sharding: Any, shape: tuple[int, ...]) -> Any:
  if not isinstance(sharding, NamedSharding):
    return sharding
  return spread(NamedSharding(_auto(sharding), PartitionSpec()), shape)


def _auto(sharding: NamedSharding) -> Mesh:
  names, devices = sharding.mesh.axis_names, cast(Mesh, sharding.mesh).devices
  return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _make(bound: Bound, sources: list[Any], wanted: Wanted) -> Any:
  struct = wanted.struct
  if struct.sharding is None:
    return np.asarray(bound.apply([jax.numpy.asarray(source) for source in sources]))
  layout = struct.sharding
  if isinstance(layout, NamedSharding):
    layout = NamedSharding(_auto(layout), layout.spec)
  program = _program(dataclasses.replace(bound, ours="", theirs=()), struct.shape, layout)
  # One at a time: many programs that communicate at once can starve each other on simulated devices.
  made = jax.block_until_ready(program([on_auto_axes(source) for source in sources]))
  return jax.device_put(made, struct.sharding)


@functools.lru_cache(maxsize=256)
def _program(bound: Bound, shape: tuple[int, ...], layout: Any) -> jax.stages.Wrapped:
  def make(sources: list[jax.Array]) -> jax.Array:
    array = bound.apply(sources)
    return jax.numpy.pad(array, [(0, new - old) for new, old in zip(shape, array.shape, strict=True)])

  return jax.jit(make, out_shardings=layout)
