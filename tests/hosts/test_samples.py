"""Samples by a global index: each is used once, on whatever processes, and what fails says which it was."""

import itertools
import threading
import time

import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.errors import ShardingError


def _plan(rules=None, **axes):
  return nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(**axes or {"data": 8}), rules)


class Source:  # Samples {"id": i, "x": (3,)}; one may fail
  def __init__(self, length, bad=None):
    self.length, self.bad = length, bad

  def __len__(self):
    return self.length

  def __getitem__(self, index):
    if index == self.bad:
      raise OSError("the disk is gone")
    return {"id": index, "x": np.full(3, index, np.float32)}


def ids(batches):
  return [batch["id"].tolist() for batch in batches]


def flat(lists):
  return list(itertools.chain(*lists))


@pytest.mark.parametrize("axes", [{"data": 8}, {"tensor": 2, "data": 4}, {"data": 2, "fsdp": 4}])
def test_batches_hold_consecutive_samples_on_every_mesh(axes):
  plan = _plan(nxp.LogicalRules(batch=tuple(a for a in axes if a != "tensor")), **axes)
  found = list(nxp.batches(Source(40), plan, batch=16, start=3))
  assert ids(found) == [list(range(3, 19)), list(range(19, 35))]
  assert found[0]["x"].sharding.spec == plan.batch_spec(2)
  np.testing.assert_array_equal(found[1]["x"][:, 0], np.arange(19, 35, dtype=np.float32))


def test_the_last_batch_is_dropped_padded_or_kept():
  plan, source = _plan(), Source(24)
  assert ids(nxp.batches(source, plan, batch=16)) == [list(range(16))]
  assert ids(nxp.batches(source, plan, batch=16, last="keep")) == [list(range(16)), list(range(16, 24))]
  full, padded = nxp.batches(Source(19), plan, batch=16, last="pad")
  assert full["mask"].all()
  assert padded["id"].tolist() == [16, 17, *[18] * 14]
  assert padded["mask"].tolist() == [True] * 3 + [False] * 13
  assert padded["mask"].sharding.spec == P("data")
  with pytest.raises(ShardingError, match=r"batch has 3 examples, which 8 shards cannot split evenly"):
    nxp.batches(Source(19), plan, batch=16, last="keep")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_and_none_before_is_lost(prefetch):
  stream, seen = nxp.batches(Source(40, 29), _plan(), batch=8, prefetch=prefetch), []
  with pytest.raises(OSError, match="the disk is gone") as caught:
    seen.extend(batch["id"].tolist() for batch in stream)
  assert flat(seen) == list(range(24))
  assert "This was sample 29 of the source." in caught.value.__notes__


def test_samples_are_read_in_the_background_and_threads_end_with_the_iterator():
  before, caller, readers = set(threading.enumerate()), threading.get_ident(), set()

  class Noting(Source):
    def __getitem__(self, index):
      readers.add((threading.get_ident(), index))
      return super().__getitem__(index)

  stream = nxp.batches(Noting(10**9), _plan(), batch=8, prefetch=1, threads=2)
  next(stream)
  deadline = time.monotonic() + 30  # one is used, one placed, and one more read: samples 0 to 23
  while {index for _, index in readers} != set(range(24)) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert {index for _, index in readers} == set(range(24))
  assert {index for thread, index in readers if thread == caller} == {0}
  stream.close()
  assert set(threading.enumerate()) <= before
