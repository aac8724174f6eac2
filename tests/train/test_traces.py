"""How often a step traces a loss: its trace is most of the work before a compilation."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders
from training import placed

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
STAGES = {"stage": 2, "data": 4}
OPTIONS = {
  "one batch": {}, "recomputed": {"remat": "full"}, "microbatches": {"microbatches": 2},
  "all options": {"microbatches": 2, "remat": "full", "attention": "blockwise", "loss_chunks": 4},
}  # fmt: skip
PIPELINES = [nxp.Pipeline("stage"), nxp.Pipeline("stage", order="1f1b")]


def traces(axes, rules, examples=32, explicit=False, tx=None, **options):
  """The number of traces of a decoder's loss in the first step, and how the step reduces gradients."""
  calls = []

  def loss(model, tokens):
    calls.append(tokens)
    return decoders.loss(model, tokens)

  mesh = nxp.make_mesh(axes, explicit=explicit)
  config = decoders.Config(depth=4)
  plan = nxp.plan(lambda: decoders.Decoder(config, nnx.Rngs(0)), mesh, rules, optimizer=tx or optax.sgd(0.1))
  model, optimizer = placed(plan)
  step = nxp.train_step(loss, **options)
  batch = nxp.shard_batch(np.zeros((examples, 9), np.int32), plan)
  with jax.numpy_rank_promotion("allow"):  # the model is written so
    step(model, optimizer, batch)
    first = len(calls)
    if tx is None:
      step(model, optimizer, batch)
      assert len(calls) == first
  return first, step.reduction


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("axes", "rules"), [
  (CUBE, nxp.fsdp(min_size=0)), ({"data": 8}, nxp.replicate()), ({"fsdp": 8}, nxp.fsdp(min_size=0)),
], ids=["cube", "data", "fsdp"])  # fmt: skip
def test_a_loss_is_traced_at_most_twice(axes, rules, options, explicit):
  found, how = traces(axes, rules, explicit=explicit, **options)
  # Once if nothing has to be compared: replicas that may sum by themselves are compared with all together.
  assert found == (2 if how.startswith("once, after") else 1)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline.order)
def test_a_loss_of_a_pipeline_is_traced_twice(pipeline):
  found = traces(STAGES, nxp.replicate(), microbatches=4, pipeline=pipeline)
  assert found == (2, "once, after the last tick, over data")


@pytest.mark.parametrize("options", [OPTIONS["one batch"], OPTIONS["microbatches"]], ids=["one", "two"])
def test_a_loss_that_a_line_search_evaluates_is_traced_twice(options):
  assert traces({"data": 8}, nxp.replicate(), tx=optax.lbfgs(), **options)[0] == 2


def test_one_example_in_each_microbatch_of_a_replica_is_traced_once_more():
  """A dim of one example has other operations, so two examples are compared with twice as many."""
  found, how = traces({"data": 8}, nxp.replicate(), examples=16, microbatches=2)
  assert (found, how) == (3, "once, after the scan, over data, in float32")
