"""The compiled step is the program that a person writes by hand: the same FLOPs, the same bytes sent."""

import numpy as np
import optax
import pytest

import nnx_parallel as nxp
from benchmarks.by_hand import LAYOUTS, classifier, moments_of, parameters_of, step_by_hand, transformer
from nnx_parallel.report.program.collectives import collectives, totals
from nnx_parallel.report.program.cost import cost
from training import placed

RNG = np.random.default_rng(0)
DIGITS = {
  "pixels": RNG.normal(size=(32, 64)).astype(np.float32),
  "labels": (np.arange(32) % 10).astype(np.int32),
}
JOBS = {"digits": classifier(64, DIGITS), "transformer": transformer(64, 8, 1, 8, 8)}
CASES = [*(("transformer", layout) for layout in LAYOUTS), ("digits", "fsdp x tp")]


def work(lowered, mesh):
  """FLOPs of a program, and the bytes it sends by kind and axes."""
  text = lowered.compile().as_text()
  sent = totals(collectives(text, dict(mesh.shape)), key=lambda c: (c.kind, c.axes))
  return cost(text).flops, sent


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_flops_and_bytes_sent_equal_the_hand_written_step(name, layout):
  job = JOBS[name]
  tx = optax.adamw(1e-3)
  plan = job.plan(layout, tx)
  model, optimizer = placed(plan)
  batch = nxp.shard_batch(job.batch, plan)
  parameters = parameters_of(model)
  by_hand, state = step_by_hand(job, tx, parameters, moments_of(plan, parameters))
  ours = work(nxp.train_step(job.loss).lower(model, optimizer, batch), plan.mesh)
  theirs = work(by_hand.lower(parameters, state, batch), plan.mesh)
  assert ours[0] == theirs[0] > 0
  assert ours[1]
  if name == "transformer" and "fsdp" in layout:  # whose table is looked up by columns
    assert sum(ours[1].values()) <= 1.05 * sum(theirs[1].values())
  else:
    assert ours[1] == theirs[1]
