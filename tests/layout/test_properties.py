"""Properties of resolution over shapes x meshes x rules."""

import itertools
import math
import string

import flax.linen
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import nnx_parallel as nxp
from nnx_parallel import LogicalRules
from nnx_parallel.core.axes import axes_of
from nnx_parallel.errors import ShardingError
from nnx_parallel.layout.resolve import count_shards_by_dim, extend_spec

AXES = ("data", "fsdp", "tensor", "expert")
NAMES = tuple(string.ascii_lowercase[:6])
meshes = st.dictionaries(st.sampled_from(AXES), st.sampled_from([1, 2, 3, 4, 8]), min_size=1)
candidate = st.lists(st.sampled_from(AXES), max_size=2, unique=True).map(tuple)


def given(*strategies):
  # No deadline: the machine is shared, and the first example compiles nothing but imports much.
  return lambda test: hypothesis.settings(deadline=None, max_examples=100)(
    hypothesis.given(*strategies)(test)
  )


def reachable(options: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
  kept: list[tuple[str, ...]] = []
  for option in options:
    if not any(set(earlier) <= set(option) for earlier in kept):
      kept.append(option)
  return LogicalRules.first(*kept)


candidates = st.lists(candidate, min_size=1, max_size=3).map(reachable)
tables = st.dictionaries(st.sampled_from(NAMES), candidates, min_size=1)
policies = st.sampled_from(["error", "next", "pad", "replicate"])


@st.composite
def problems(draw):
  mesh, table = draw(meshes), draw(tables)
  names = st.one_of(st.none(), st.sampled_from(sorted(table) + sorted(mesh)))
  pairs = st.lists(st.sampled_from(sorted(table)), min_size=2, max_size=2, unique=True).map(tuple)
  entry = st.one_of(names, pairs) if len(table) > 1 else names
  dims = draw(st.lists(st.tuples(entry, st.integers(1, 96)), max_size=4))
  return mesh, table, tuple(name for name, _ in dims), tuple(size for _, size in dims)


def resolve(mesh, table, names, shape, uneven="error"):
  try:
    return nxp.resolve_spec(names, shape, mesh, LogicalRules(table), uneven=uneven)
  except ShardingError as error:
    return error


def local_size(spec, shape, mesh):
  counts = count_shards_by_dim(spec, len(shape), mesh)
  return math.prod(size // count for size, count in zip(shape, counts, strict=True))


@given(problems(), policies)
def test_a_spec_is_valid_for_jax_and_uses_no_axis_twice(problem, policy):
  mesh, table, names, shape = problem
  found = resolve(mesh, table, names, shape, policy)
  if isinstance(found, ShardingError):
    assert "Fix: " in str(found)
    return
  stored = tuple(size + extra for size, extra in zip(shape, found.padding, strict=True))
  sharding = NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh)), found.spec)
  jax.ShapeDtypeStruct(stored, np.float32, sharding=sharding)
  sharding.shard_shape(stored)
  axes = [a for e in found.spec if e for a in ((e,) if isinstance(e, str) else e)]
  assert len(axes) == len(set(axes))
  assert len(found.spec) == len(shape)
  assert any(found.padding) <= (policy == "pad")


@given(problems(), policies)
def test_never_larger_per_device_than_without_the_rules(problem, policy):
  mesh, table, names, shape = problem
  found = resolve(mesh, table, names, shape, policy)
  if isinstance(found, ShardingError):
    return
  if policy != "pad":
    assert local_size(found.spec, shape, mesh) <= math.prod(shape)
    return
  counts = count_shards_by_dim(found.spec, len(shape), mesh)
  for size, extra, count in zip(shape, found.padding, counts, strict=True):
    # Padding is less than one shard's worth, so what a device holds never exceeds the whole dim.
    assert extra < count or extra == 0
    assert (size + extra) // count <= size


@given(problems(), policies)
def test_the_same_every_time_and_in_every_order_of_the_rules(problem, policy):
  mesh, table, names, shape = problem
  outcomes = {
    outcome(resolve(mesh, dict(order), names, shape, policy))
    for order in itertools.islice(itertools.permutations(table.items()), 6)
  }
  assert len(outcomes) == 1


def outcome(found):
  # The text of an error lists the rules as they were written.
  return found.what if isinstance(found, ShardingError) else repr(found)


@given(problems(), st.integers(0, 256), st.lists(st.sampled_from(AXES), min_size=1, max_size=2, unique=True))
def test_the_fallback_only_ever_makes_shards_smaller(problem, min_size, axes):
  mesh, table, names, shape = problem
  found = resolve(mesh, table, names, shape, "next")
  if isinstance(found, ShardingError) or not set(axes) <= set(mesh):
    return
  fallback = nxp.fsdp(tuple(axes), min_size=min_size)
  more, why = extend_spec(found.spec, shape, mesh, fallback)
  spec = more.spec
  assert local_size(spec, shape, mesh) <= local_size(found.spec, shape, mesh)
  assert extend_spec(spec, shape, mesh, fallback)[0].spec == spec
  assert all(
    axes_of(new)[: len(axes_of(old))] == axes_of(old) for old, new in zip(found.spec, spec, strict=True)
  )
  if math.prod(shape) > min_size:  # each axis of the fallback is used, or divides no dim
    local = [size // n for size, n in zip(shape, count_shards_by_dim(spec, len(shape), mesh), strict=True)]
    used = {axis for entry in spec for axis in axes_of(entry)}
    assert not any(
      size and size % mesh[axis] == 0 for axis in {*axes} - used if mesh[axis] > 1 for size in local
    )
  assert (spec == found.spec) == (not why.startswith(("'", "(")) or " on dim " not in why)
  NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh)), spec).shard_shape(shape)


def contend(table, names):
  used = [{axis for option in table[name] for axis in option} for name in names if name in table]
  return sum(map(len, used)) != len(set().union(*used))


@given(tables, st.lists(st.one_of(st.none(), st.sampled_from([*NAMES, "norule"])), max_size=4))
def test_agrees_with_linen_where_names_do_not_contend(table, names):
  # Linen settles contention by the order of the rules, we by the order of the dims; it knows neither
  # mesh sizes nor shapes, so every size is 1 here.
  if contend(table, names) or len({n for n in names if n}) != len([n for n in names if n]):
    return
  pairs = [(name, option or None) for name, options in table.items() for option in options]
  linen = flax.linen.logical_to_mesh_axes(names, pairs)
  ours = nxp.resolve_spec(names, (8,) * len(names), dict.fromkeys(AXES, 1), LogicalRules.from_linen(pairs))
  assert (
    PartitionSpec(*(e if isinstance(e, str) or not e or len(e) > 1 else e[0] for e in linen)) == ours.spec
  )
