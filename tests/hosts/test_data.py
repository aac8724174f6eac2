"""Batches land where the plan's batch rule says, and bad sizes are refused with the size that works."""

import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from processes import end_groups, run_two


def _plan(rules=None, **axes):
  return nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(**axes), rules)


def test_numbers_in_another_byte_order_are_the_same_numbers():
  placed = nxp.shard_batch(np.arange(8, dtype=">f4"), _plan(data=8))
  np.testing.assert_array_equal(placed, np.arange(8, dtype=np.float32))


@pytest.mark.parametrize("big", [2**40, -(2**31) - 1, np.uint64(2**32)], ids=str)
def test_integers_that_32_bits_cannot_hold_are_refused(big):
  plan, batch = _plan(data=8), {"ids": np.full((16,), big)}
  model = nxp.unsharded(plan.init)
  step = nxp.eval_step(lambda model, batch: batch["ids"].mean() + 0 * model.bias[...].sum())
  for call in (lambda: nxp.shard_batch(batch, plan), lambda: step(model, batch)):
    with pytest.raises(nxp.errors.ShardingError) as error:
      call()
    assert "batch['ids'] has integers that " in str(error.value)
    assert f"from {big} to {big}" in str(error.value)
  assert nxp.shard_batch({"ids": np.arange(16)}, plan)["ids"].dtype == np.int32


def test_no_axis_for_the_batch_is_an_error():
  with pytest.raises(nxp.errors.ShardingError, match="no rule says which mesh axes split the batch") as error:
    _plan(tensor=8).batch_spec(2)
  assert 'LogicalRules(batch="tensor")' in str(error.value)


def test_uneven_batch_names_the_remainder_and_the_next_sizes():
  plan = _plan(data=8)
  with pytest.raises(nxp.errors.ShardingError) as error:
    nxp.shard_batch({"x": np.ones((12, 3))}, plan)
  text = str(error.value)
  assert "batch['x'] has 12 examples, which 8 shards cannot split evenly (remainder 4)" in text
  assert "use a global batch of 8 or 16." in text


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_batches_keep_order_and_lose_none(prefetch):
  plan = _plan(data=8)
  source = [np.full((8,), i, np.float32) for i in range(4)]
  seen = [int(batch[0]) for batch in nxp.batches(source, plan, prefetch=prefetch)]
  assert seen == [0, 1, 2, 3]


class ByIndex:
  """A dataset with an index, as PyTorch has them; those of Grain and Hugging Face can be iterated too."""

  def __len__(self):
    return 16

  def __getitem__(self, index):
    if index >= 16:
      raise IndexError(index)
    return np.full((8,), index, np.float32)


class Iterable(ByIndex):
  def __iter__(self):
    return (self[index] for index in range(16))


@pytest.mark.parametrize(
  "source", [ByIndex(), Iterable(), np.ones((16, 8), np.float32)], ids=["index", "iterable", "array"]
)
def test_items_by_index_are_no_batches_unless_the_call_says_so(source):
  plan = _plan(data=8)
  with pytest.raises(nxp.errors.TrainError, match=r"items by index(.|\n)*batch=\.\.\.(.|\n)*iter\(source\)"):
    nxp.batches(source, plan)
  assert [batch.shape for batch in nxp.batches(source, plan, batch=8)] == [(8, 8)] * 2
  assert [batch.shape for batch in nxp.batches(iter(source), plan)] == [(8,)] * 16


@pytest.mark.parametrize(("batch", "message"), [
  ({"x": np.zeros((0, 3))}, r"batch\['x'\] has no examples\.\n  shape \(0, 3\)"),
  ({"label": ["cat"]}, r"batch\['label'\]\[0\] is not an array of numbers\."),
  ({"label": np.array(["cat"] * 8)}, r"batch\['label'\] is not an array of numbers\."),
  ({"day": np.zeros(8, "datetime64[D]")}, r"batch\['day'\] is not an array of numbers\."),
  ({"row": np.zeros(8, [("x", "f4")])}, r"batch\['row'\] is not an array of numbers\."),
])  # fmt: skip
def test_what_is_no_batch(batch, message):
  with pytest.raises(nxp.errors.ShardingError, match=message):
    nxp.shard_batch(batch, _plan(data=8))


@pytest.mark.slow
def test_two_processes_pass_their_shares_and_stop_at_the_same_step(tmp_path):
  body = """
    import os, signal
    import optax
    from flax import nnx

    everything = np.arange(64, dtype=np.float32).reshape(16, 4)
    def show(array):
      return [s.data.tolist() == everything[s.index].tolist() for s in array.addressable_shards], array.shape

    init = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    plan = nxp.plan(init, nxp.make_mesh(data=4, tensor=2), nxp.replicate(), optimizer=optax.sgd(0.1))
    share = everything[8 * process : 8 * process + 8]
    print("share", *show(nxp.shard_batch({"x": share, "n": 3}, plan)["x"]))
    print("again", *show(nxp.shard_batch(nxp.shard_batch(share, plan), plan)))
    print("whole", *show(nxp.shard_batch(everything, plan, global_batch=True)))
    # Both processes hold every example: a device of each has it.
    both = nxp.plan(init, nxp.make_mesh(tensor=2, data=4), nxp.LogicalRules(batch="data"))
    print("same", *show(nxp.shard_batch(everything, both)))
    try:
      nxp.shard_batch(everything[:7], plan)
    except nxp.errors.ShardingError as error:
      print(error)

    def endless(samples):
      while True:
        yield share * np.float32(1e-2)
    kill = lambda step, _: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None
    with nxp.Checkpointer(arguments[0]) as checkpointer:
      step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
      try:
        nxp.fit(step, *nxp.create_sharded_model(plan), endless, steps=10**9, plan=plan, progress=False,
                checkpointer=checkpointer, trackers=[kill])
      except SystemExit as error:
        steps = checkpointer.steps()
        print("ended", error.code, len(steps), checkpointer.restore_extra("data")["samples"] == 16 * steps[0])
  """
  results = run_two(body, tmp_path / "ckpt")
  end_groups()  # JAX does not forget the signal
  for text in results:
    lines = text.splitlines()
    right = "[True, True, True, True] (16, 4)"
    assert [f"{name} {right}" for name in ("share", "again", "whole", "same")] == lines[:4]
    assert lines[4].startswith("batch has 7 examples on this process, which 2 shards cannot split evenly")
    assert "Fix: pass each process a share of 6 or 8." in lines[6]
    assert lines[-1] == "ended 75 1 True"
