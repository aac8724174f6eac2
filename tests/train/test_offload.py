"""Optimizer state in host memory: planned, created, streamed, trained on, restored."""

import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.layout import offload
from train import models
from train.models import data

HOST = "pinned_host"


class Net(models.Net):  # Three layers, so that state is fetched in several groups
  def __init__(self, rngs):
    super().__init__(rngs)
    self.mix = nnx.Linear(32, 32, rngs=rngs, kernel_metadata=named("mlp", "embed"))

  def __call__(self, x):
    return self.down(nnx.relu(self.mix(nnx.relu(self.up(x)))))


def plan_on(tx, memory, **options):
  init = lambda: Net(nnx.Rngs(0))
  return models.plan_on("dp x fsdp x tp", tx, init, optimizer_memory=memory, **options)


def train(plan, steps=3):
  return models.train(plan, data(steps))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
  monkeypatch.setattr(offload, "GROUP_BYTES", 600)


@pytest.mark.cases(1)
@pytest.mark.parametrize("tx", [
  nxp.with_loss_scale(nxp.with_masters(nxp.with_ema(optax.adamw(1e-2), 0.9))),
  optax.chain(optax.clip_by_global_norm(0.05), optax.lamb(1e-2)),
], ids=["wrappers", "global norm, lamb"])  # fmt: skip
def test_the_same_numbers_as_on_the_device(tx):
  plan = plan_on(tx, HOST, zero=1)
  model, optimizer, losses = train(plan)
  np.testing.assert_allclose(losses, train(plan_on(tx, None, zero=1))[2], rtol=1e-6)
  nxp.check_layout(model, plan, optimizer=optimizer)


def test_what_is_refused():
  with pytest.raises(nxp.errors.PlanError, match="optimizer_memory='host' is not a memory that state can"):
    plan_on(optax.adam(1e-2), "host")
  with pytest.raises(nxp.errors.PlanError, match="places optimizer state, but there is no optimizer"):
    plan_on(None, HOST)
