"""ZeRO: optimizer state split over the data axes, with the planned bytes, and the same numbers."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train import models
from train.models import RULES, Net, data
from training import placed


def init():
  return Net(nnx.Rngs(0), out=6)  # nothing divides the second bias


loss_fn = lambda model, x: ((model(x) - x[:, :6]) ** 2).mean()


def plan_on(name, tx=None, **options):
  return models.plan_on(name, tx or optax.adam(1e-2), init, **options)


def test_the_state_is_split_over_the_axes_that_its_parameter_does_not_use():
  plan = plan_on("dp x fsdp x tp", zero=1)
  assert plan["up.kernel"].spec == jax.P("fsdp", "tensor")
  assert plan["optimizer/opt_state.0.mu.up.kernel"].spec == jax.P("fsdp", ("tensor", "data"))
  assert "ZeRO: dim 1 also over data" in plan["optimizer/opt_state.0.mu.up.kernel"].decision.reason
  assert plan["optimizer/opt_state.0.mu.up.bias"].spec == jax.P(("data", "fsdp"))
  assert plan["optimizer/opt_state.0.mu.down.bias"].spec == jax.P("fsdp")  # 4 does not divide 6
  bias = plan_on("dp", zero=1)["optimizer/opt_state.0.mu.down.bias"]
  assert (bias.spec, bias.decision.reason.split("; ")[1]) == (jax.P(None), "no dim of (6,) divides by 8 more")


SCATTERED = "gradients are scattered into the layout of the optimizer state"


def reduction(plan, microbatches=2, **options):
  model, optimizer = placed(plan)
  step = nxp.train_step(loss_fn, microbatches=microbatches, **options)
  step(model, optimizer, nxp.shard_batch(data()[0], plan))
  return step.reduction


def program(plan, **options):
  step = nxp.train_step(loss_fn, microbatches=2, **options)
  return step.lower(plan, batch=nxp.shard_batch(data()[0], plan)).as_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_step_follows_the_stage_of_the_plan():
  one, two = plan_on("dp", zero=1), plan_on("dp", zero=2)
  assert reduction(two).endswith(SCATTERED)
  assert reduction(two, microbatches=1) == "once: one batch, into the layout of the optimizer state"
  once = "once, after the scan, over data, in float32"
  assert reduction(one) == reduction(two, gradients="like_parameters") == once
  assert program(two) == program(two, gradients="scattered") != program(one)
  assert program(one) == program(two, gradients="like_parameters")


def test_a_stage_that_splits_nothing_leaves_the_step_as_it_is():
  mesh = nxp.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, devices=jax.devices()[:1])
  plan = nxp.plan(init, mesh, RULES, optimizer=optax.adam(1e-2), zero=2)
  assert reduction(plan) == reduction(plan, gradients="scattered") == "in each microbatch: one device"


def test_stages_hold_the_planned_bytes_on_each_device():
  held = {}
  for zero in (0, 1, 2):
    plan = plan_on("dp", zero=zero)
    model, optimizer = placed(plan)
    nxp.check_layout(model, plan, optimizer=optimizer)  # bytes of each array on each device, as planned
    held[zero] = plan.bytes_per_device("optimizer")
  assert held[1] == held[2] < held[0] / 6
  wrong = placed(plan_on("dp"))
  with pytest.raises(nxp.errors.LayoutMismatchError, match=r"optimizer/opt_state.0.mu.up.kernel: planned"):
    nxp.check_layout(wrong[0], plan, optimizer=wrong[1])


@pytest.mark.parametrize(("options", "message"), [
  ({"zero": 3}, "zero=3 splits the parameters too"), ({"zero": 4}, "zero=4 is not a stage"),
  ({"zero_axes": "data"}, "zero_axes needs a stage"),
  ({"zero": 1, "zero_axes": "dta"}, "zero_axes names 'dta', which is not in the mesh"),
  ({"zero": 1, "zero_axes": ("data",) * 2}, r"zero_axes=\('data', 'data'\) names an axis twice"),
  ({"zero": 1, "zero_axes": ()}, "zero=1 splits nothing: zero_axes names no axis"),
  ({"zero": 1, "optimizer": None}, "zero=1 splits optimizer state, but there is no optimizer"),
])  # fmt: skip
def test_what_is_refused(options, message):
  with pytest.raises(nxp.errors.PlanError, match=message):
    nxp.plan(init, nxp.make_mesh(data=8, fsdp=1, tensor=1), RULES, **{"optimizer": optax.sgd(0.1), **options})


def test_a_stage_that_has_no_axes_is_an_error_and_not_a_no_op():
  rules = nxp.LogicalRules(batch=None, embed=None, mlp="tensor")
  text = r"(?s)zero=1 splits nothing: no mesh axis splits the batch.*Fix: zero_axes='data', or split the bat"
  with pytest.raises(nxp.errors.PlanError, match=text):
    nxp.plan(init, nxp.abstract_mesh(data=4, tensor=2), rules, optimizer=optax.adam(1e-2), zero=1)


class Twice(nnx.Module):  # Two kernels of one shape, the path of one ending as the other's, on different axes
  def __init__(self, rngs):
    names = {"out_sharding": (None, "tensor")}
    self.inner = nnx.Linear(16, 16, use_bias=False, rngs=rngs, kernel_metadata=names)
    self.kernel = nnx.Param(jnp.ones((16, 16)) / 16)

  def __call__(self, x):
    return self.inner(x) @ self.kernel[...]


def test_gradients_are_scattered_as_the_state_of_their_own_parameter():
  mesh = nxp.make_mesh(data=4, tensor=2)
  made = nxp.plan(lambda: Twice(nnx.Rngs(0)), mesh, nxp.replicate(), optimizer=optax.adam(1e-2), zero=2)
  assert made["optimizer/opt_state.0.mu.kernel"].spec == jax.P(None, "data")
  state = made["optimizer/opt_state.0.mu.inner.kernel"].spec
  step = nxp.train_step(lambda m, x: (m(x) ** 2).mean())
  text = step.lower(made, batch=nxp.shard_batch(data()[0], made)).as_text()
  found = set(re.findall(r"sharding_constraint .*<@mesh, (\[.*\])> : tensor<16x16xf32>", text))
  shown = {jax.P(None, "data"): '[{}, {"data"}]', jax.P("data", "tensor"): '[{"data"}, {"tensor"}]'}
  assert found >= {shown[jax.P(None, "data")], shown[state]}
