"""The dimensions that a search adds to the mesh: split sequences, experts, state in the host's memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from nnx_parallel.report.chips import chip
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.memory import memory_categories, memory_plan
from nnx_parallel.report.estimate.roofline import LATENCY, step_time
from nnx_parallel.report.estimate.workload import trace_workload, with_offload, with_zero
from nnx_parallel.report.search.search import SearchInputs, compile_candidate, search
from nnx_parallel.report.topology import read_machine
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


def find(kind, topology="cpu:8", **options):
  return search(
    lambda: kind(nnx.Rngs(0)), loss, topology, batch=BATCH, rules=RULES, optimizer=ADAM,
    **{"remat": ["as written"], "zero": [0], "offload": [False], "max_microbatches": 1, **options},
  )  # fmt: skip


def task(kind, topology="cpu:8"):
  return SearchInputs(lambda: kind(nnx.Rngs(0)), loss, RULES, ADAM, BATCH, read_machine(topology))


def run_code(result, kind):
  """Executes what the search prints, and one step with it."""
  scope = {
    "nxp": nxp, "init": lambda: kind(nnx.Rngs(0)), "loss": loss, "rules": RULES, "optimizer": ADAM
  }  # fmt: skip
  exec(result.code(), scope)
  batch = nxp.shard_batch(np.ones(BATCH.shape, np.float32), scope["plan"])
  step = scope["step"]
  assert float(step(scope["model"], scope["state"], batch)["loss"]) > 0
  return scope


def choose(result, **wanted):
  """The result with its best candidate of a kind as the winner."""
  keep = [c for c in result.fitting if all(getattr(c, name) == value for name, value in wanted.items())]
  return dataclasses.replace(result, best=keep[0])


# Sequences ------------------------------------------------------------------------------------


def test_sequences_are_split_where_the_model_names_them():
  result = find(Tokens)
  plain = {tuple(c.sizes.values()): c for c in result.fitting if not c.changes}
  split = {tuple(c.sizes.values()): c for c in result.fitting if c.changes}
  assert {tuple(c.changes.items()) for c in split.values()} == {(("sequence", ("tensor",)),)}
  assert set(split) == {sizes for sizes in plain if sizes[2] > 1}
  for sizes, candidate in split.items():
    # The same bytes travel; what is kept between layers is divided.
    assert candidate.time.waiting == pytest.approx(plain[sizes].time.waiting)
    assert candidate.memory_bytes < plain[sizes].memory_bytes
  assert "sequence=tensor" in str(result)


def test_split_sequences_need_less_memory_when_compiled_too():
  result = find(Tokens)
  pair = [c for c in result.fitting if tuple(c.sizes.values()) == (1, 2, 4)]
  assert [bool(c.changes) for c in pair] == [True, False]
  split, plain = (compile_candidate(task(Tokens), c, "cpu:8") for c in pair)
  assert split.report.memory.temporaries < plain.report.memory.temporaries
  assert split.report.cost.flops == plain.report.cost.flops == split.time.flops


def test_the_code_of_split_sequences_runs():
  scope = run_code(choose(find(Tokens), changes={"sequence": ("tensor",)}), Tokens)
  assert scope["rules"].logical["sequence"] == (("tensor",),)


def test_a_model_that_names_no_sequence_is_not_searched_for_one():
  rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", sequence=None)
  result = search(
    layouts.init, layouts.loss, "cpu:8", batch=layouts.batch(), rules=rules, optimizer=ADAM, zero=[0]
  )
  assert not any(c.changes for c in result.fitting)


# Experts --------------------------------------------------------------------------------------


class Dense(nnx.Module):
  """One layer that the table of names knows, and one that it does not."""

  def __init__(self):
    self.q_proj = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
    self.odd = nnx.Linear(512, 512, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.odd(self.q_proj(x))


def search_dense(topology, rules):
  batch, squares = jax.ShapeDtypeStruct((8, 512), jnp.float32), lambda model, x: (model(x) ** 2).mean()
  return search(Dense, squares, topology, batch=batch, rules=rules, optimizer=optax.adam(0.1), zero=0)


def test_an_axis_that_splits_nothing_is_left_out_and_the_notes_of_the_plan_are_shown():
  result = search_dense("cpu:8", [nxp.presets.gpt(), nxp.presets.fsdp_tensor(min_size=16)])
  text = str(result)
  assert "The axis 'expert' splits nothing of this model.\n" in text
  assert "expert=" not in text
  assert "without tensor parallelism, since no path rule names them: odd.kernel" in text


def test_the_code_leaves_out_axes_of_size_one_that_the_rules_do_not_demand():
  rules = [nxp.LogicalRules(batch=[("data", "fsdp"), "fsdp", "data"]), nxp.fsdp(min_size=16)]
  result = search_dense("cpu:2", rules)
  assert result.best.sizes == {"data": 1, "fsdp": 2}
  assert result.code().startswith("mesh = nxp.make_mesh(fsdp=2)\n")
  assert nxp.plan(Dense, nxp.abstract_mesh(fsdp=2), rules).batch_axes == ("fsdp",)


def test_an_expert_axis_is_added_where_parameters_have_the_name():
  result = find(Experts)
  changed = [c for c in result.fitting if c.changes]
  assert {tuple(c.changes.items()) for c in changed} == {
    (("expert", ("expert",)), ("batch", ("data", "fsdp", "expert")))
  }
  assert all(c.sizes["expert"] > 1 for c in changed)
  only = next(c for c in changed if c.sizes["expert"] == 8)
  # Two exchanges of the tokens, forward and back; experts are neither gathered nor summed.
  tokens = EXAMPLES * LENGTH * WIDTH * 4 / 8
  cpu = chip("cpu")
  assert only.time.waiting["expert"] == pytest.approx(
    4 * (tokens * 7 / 8 / (cpu.link_bandwidth * cpu.links) + 3 * LATENCY)
  )
  summed = 2 * WIDTH * WIDTH * 4 * 7 / 8 / cpu.link_bandwidth + 3 * LATENCY
  assert only.time.overlapped["expert"] == pytest.approx(summed)


def test_the_code_with_an_expert_axis_runs():
  changes = {"expert": ("expert",), "batch": ("data", "fsdp", "expert")}
  scope = run_code(
    choose(find(Experts), changes=changes, sizes={"data": 1, "fsdp": 1, "expert": 8, "tensor": 1}), Experts
  )
  assert scope["plan"]["up"].spec == P("expert", "fsdp", "tensor")


def test_tokens_are_exchanged_when_compiled():
  changes = {"expert": ("expert",), "batch": ("data", "fsdp", "expert")}
  result = choose(find(Experts), changes=changes, sizes={"data": 1, "fsdp": 1, "expert": 8, "tensor": 1})
  found = compile_candidate(task(Experts), result.best, "cpu:8")
  kinds = found.report.bytes_by("kind", "axes")
  assert kinds[("all-to-all", "expert")] >= 4 * EXAMPLES * LENGTH * WIDTH * 4 / 8
  assert found.compiled.waiting.keys() <= {"expert"} or found.compiled.overlapped


# Offload --------------------------------------------------------------------------------------


def test_offload_takes_the_state_off_the_device_and_pays_at_the_link():
  axes = {"data": 2, "fsdp": 4, "tensor": 1}
  work = trace_workload(layouts.plan(fsdp=2, optimizer=ADAM), layouts.loss, layouts.batch())
  away = with_offload(work)
  whole, less = (memory_categories(w, axes) for w in (work, away))
  state = 2 * layouts.PARAMS / 4
  assert whole["optimizer"] - less["optimizer"] == state
  assert less["optimizer"] == 8  # counters
  h100 = chip("h100")
  near, far = (step_time(w, axes, h100) for w in (work, away))
  assert far.waiting["host"] == 2 * state / h100.host_bandwidth
  assert far.seconds == pytest.approx(near.seconds + far.waiting["host"])


def test_a_stage_leaves_less_to_fetch():
  axes = {"data": 8, "fsdp": 1, "tensor": 1}
  work = trace_workload(layouts.plan(fsdp=2, optimizer=ADAM), layouts.loss, layouts.batch())
  one, all_of_it = (step_time(with_offload(with_zero(work, axes, z)), axes, chip("v5e")) for z in (1, 0))
  assert all_of_it.waiting["host"] == 8 * one.waiting["host"]


def test_an_optimizer_without_state_has_nothing_to_offload():
  work = trace_workload(layouts.plan(fsdp=2), layouts.loss, layouts.batch())
  assert with_offload(work) is work


def test_search_offers_offload_for_memory_only():
  result = find(Tokens, offload=[False, True])
  away = [c for c in result.fitting if c.offload]
  near = {(*c.sizes.values(), *c.changes): c for c in result.fitting if not c.offload}
  assert len(away) == len(near)
  for candidate in away:
    other = near[(*candidate.sizes.values(), *candidate.changes)]
    assert candidate.memory_bytes < other.memory_bytes
    assert candidate.time.seconds > other.time.seconds
  assert 'optimizer_memory="pinned_host"' in choose(result, offload=True).code()
  assert "offload" in str(result)


def test_the_code_with_offload_runs():
  scope = run_code(choose(find(Tokens, offload=[False, True]), offload=True), Tokens)
  found = memory_plan(scope["plan"], loss, BATCH)
  assert found.categories["optimizer"] == 8
  assert found.host_bytes == sum(x.bytes_per_device for x in scope["plan"].leaves if x.on_host)


# Compilers ------------------------------------------------------------------------------------


def test_the_search_says_which_compilers_were_not_there():
  result = find(Tokens, "tpu:v5e:4x4", compile_best=1)
  assert "16 are needed, and this process has 8" in result.notes[0]
  text = " ".join(result.notes)
  assert "nnx-parallel[tpu-aot]" in text or "was compiled for tpu:v5e:4x4" in text
  assert result.notes[0] in str(result)


def test_what_is_compiled_is_ordered_by_it():
  result = find(Tokens, compile_best=2)
  times = [c.compiled.seconds for c in result.fitting[:2]]
  assert times == sorted(times)
  assert result.best is result.fitting[0]
  assert "compiler needs" in str(result)


def test_scattered_gradients_are_planned_split():
  axes = {"data": 8, "fsdp": 1, "tensor": 1}
  layout = layouts.plan(optimizer=ADAM, zero=2, **axes)
  whole, split = (
    memory_plan(layout, layouts.loss, layouts.batch(), microbatches=4, gradients=g)
    for g in ("whole", "scattered")
  )
  assert whole.categories["accumulators"] == layouts.PARAMS
  assert split.categories["accumulators"] == layouts.PARAMS // 8
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
  assert found.categories["masters"] == 64 * 64 * 4 // 8
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
