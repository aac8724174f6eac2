"""What users of other tools lost time on with checkpoints, and where each promise is kept.

Told here, or in the test that is named:

| what hurt | test |
|---|---|
| restore brings back the saved layout | test_whole_path: test_restore_on_any_mesh_continues_the_run |
| PRNG keys; `Cannot interpret 'key<fry>'` | test_restore: test_everything_a_run_is; here |
| silent partial restore | here; by name: test_diff: test_partial_only_by_name |
| host memory blows up | test_memory; predicted: test_diff: test_a_fit_predicts_bytes |
| unfinished saves look valid | test_integrity: test_latest_skips_what_is_not_whole |
| background errors vanish | test_safety: test_background_errors_are_raised_at_the_next_call |
| slow load from the chunk layout | here; reshard: test_commands: test_reshard_keeps_everything |
| `Sharding info not provided when restoring` | test_restore: test_numpy_only_on_request |
| `tree structures do not match` | here (another optimizer chain); renames: test_diff |
| `Requested shape: ... is not compatible` | test_diff: test_shapes_name_the_leaf_and_both_shapes |
| `Found incomplete checkpoint at ...` | here |
| `Memory kind mismatch` | test_restore: test_memory_kinds_are_the_targets |
"""

import concurrent.futures
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax import NamedSharding, P

import nnx_parallel as nxp
from checkpoint.runs import MESHES, assert_same, make_plan
from nnx_parallel.checkpoint import array_io
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError


class Deep(nnx.Module):
  def __init__(self, depth):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(depth)])


def deep_plan(depth, tx=None):
  return nxp.plan(lambda: Deep(depth), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=1), optimizer=tx)


def test_random_streams_go_on_where_they_were(tmp_path):
  model, _ = nxp.create_sharded_model(make_plan("8"))
  x = jnp.ones((8, 32))
  model.dropout(x)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model)
  restored = checkpointer.restore(make_plan("2x4", optimizer=False))
  for _ in range(2):
    np.testing.assert_array_equal(model.dropout(x), restored.dropout(x))


DEPTHS = [(12, 16, "missing"), (16, 12, "extra")]


@pytest.mark.parametrize(("saved", "wanted", "kind"), DEPTHS)
def test_a_file_of_another_depth_is_refused_before_any_read(tmp_path, monkeypatch, saved, wanted, kind):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, nxp.create_sharded_model(deep_plan(saved)))
  monkeypatch.setattr(array_io, "read", lambda *_, **__: pytest.fail("an array was read"))
  text = rf"does not fit the target \(4 {kind}\)\.\n(.*\n)*?  {kind}  +model/layers\.12\.kernel"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(deep_plan(wanted))


def test_another_optimizer_chain_is_a_diff_by_path(tmp_path):
  adam, momentum = optax.adam(1e-3), optax.sgd(1e-3, momentum=0.9)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, *nxp.create_sharded_model(deep_plan(1, adam)))
  text = r"(?s)missing  optimizer/opt_state\.0\.trace\.layers.*extra    optimizer/opt_state\.0\.mu\..*Fix: "
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(deep_plan(1, momentum))
  _, optimizer = checkpointer.restore(deep_plan(1, momentum), optimizer="fresh")
  assert isinstance(optimizer, nnx.Optimizer)


def test_two_threads_restore_at_once_from_two_directories(tmp_path, caplog):
  trees = [{"w": np.full((64, 32), i, np.float32), "b": np.full(32, i, np.int32)} for i in range(2)]
  for i, tree in enumerate(trees):
    Checkpointer(tmp_path / str(i)).save(1, tree)
  sharding = NamedSharding(nxp.make_mesh(fsdp=8), P("fsdp"))
  target = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in trees[0].items()}

  def restore(i):
    checkpointer = Checkpointer(tmp_path / str(i))
    return [checkpointer.restore(target) for _ in range(4)]

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for tree, found in zip(trees, pool.map(restore, range(2)), strict=True):
      for again in found:
        assert_same(again, tree)
  assert not caplog.messages


def test_an_unfinished_step_names_the_complete_ones(saved):
  directory, trees = saved
  (directory / "2" / "nnx_parallel.json").unlink()
  checkpointer = Checkpointer(directory)
  assert checkpointer.latest() == 1
  text = r"(?s)cannot find step 2 in .*complete steps: \[1\]\n  incomplete, .*: \[2\]\n  Fix: one of"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(trees[2], 2)


# Any tree, on any mesh, in any dtype, under any names.

NAMES = st.text("ab0/_-é", min_size=1, max_size=4)
FLOATS = ["float16", "bfloat16", "float32"]
SMALL_FLOATS = ["float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"]
SMALL_FLOATS += ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"]
INTS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32)]
DTYPES = st.sampled_from([*FLOATS, *SMALL_FLOATS, *INTS, "bool", "key"])
SHAPES = st.lists(st.sampled_from([0, 1, 3, 4, 8]), max_size=3).map(tuple)
SPECIAL = st.sampled_from([None, np.nan, np.inf, -np.inf, -0.0])
LEAVES = st.tuples(SHAPES, DTYPES, st.integers(0, 2**31 - 1), SPECIAL)
FEW = {"min_size": 1, "max_size": 3}
INNER = lambda inner: st.lists(inner, **FEW) | st.dictionaries(NAMES, inner, **FEW)
TREES = st.recursive(LEAVES, INNER, max_leaves=5)


def values(shape, dtype, seed, special):
  """Any bits, so any value: a nan of any kind too; `special` comes first in an array of floats."""
  rng = np.random.default_rng(seed)
  if dtype == "bool":
    return rng.integers(0, 2, shape).astype(np.bool_)
  dtype = jnp.dtype(dtype)
  if dtype.name in ("int4", "uint4"):
    return rng.integers(jnp.iinfo(dtype).min, jnp.iinfo(dtype).max + 1, shape).astype(dtype)
  if dtype.name == "float4_e2m1fn":
    return rng.integers(0, 16, shape, np.uint8).view(dtype)
  array = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
  if special is not None and array.size and dtype.name in FLOATS:
    array.flat[0] = special
  return array


def place(leaf, mesh):
  """A random array, its dims split over the axes of the mesh as long as they divide them."""
  shape, dtype, seed, special = leaf
  free, spec = dict(mesh.shape), []
  for size in shape:
    axis = next((name for name, parts in free.items() if size and size % parts == 0), None)
    free.pop(axis, None)
    spec.append(axis)
  if dtype == "key":
    array = jax.random.split(jax.random.key(seed), (*shape, 1))[..., 0]
  else:
    array = values(shape, dtype, seed, special)
  return jax.device_put(array, NamedSharding(mesh, P(*spec)))


# `make torture` tries many others, new ones each time.
COUNT = int(os.environ.get("RANDOM_TREES", "10"))


@pytest.mark.slow
@hypothesis.settings(max_examples=COUNT, deadline=None, derandomize="RANDOM_TREES" not in os.environ)
@hypothesis.given(st.dictionaries(NAMES, TREES, **FEW), *[st.sampled_from(sorted(MESHES))] * 2, st.booleans())
def test_any_tree_on_any_mesh_under_any_names(tmp_path_factory, spec, source, goal, renamed):
  made = lambda mesh: jax.tree.map(lambda x: place(x, mesh), spec, is_leaf=lambda x: isinstance(x, tuple))
  tree, like = made(MESHES[source]()), made(MESHES[goal]())
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
  rename = {}
  if renamed:
    target = {f"new{i}": target[name] for i, name in enumerate(tree)}
    like = {f"new{i}": like[name] for i, name in enumerate(tree)}
    rename = {f"new{i}": name for i, name in enumerate(tree)}
  with Checkpointer(tmp_path_factory.mktemp("any")) as checkpointer:
    checkpointer.save(1, tree)
    again = checkpointer.restore(target, rename=rename)
    assert checkpointer.verify() == {}
  assert_same(again, like)
  for restored, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(like), strict=True):
    assert restored.sharding == wanted.sharding
    assert restored.dtype == wanted.dtype
