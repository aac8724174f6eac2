import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from checkpoint.runs import assert_same, target_of
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError


def changed(tree, **renames):
  return {renames.get(name, name): leaf for name, leaf in target_of(tree).items()}


def test_a_fit_predicts_bytes(saved):
  directory, trees = saved
  diff = Checkpointer(directory).diff(target_of(trees[2]))
  assert diff.fits
  assert diff.bytes_read == sum(leaf.nbytes for leaf in trees[2].values())
  assert diff.device_bytes == sum(leaf.addressable_shards[0].data.nbytes for leaf in trees[2].values())
  assert "step 2: fits the target\nrestored: 4 leaves, left out by name: 0\nthis process reads" in str(diff)


def test_renamed_leaves_are_hinted_by_name_and_shape(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  target = changed(trees[2], w="kernel_w", b="bias")
  text = r"does not fit the target \(2 missing, 2 extra\)\.\n  missing  model/bias  \(saved: model/b\?\)\n"
  text += r"  missing  model/kernel_w  \(saved: model/w\?\)\n  extra    model/b\n  extra    model/w\n"
  text += r"  Fix: if they were renamed: restore\(\.\.\., rename=\{'bias': 'b', 'kernel_w': 'w'\}\)\."
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target)
  again = checkpointer.restore(target, rename={"bias": "b", "kernel_w": "w"})
  assert_same({"w": again["kernel_w"]}, {"w": trees[2]["w"]})


def test_shapes_name_the_leaf_and_both_shapes(saved):
  directory, trees = saved
  target = target_of(trees[2])
  target["w"] = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=trees[2]["w"].sharding)
  with pytest.raises(CheckpointError, match=r"shape    model/w: saved \(8, 16\), wanted \(8, 8\)"):
    Checkpointer(directory).restore(target)


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.int32, jnp.bfloat16])
def test_types_are_never_changed_silently(saved, dtype):
  directory, trees = saved
  target = target_of(trees[2])
  target["w"] = jax.ShapeDtypeStruct((8, 16), dtype, sharding=trees[2]["w"].sharding)
  text = rf"(?s)dtype    model/w: saved float32, wanted {np.dtype(dtype)}.*cast=True"
  with pytest.raises(CheckpointError, match=text):
    Checkpointer(directory).restore(target)


def test_partial_only_by_name(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  with pytest.raises(CheckpointError, match=r"(?s)3 extra.*Fix: name the leaves to leave out: restore"):
    checkpointer.restore({"w": target_of(trees[2])["w"]})
  assert_same(checkpointer.restore({"w": trees[2]["w"]}, only=["w"]), {"w": trees[2]["w"]})
  again = checkpointer.restore(target_of(trees[2]), skip=["st*", "b"])
  assert isinstance(again["step"], jax.ShapeDtypeStruct)
  assert_same({"w": again["w"]}, {"w": trees[2]["w"]})
  diff = checkpointer.diff(target_of(trees[2]), skip=["st*", "b"])
  assert diff.skipped == ("b", "step")
  assert "restored: 2 leaves, left out by name: 2" in str(diff)


@pytest.mark.parametrize("how", [{"only": ["halv"]}, {"skip": ["halv"]}, {"rename": {"halv": "half"}}])
def test_misspelt_names_are_errors(saved, how):
  directory, trees = saved
  text = r"no leaf  halv  \(nearest: half\)"
  with pytest.raises(CheckpointError, match=rf"(?s)1 not found by name.*{text}.*Fix: use the leaf's path"):
    Checkpointer(directory).restore(target_of(trees[2]), **how)


class Named(nnx.Module):  # Two layers, of which the first has a name that changes
  def __init__(self, name):
    setattr(self, name, nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    self.down = nnx.Linear(16, 8, rngs=nnx.Rngs(1))


def named(name, tx):
  return nxp.plan(lambda: Named(name), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=8), optimizer=tx)


@pytest.fixture
def renamed(tmp_path):
  """A Checkpointer with a step of a model whose layer `up` is called `upper` now, with moments of its own."""
  model, optimizer = nxp.create_sharded_model(named("up", optax.adam(1e-3)))
  state = nnx.state(optimizer)
  nnx.update(optimizer, jax.tree.map(lambda x: x + 1, state))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer)
  return checkpointer, optimizer


def test_what_is_renamed_takes_its_moments_along_and_the_error_names_the_entry_that_works(renamed):
  checkpointer, optimizer = renamed
  with pytest.raises(CheckpointError, match=r"if they were renamed: .*rename=\{'upper': 'up'\}\)"):
    checkpointer.restore(named("upper", optax.adam(1e-3)))
  _, again = checkpointer.restore(named("upper", optax.adam(1e-3)), rename={"upper": "up"})
  mu, old = again.opt_state[0].mu, optimizer.opt_state[0].mu
  np.testing.assert_array_equal(mu["upper"]["kernel"], old["up"]["kernel"])
  assert again.opt_state[0].nu["upper"]["bias"][...].max() == 1


def test_what_is_skipped_is_skipped_in_the_optimizer_too(renamed):
  checkpointer, _ = renamed
  model, again = checkpointer.restore(named("new", optax.adam(1e-3)), skip=["new.*", "up.*"])
  np.testing.assert_array_equal(again.opt_state[0].mu["new"]["kernel"], 0)
  np.testing.assert_array_equal(again.opt_state[0].mu["down"]["kernel"], 1)
  assert model.new.kernel.shape == (8, 16)
