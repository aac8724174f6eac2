import dataclasses
import json
import os
import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from benchmarks.layouts import CASES
from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import chip
from nnx_parallel.report.compile_report import _need, compile_report
from nnx_parallel.report.program import compiler
from nnx_parallel.report.program.collectives import KINDS
from nnx_parallel.report.program.compiler import Compiled, MemoryStats, Shortage, run_compiler
from report import layouts


def report(optimizer=None, microbatches=1, zero=0, **axes):
  plan = layouts.plan(optimizer=optimizer, zero=zero, **axes)
  step = nxp.train_step(layouts.loss, microbatches=microbatches)
  return compile_report(step, plan, batch=layouts.batch(), topology="cpu:8")


@pytest.fixture(scope="module")
def fsdp():
  return report(fsdp=8, optimizer=optax.adam(1e-3))


def test_memory_by_category_is_the_plans(fsdp):
  assert fsdp.categories["parameters"] == layouts.PARAMS // 8
  # Adam's two moments, its count, and the step number of nnx.Optimizer.
  assert fsdp.categories["optimizer"] == 2 * layouts.PARAMS // 8 + 8
  assert fsdp.categories["inputs"] == layouts.BATCH * layouts.WIDTH * 4 // 8
  assert sum(fsdp.categories.values()) == fsdp.need_bytes
  assert fsdp.memory.arguments == sum(a.bytes for a in fsdp.arguments)


def test_collectives_name_the_parameter_and_the_line(fsdp):
  gathered = {p for c in fsdp.collectives if c.kind == "all-gather" for p in c.parameters}
  assert gathered == {"up.kernel", "down.kernel"}
  assert all(c.source or c.parameters for c in fsdp.collectives)
  line = layouts.MLP.__call__.__code__.co_firstlineno + 1
  assert any(c.source.endswith(f"layouts.py:{line}") for c in fsdp.collectives)


def test_flops_are_exact(fsdp):
  product = 2 * layouts.BATCH * layouts.WIDTH * layouts.HIDDEN
  # Two products forward, three backward: the gradient of the input is not needed.
  assert fsdp.cost.flops == 5 * product // 8


def test_text_json_and_verdict_agree(fsdp):
  text, body = str(fsdp), json.loads(fsdp.to_json())
  assert "FITS: needs" in text
  assert "all-gather" in text
  assert "up.kernel" in text
  assert body["fits"] is True
  assert body["need_bytes"] == fsdp.need_bytes
  assert body["quantities"]["params"] == layouts.PARAMS


def too_small(report, usable):
  """The report against a chip with so much memory."""
  tiny = dataclasses.replace(chip("h100"), name="tiny", usable_bytes=usable)
  return str(dataclasses.replace(report, chip=tiny, fits=False))


def test_a_device_too_small_says_what_would_help(fsdp):
  assert fsdp.examples == layouts.BATCH // 8
  fixed = fsdp.memory.arguments + fsdp.categories["parameters"]
  falls = fsdp.need_bytes - fixed
  text = too_small(fsdp, fixed + falls // 4)
  assert "DOES NOT FIT: needs" in text
  assert "Try 4 times as many microbatches, or a batch 4 times smaller" in text
  assert "Largest at the peak: 128 KiB of 2 x f32[128,128] from layouts.py:" in text
  # No batch is small enough for the state and the gradients.
  text = too_small(fsdp, fsdp.memory.arguments)
  assert "State and gradients are 64.01 KiB per device: try 8 times as many devices" in text
  # One example per device cannot be split further.
  assert "times as many devices" in too_small(dataclasses.replace(fsdp, examples=1), fixed + falls // 4)


def test_what_fills_the_memory_is_named_by_its_line():
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

  def f(x, w):
    scores = x @ x.T  # every pair of rows: far larger than anything else
    return jnp.sin(scores) @ (x @ w)

  x = jax.ShapeDtypeStruct((4096, 16), jnp.float32, sharding=NamedSharding(mesh, P("x")))
  w = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
  found = compile_report(jax.jit(f, out_shardings=NamedSharding(mesh, P("x"))).lower(x, w))
  largest = found.peak[0]
  assert largest.shape == "f32[512,4096]"
  assert largest.bytes == largest.count * 512 * 4096 * 4
  line = f.__code__.co_firstlineno
  assert largest.source.endswith((f"test_compile_report.py:{line + 1}", f"test_compile_report.py:{line + 2}"))
  assert "In memory at the peak, besides the arguments" in str(found)


# Analytic minima ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_layout_and_scheme_sends_the_analytic_minimum(case):
  found = case.report("cpu:8")
  for key, size in case.least.items():
    kind = next(kind for kind in KINDS if key.startswith(kind.replace("-", "_")))
    axis = key.removeprefix(kind.replace("-", "_")).removeprefix("_") or None
    assert found.sent(kind, axis=axis).bytes == size, key
  kinds = {kind for kind in KINDS if any(key.startswith(kind.replace("-", "_")) for key in case.least)}
  assert {c.kind for c in found.collectives} == kinds
  if isinstance(case.options, dict) and "zero" in case.options:
    assert found.categories["optimizer"] == 2 * layouts.PARAMS // 8 + 8


# Budgets --------------------------------------------------------------------------------------


def test_what_a_step_sends_by_kind_and_axis(fsdp):
  gathered = fsdp.sent("all-gather", axis="fsdp")
  assert (gathered.bytes, fsdp.quantities["params"]) == (layouts.PARAMS, layouts.PARAMS)
  assert gathered.per_device < gathered.bytes
  assert fsdp.sent("all-gather", axis="data") == (0, 0, 0, 0)
  assert gathered.exposed == gathered.per_device > 0  # CPU programs overlap nothing
  first, *others = fsdp.collectives
  hidden = dataclasses.replace(fsdp, collectives=(dataclasses.replace(first, overlapped=True), *others))
  assert hidden.sent().exposed == fsdp.sent().per_device - first.sent_bytes
  assert fsdp.sent().times == sum(c.times for c in fsdp.collectives)
  with pytest.raises(ReportError, match=r"no collective 'all-gathers'(.|\n)*known: all-gather, all-reduce"):
    fsdp.sent("all-gathers")
  with pytest.raises(ReportError, match=r"no mesh axis 'model'(.|\n)*known: data, fsdp, tensor"):
    fsdp.sent(axis="model")


# The right measure, warnings, and what cannot be compiled ---------------------------------------


def test_the_need_follows_the_backend():
  memory = MemoryStats(arguments=100, outputs=60, aliased=50, temporaries=30, peak=120)
  done = Compiled("text", "", memory, None, "", 0.0)
  assert _need(memory, done, "tpu", 40) == 120
  assert _need(memory, done, "gpu", 40) == 140
  assert _need(memory, done, "", 40) == 140
  # What TPU calls temporaries has the donated arguments in it, but not those that are only read.
  assert _need(memory, dataclasses.replace(done, shortage=Shortage(1000, total=False)), "tpu", 40) == 1040
  assert _need(memory, dataclasses.replace(done, shortage=Shortage(1000, total=True)), "tpu", 40) == 1000


def test_involuntary_resharding_is_mapped_to_its_line():
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

  def f(x, w):
    h = jax.lax.with_sharding_constraint(jnp.sin(x) @ w, NamedSharding(mesh, P("a", "b", None)))
    h = jax.lax.with_sharding_constraint(h * 2, NamedSharding(mesh, P(None, None, ("b", "a"))))
    return jnp.cos(h)

  x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32, sharding=NamedSharding(mesh, P("a")))
  w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
  lowered = jax.jit(f, out_shardings=NamedSharding(mesh, P("a", "b"))).lower(x, w)
  found = compile_report(lowered)
  assert found.reshards
  assert all("test_compile_report.py:" in r.source for r in found.reshards)
  assert found.reshards[0].bytes == 4 * 16 * 64 * 4
  assert "Involuntary full rematerialization" in str(found)


def test_a_users_own_jitted_step():
  @nnx.jit
  def step(model, batch):
    return layouts.loss(model, batch)

  plan = layouts.plan(fsdp=8)
  plan = plan.without_optimizer()
  found = compile_report(step, plan, batch=layouts.batch(), topology="cpu:8")
  assert found.cost.flops == 2 * 2 * layouts.BATCH * layouts.WIDTH * layouts.HIDDEN // 8


def test_what_a_compiler_says_is_kept_and_passed_on(capfd):
  class Talkative:
    def compile(self, compiler_options):
      os.write(2, b"a warning\n[SPMD] Involuntary full rematerialization: in the report\n")
      raise jax.errors.JaxRuntimeError("Used 20G of 16G hbm")

  done = run_compiler(Talkative())
  assert (done.shortage, "Involuntary" in done.log) == (Shortage(20 << 30, True), True)
  assert capfd.readouterr().err == "a warning\n"


def test_two_reports_at_a_time_leave_stderr_and_the_cache_as_they_were():
  before = os.readlink("/proc/self/fd/2"), jax.config.jax_enable_compilation_cache
  entered, order = threading.Event(), []

  def first():
    with compiler._standard_error(), compiler._no_cache():
      entered.set()
      time.sleep(0.3)  # in which the other tries to enter
      order.append("first")

  def second():
    entered.wait(10)
    with compiler._standard_error(), compiler._no_cache():
      order.append("second")

  threads = [threading.Thread(target=run) for run in (first, second)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert order == ["first", "second"]
  assert (os.readlink("/proc/self/fd/2"), jax.config.jax_enable_compilation_cache) == before
