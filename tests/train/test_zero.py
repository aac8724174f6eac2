"""ZeRO: optimizer state split over the data axes, with the planned bytes, and the same numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import assert_same_training, run_training, with_gradient_norms
from train import models
from train.models import MESHES, RULES, Net, data
from training import placed, run_steps


def init():
  return Net(nnx.Rngs(0), out=6)  # nothing divides the second bias


def loss_fn(model, x):
  return ((model(x) - x[:, :6]) ** 2).mean()


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


def test_bytes_of_a_stage():
  whole, split = plan_on("dp"), plan_on("dp", zero=1)
  assert whole.bytes_per_device("model") == split.bytes_per_device("model")
  kernels = 4 * (16 * 32 + 32 + 32 * 6)
  left = 2 * kernels // 8 + 2 * 4 * 6 + 8  # both moments; the odd bias; two counters
  assert split.bytes_per_device("optimizer") == left
  model, optimizer = placed(split)
  nxp.train_step(loss_fn)(model, optimizer, nxp.shard_batch(data()[0], split))
  nxp.check_layout(model, split, optimizer=optimizer)


@pytest.mark.parametrize("gradients", ["like_parameters", "scattered"])
def test_stages_train_like_one_device(gradients):
  tx = with_gradient_norms(optax.adam(1e-2))
  plans = {name: plan_on(name, tx, zero=2) for name in MESHES}
  assert_same_training(loss_fn, plans, data(), gradients=gradients)


SCATTERED = "gradients are scattered into the layout of the optimizer state"


def reduction(plan, live=None, microbatches=2, **options):
  model, optimizer = live or placed(plan)
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
  assert (
    reduction(one)
    == reduction(two, gradients="like_parameters")
    == "once, after the scan, over data, in float32"
  )
  assert program(two) == program(two, gradients="scattered") != program(one)
  assert (
    program(one) == program(one, gradients="like_parameters") == program(two, gradients="like_parameters")
  )


@pytest.mark.slow
def test_the_stage_outlives_json_and_checkpoints(tmp_path):
  plan = plan_on("dp", zero=2)
  stored = nxp.Plan.from_json(plan.to_json(), mesh=plan.mesh, init=init, optimizer=plan.tx)
  assert (stored.zero, reduction(stored)) == (2, reduction(plan))
  assert nxp.Plan.from_json(plan_on("dp").to_json()).zero == 0
  with nxp.Checkpointer(tmp_path / "ckpt") as checkpointer:
    checkpointer.save(1, *placed(plan))
    assert reduction(plan, checkpointer.restore(plan)).endswith(SCATTERED)


@pytest.mark.nightly
def test_several_models_each_follow_their_plan():
  plans = {"a": plan_on("dp", zero=2), "b": plan_on("dp")}
  live = {name: placed(plan) for name, plan in plans.items()}
  models, optimizers = ({name: pair[i] for name, pair in live.items()} for i in (0, 1))

  def both(models, x):
    return loss_fn(models["a"], x) + loss_fn(models["b"], x)

  step = nxp.train_step(both, microbatches=2)
  batch = nxp.shard_batch(data()[0], plans["a"])
  text = step.lower(models, optimizers, batch).compile().as_text()
  carried = max(re.findall(r"= \((.*?)\) while\(", text), key=len)
  # Both parameters, and one gradient in each layout.
  assert (carried.count("f32[16,32]"), carried.count("f32[16,4]")) == (3, 1)


@pytest.mark.nightly
@pytest.mark.slow
def test_state_in_host_memory_gives_gradients_its_split_and_not_its_place():
  plan = plan_on("dp", zero=2, optimizer_memory="pinned_host")
  near = plan_on("dp", zero=2)
  assert reduction(plan).endswith(SCATTERED)
  for microbatches in (1, 2):
    runs = [run_training(p, loss_fn, data(), microbatches=microbatches) for p in (near, plan)]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, rtol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_scattered_without_a_stage_is_refused(microbatches):
  plan = plan_on("dp")
  message = (
    r"scatters nothing: no optimizer state is split more than its parameter\.\n  the plan of the optimizer"
    r" has zero=0\n  Fix: nxp\.plan\(\.\.\., zero=2\)"
  )
  with pytest.raises(nxp.errors.TrainError, match=message):
    reduction(plan, microbatches=microbatches, gradients="scattered")
  step = nxp.train_step(loss_fn, microbatches=microbatches, gradients="scattered")
  with pytest.raises(nxp.errors.TrainError, match="scatters nothing"):
    step.lower(plan, batch=nxp.shard_batch(data()[0], plan))


def test_a_stage_that_splits_nothing_leaves_the_step_as_it_is():
  mesh = nxp.make_mesh({"data": 1, "fsdp": 1, "tensor": 1}, devices=jax.devices()[:1])
  plan = nxp.plan(init, mesh, RULES, optimizer=optax.adam(1e-2), zero=2)
  assert reduction(plan) == reduction(plan, gradients="scattered") == "in each microbatch: one device"


def test_a_reduction_beside_scattered_gradients_is_refused():
  with pytest.raises(
    nxp.errors.TrainError, match=f'{SCATTERED}(.|\n)*Fix: gradients="like_parameters"; or leave reduction'
  ):
    reduction(plan_on("dp", zero=2), reduction=np.float16)


@pytest.mark.parametrize("gradients", ["like_parameters", "scattered"])
def test_accumulated_gradients_take_the_planned_bytes(gradients):
  plan = plan_on("dp", zero=2)
  step = nxp.train_step(loss_fn, microbatches=2, gradients=gradients)
  text = step.lower(plan, batch=nxp.shard_batch(data()[0], plan)).compile().as_text()
  carried = max(re.findall(r"= \((.*?)\) while\(", text), key=len)
  whole, split = plan["up.kernel"].local_shape, plan["optimizer/opt_state.0.mu.up.kernel"].local_shape
  assert whole == (16, 32)
  assert np.prod(split) == 16 * 32 / 8
  counts = [carried.count(f"f32[{','.join(map(str, shape))}]") for shape in (whole, split)]
  # The loop carries the parameter, and its gradient in one of the two layouts.
  assert counts == ([2, 0] if gradients == "like_parameters" else [1, 1])


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


def test_hybrid_splits_inside_a_slice_only():
  mesh = nxp.make_mesh(replica=2, data=4)
  rules = nxp.LogicalRules(batch=("replica", "data"), embed=None, mlp=None)
  plan = nxp.plan(init, mesh, rules, optimizer=optax.adam(1e-2), zero=1, zero_axes="data")
  assert plan["optimizer/opt_state.0.mu.up.kernel"].spec == jax.P(None, "data")


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"zero": 3}, "zero=3 splits the parameters too"),
    ({"zero": 4}, "zero=4 is not a stage"),
    ({"zero_axes": "data"}, "zero_axes needs a stage"),
    ({"zero": 1, "zero_axes": "dta"}, "zero_axes names 'dta', which is not in the mesh"),
    ({"zero": 1, "zero_axes": ("data",) * 2}, r"zero_axes=\('data', 'data'\) names an axis twice"),
    ({"zero": 1, "zero_axes": ()}, "zero=1 splits nothing: zero_axes names no axis"),
    ({"zero": 1, "optimizer": None}, "zero=1 splits optimizer state, but there is no optimizer"),
  ],
)
def test_what_is_refused(options, message):
  with pytest.raises(nxp.errors.PlanError, match=message):
    nxp.plan(init, nxp.make_mesh(data=8, fsdp=1, tensor=1), RULES, **{"optimizer": optax.sgd(0.1), **options})


def test_an_unknown_layout_of_gradients():
  with pytest.raises(nxp.errors.TrainError, match="gradients='sliced' is not a layout"):
    nxp.train_step(loss_fn, gradients="sliced")


def line_search(*, explicit, states=None):
  """The losses of steps that search along a line, on a model that may state a sharding."""
  rules = nxp.LogicalRules(batch="data")
  mesh = nxp.make_mesh(data=8, explicit=explicit)

  def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))

  plan = nxp.plan(linear, mesh, rules, optimizer=optax.lbfgs(), zero=1)
  loss = lambda model, x: (model(x if states is None else jax.reshard(x, states)) ** 2).mean()
  return run_steps(plan, loss, [np.arange(64, dtype=np.float32).reshape(8, 8) / 64] * 2).losses


@pytest.mark.nightly
@pytest.mark.slow
def test_a_line_search_on_explicit_axes():
  np.testing.assert_allclose(line_search(explicit=True), line_search(explicit=False), rtol=1e-6)


@pytest.mark.slow
def test_a_line_search_of_a_model_that_states_shardings_is_refused():
  with pytest.raises(
    nxp.errors.TrainError, match=r"does not work with ZeRO on Explicit axes(.|\n)*Fix: .*zero=0"
  ):
    line_search(explicit=True, states=jax.P("data"))


def test_a_stage_that_has_no_axes_is_an_error_and_not_a_no_op():
  rules = nxp.LogicalRules(batch=None, embed=None, mlp="tensor")
  with pytest.raises(nxp.errors.PlanError) as caught:
    nxp.plan(init, nxp.abstract_mesh(data=4, tensor=2), rules, optimizer=optax.adam(1e-2), zero=1)
  assert str(caught.value) == (
    "zero=1 splits nothing: no mesh axis splits the batch.\n"
    "  mesh {'data': 4, 'tensor': 2}\n"
    "  Fix: zero_axes='data', or split the batch: LogicalRules(batch='data')."
  )


class Twice(nnx.Module):
  """Two kernels of one shape, the path of one ending as the other's, on different axes."""

  def __init__(self, rngs):
    self.inner = nnx.Linear(
      16, 16, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": (None, "tensor")}
    )
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
