"""Estimates of split sequences, experts, state in the host's memory, scattered gradients and logits."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.report.chips import chip
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.memory import memory_plan
from nnx_parallel.report.estimate.roofline import LATENCY
from report import layouts

WIDTH, HIDDEN, LENGTH, EXAMPLES, EXPERTS = 64, 128, 32, 64, 8
ADAM = optax.adam(1e-3)


def parameter(rngs, shape, names):
  return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), out_sharding=names)


class Tokens(nnx.Module):
  """Scanned MLP layers over sequences; between layers the activations are laid out by name."""

  def __init__(self, rngs):
    self.up = parameter(rngs, (4, WIDTH, HIDDEN), ("layers", "embed", "mlp"))
    self.down = parameter(rngs, (4, HIDDEN, WIDTH), ("layers", "mlp", "embed"))

  def __call__(self, x):
    @jax.checkpoint
    def layer(x, weights):
      up, down = weights
      x = nxp.constrain(x, "batch", "sequence", None)
      return x + jax.nn.gelu(x @ up) @ down, None

    x, _ = jax.lax.scan(layer, x, (self.up[...], self.down[...]))
    return nxp.constrain(x, "batch", "sequence", None)


class Experts(nnx.Module):
  """One layer of experts: each token goes to the expert that its position names."""

  def __init__(self, rngs):
    self.mix = parameter(rngs, (WIDTH, WIDTH), ("embed", None))
    self.up = parameter(rngs, (EXPERTS, WIDTH, HIDDEN), ("expert", "embed", "mlp"))
    self.down = parameter(rngs, (EXPERTS, HIDDEN, WIDTH), ("expert", "mlp", "embed"))

  def __call__(self, x):
    x = x @ self.mix[...]
    parts = x.reshape(x.shape[0], EXPERTS, -1, WIDTH)
    parts = nxp.constrain(parts, None, "expert", None, None)
    y = jnp.einsum("becd,edf->becf", parts, self.up[...])
    y = jnp.einsum("becf,efd->becd", jax.nn.gelu(y), self.down[...])
    return nxp.constrain(y.reshape(x.shape), "batch", None, None)


RULES = nxp.LogicalRules(
  batch=("data", "fsdp"), embed="fsdp", mlp="tensor", layers=None, sequence=None, expert=None
)
BATCH = jax.ShapeDtypeStruct((EXAMPLES, LENGTH, WIDTH), jnp.float32)


def loss(model, batch):
  return jnp.mean(jnp.square(model(batch)))


def plan_of(kind, rules=RULES, **axes):
  return nxp.plan(lambda: kind(nnx.Rngs(0)), nxp.make_mesh(axes), rules, optimizer=ADAM)


@pytest.mark.slow
@pytest.mark.skipif(getattr(jax.config, "jax_remat3", False), reason="XLA merges other operations")
def test_split_sequences_send_as_much_and_need_less_memory():
  axes = {"data": 1, "fsdp": 2, "tensor": 4}
  plans = [plan_of(Tokens, rules, **axes) for rules in (RULES, RULES.replace(sequence="tensor"))]
  plain, split = (nxp.report.predict_time(made, loss, BATCH, chip="cpu") for made in plans)
  assert split.waiting == pytest.approx(plain.waiting)
  planned = [memory_plan(made, loss, BATCH).need_bytes for made in plans]
  assert planned[1] < planned[0]
  plain, split = (compile_report(nxp.train_step(loss), made, batch=BATCH) for made in plans)
  assert split.memory.temporaries < plain.memory.temporaries
  assert split.cost.flops == plain.cost.flops


def test_tokens_are_exchanged_between_experts():
  rules = RULES.replace(expert="expert", batch=("data", "fsdp", "expert"))
  made = plan_of(Experts, rules, data=1, fsdp=1, expert=8, tensor=1)
  time, cpu = nxp.report.predict_time(made, loss, BATCH, chip="cpu"), chip("cpu")
  # Two exchanges of the tokens, forward and back; experts are neither gathered nor summed.
  tokens = EXAMPLES * LENGTH * WIDTH * 4 / 8
  seconds = 4 * (tokens * 7 / 8 / (cpu.link_bandwidth * cpu.links) + 3 * LATENCY)
  assert time.waiting["expert"] == pytest.approx(seconds)
  summed = 2 * WIDTH * WIDTH * 4 * 7 / 8 / cpu.link_bandwidth + 3 * LATENCY
  assert time.overlapped["expert"] == pytest.approx(summed)
  report = compile_report(nxp.train_step(loss), made, batch=BATCH)
  assert report.bytes_by("kind", "axes")[("all-to-all", "expert")] >= 4 * tokens


@pytest.mark.parametrize("zero", [0, 1])
def test_offload_takes_the_state_off_the_device_and_pays_at_the_link(zero):
  axes = {"data": 4, "fsdp": 2, "tensor": 1}
  rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")
  near, away = (
    nxp.plan(layouts.init, nxp.abstract_mesh(axes), rules, optimizer=ADAM, zero=zero, optimizer_memory=place)
    for place in (None, "pinned_host")
  )
  state = 2 * layouts.PARAMS // (8 if zero else 2)
  whole, less = (memory_plan(made, layouts.loss, layouts.batch()) for made in (near, away))
  assert whole.categories["optimizer"] - less.categories["optimizer"] == state == less.host_bytes
  h100 = chip("h100")
  fast, slow = (
    nxp.report.predict_time(made, layouts.loss, layouts.batch(), chip=h100) for made in (near, away)
  )
  assert slow.waiting["host"] == 2 * state / h100.host_bandwidth
  assert slow.seconds == pytest.approx(fast.seconds + slow.waiting["host"])


def test_scattered_gradients_are_planned_split():
  axes = {"data": 8, "fsdp": 1, "tensor": 1}
  layout = layouts.plan(optimizer=ADAM, zero=2, **axes)
  whole, split = (
    memory_plan(layout, layouts.loss, layouts.batch(), microbatches=4, gradients=g)
    for g in ("whole", "scattered")
  )
  assert whole.categories["summed gradients"] == layouts.PARAMS
  assert split.categories["summed gradients"] == layouts.PARAMS // 8
  assert memory_plan(layout, layouts.loss, layouts.batch(), microbatches=4) == split
  unsplit = layouts.plan(optimizer=ADAM, **axes)
  with pytest.raises(nxp.errors.TrainError, match="the plan of the optimizer has zero=0"):
    memory_plan(unsplit, layouts.loss, layouts.batch(), gradients="scattered")
  step = nxp.train_step(layouts.loss, microbatches=4)
  compiled = compile_report(step, layout, batch=layouts.batch(), topology="cpu:8")
  assert compiled.need_bytes < whole.need_bytes


def test_masters_are_a_category_of_their_own():
  init = lambda: nnx.Linear(64, 64, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  layout = nxp.plan(init, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=nxp.with_masters(ADAM))
  found = memory_plan(layout, lambda m, x: jnp.mean(m(x)), jax.ShapeDtypeStruct((8, 64), jnp.bfloat16))
  assert found.categories["master weights"] == 64 * 64 * 4 // 8
  assert found.categories["optimizer"] == 2 * 64 * 64 * 4 // 8 + 8


def test_logits_are_named_where_they_are_the_largest():
  init = lambda: nnx.Linear(64, 4096, use_bias=False, rngs=nnx.Rngs(0))
  layout = nxp.plan(init, nxp.abstract_mesh(data=8), nxp.replicate())

  def classify(model, x):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), jnp.zeros(x.shape[0], jnp.int32)).mean()

  found = memory_plan(layout, classify, jax.ShapeDtypeStruct((1024, 64), jnp.float32))
  assert found.categories["logits"] == 1024 * 4096 * 4 // 8
  tall = memory_plan(layout, classify, jax.ShapeDtypeStruct((1024, 64), jnp.float32), microbatches=4)
  assert tall.categories["logits"] == found.categories["logits"] // 4
