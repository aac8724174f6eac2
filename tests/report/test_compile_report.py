import dataclasses
import json
import os
import signal
import subprocess
import sys
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
from nnx_parallel.report.program.compiler import Compiled, MemoryStats, Shortage, find_reshards, run_compiler
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


def test_arguments_have_the_names_of_the_plan_and_are_donated(fsdp):
  names = {a.name for a in fsdp.arguments}
  assert {"up.kernel", "down.kernel", "optimizer/opt_state.0.mu.up.kernel"} <= names
  assert [a.name for a in fsdp.kept] == ["batch"]


def test_collectives_name_the_parameter_and_the_line(fsdp):
  gathered = {p for c in fsdp.collectives if c.kind == "all-gather" for p in c.parameters}
  assert gathered == {"up.kernel", "down.kernel"}
  assert all(c.source or c.parameters for c in fsdp.collectives)
  line = layouts.MLP.__call__.__code__.co_firstlineno + 1
  assert any(c.source.endswith(f"layouts.py:{line}") for c in fsdp.collectives)


def test_what_this_package_adds_has_its_own_line():
  found = report(fsdp=8, microbatches=2)
  places = {t.source.rpartition(":")[0] for t in found.peak}
  assert any(place.endswith("benchmarks/layouts.py") for place in places)
  assert any(place.endswith("nnx_parallel/train/gradients.py") for place in places)


def test_another_choice_of_remat_keeps_the_users_lines():
  step = nxp.train_step(nxp.with_layers(layouts.loss, remat="none"))
  found = compile_report(step, layouts.plan(fsdp=8), batch=layouts.batch(), topology="cpu:8")
  assert {t.source.rpartition("/")[2].partition(":")[0] for t in found.peak if t.source} == {"layouts.py"}


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


def test_a_batch_that_is_whole_on_each_device_is_pointed_out(fsdp):
  shape = f"f32[{layouts.BATCH},128]"
  largest = dataclasses.replace(fsdp.peak[0], shape=shape, source="model.py:7", parameters=())
  whole = dataclasses.replace(fsdp, peak=(largest, *fsdp.peak))
  text = too_small(whole, fsdp.memory.arguments)
  assert f"{shape} from model.py:7. If its first dim is the batch, all 1024 examples" in text
  assert (
    "though 8 devices share them: constrain it, or the array that it is computed from, with nxp.constrain(x"
    in text
  )
  assert "If its first dim" not in too_small(fsdp, fsdp.memory.arguments)


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


def test_the_chip_compared_with_does_not_change_the_need(fsdp):
  step = nxp.train_step(layouts.loss)
  other = compile_report(step, layouts.plan(fsdp=8), batch=layouts.batch(), topology="cpu:8", chip="v5e")
  here = report(fsdp=8)
  assert other.need_bytes == here.need_bytes > here.memory.arguments
  assert other.chip.name == "v5e"


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


def test_warnings_of_trial_runs_are_left_out():
  line = (
    "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {a} to {b} efficiently"
    " for HLO operation %gather = f32[8,16]{1,0} gather(%fake_parameter.0), sharding={a}\n"
  )
  assert find_reshards(line, {}) == ()
  named = line.replace("fake_parameter.0)", 'p.0), metadata={op_name="jit(g)/gather" stack_frame_id=2}')
  (found,) = find_reshards(named + named, {2: "model.py:7"})
  assert (found.op, found.source, found.bytes, found.before) == ("jit(g)/gather", "model.py:7", 512, "{a}")


def test_an_abstract_plan_needs_a_topology():
  with pytest.raises(ReportError, match="names no devices to compile for"):
    compile_report(nxp.train_step(layouts.loss), layouts.plan(fsdp=8), batch=layouts.batch())


@pytest.mark.parametrize(("topology", "slices"), [("cpu:8", 1), ("cpu:4*2", 2), ("cpu:2*4", 4)])
def test_what_is_sent_between_slices(topology, slices):
  """FSDP inside of a slice: only each device's own part of the gradients crosses."""
  mesh = nxp.abstract_mesh(replica=slices, fsdp=8 // slices)
  rules = nxp.presets.fsdp(replica="replica", min_size=0)
  plan = nxp.plan(layouts.init, mesh, rules, optimizer=optax.sgd(0.1))
  report = compile_report(nxp.train_step(layouts.loss), plan, batch=layouts.batch(), topology=topology)
  across = [c for c in report.collectives if c.slices > 1]
  assert report.slices == slices
  assert {c.slices for c in across} <= {slices}
  own = sum(x.bytes_per_device for x in plan.leaves if x.is_parameter)
  gradients = [c.sent_bytes for c in across if c.axes == ("replica",)]
  assert sum(gradients) == (2 * own * (slices - 1) // slices if slices > 1 else 0)
  assert ("between the" in str(report)) == (slices > 1)


def test_a_plan_on_devices_that_are_here():
  plan = layouts.plan(mesh=nxp.make_mesh(data=1, fsdp=8, tensor=1))
  found = compile_report(nxp.train_step(layouts.loss), plan, batch=layouts.batch())
  assert found.target == "8 x cpu"


def test_functions_and_compiled_programs_without_a_plan():
  mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
  x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
  for step in (jax.jit(jnp.sum), jax.jit(jnp.sum).lower(x).compile()):
    found = compile_report(step, None, x) if not hasattr(step, "memory_analysis") else compile_report(step)
    assert found.bytes_by("kind", "axes") == {("all-reduce", "x"): 4}
  with pytest.raises(
    ReportError, match=r"arguments are on no mesh(.|\n)*Fix: lower it with arguments on one"
  ):
    compile_report(jax.jit(jnp.sum), None, jax.ShapeDtypeStruct((8,), jnp.float32))


def test_a_users_own_jitted_step():
  @nnx.jit
  def step(model, batch):
    return layouts.loss(model, batch)

  plan = layouts.plan(fsdp=8)
  plan = plan.without_optimizer()
  found = compile_report(step, plan, batch=layouts.batch(), topology="cpu:8")
  assert found.cost.flops == 2 * 2 * layouts.BATCH * layouts.WIDTH * layouts.HIDDEN // 8


ABORT = """
import os
from nnx_parallel.report.program.compiler import run_compiler

class Faulty:
  def compile(self, compiler_options):
    os.write(2, b"Check failed: the reason\\n")
    os.abort()

run_compiler(Faulty())
"""


@pytest.mark.slow
def test_a_compiler_that_ends_the_process_is_heard(tmp_path):
  environment = {**os.environ, "TMPDIR": str(tmp_path)}
  done = subprocess.run(
    [sys.executable, "-c", ABORT], capture_output=True, text=True, check=False, env=environment
  )
  assert done.returncode == -signal.SIGABRT
  assert "Check failed: the reason" in done.stderr
  assert not list(tmp_path.glob("*.log"))


def test_what_a_compiler_says_is_kept_and_passed_on(capfd):
  class Talkative:
    def compile(self, compiler_options):
      os.write(2, b"a warning\n[SPMD] Involuntary full rematerialization: in the report\n")
      raise jax.errors.JaxRuntimeError("Used 20G of 16G hbm")

  done = run_compiler(Talkative())
  assert (done.shortage, "Involuntary" in done.log) == (Shortage(20 << 30, True), True)
  assert capfd.readouterr().err == "a warning\n"


def test_a_device_that_is_here_says_how_much_memory_a_program_may_use(monkeypatch):
  mesh = nxp.make_mesh(data=8)
  x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
  lowered = jax.jit(lambda x: 2 * x).lower(x)
  kind = type(jax.devices()[0])
  monkeypatch.setattr(kind, "memory_stats", lambda device: {"bytes_limit": 12345})
  assert compile_report(lowered).available_bytes == 12345
  assert compile_report(lowered, chip="v5e").available_bytes == chip("v5e").usable_bytes
  monkeypatch.undo()
  assert compile_report(lowered).available_bytes == chip("cpu").usable_bytes


def test_a_report_is_whole_where_the_program_is_in_the_compilation_cache():
  assert jax.config.jax_compilation_cache_dir  # the suite's own
  placed = NamedSharding(nxp.make_mesh(x=8), P("x"))
  lowered = jax.jit(lambda x: jnp.sin(x) @ x).lower(
    jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=placed)
  )
  lowered.compile()
  assert compile_report(lowered).peak
  assert compile_report(lowered).peak
  assert jax.config.jax_enable_compilation_cache


def test_a_batch_that_cannot_be_split_is_refused():
  step, plan = nxp.train_step(layouts.loss), layouts.plan(fsdp=8)
  with pytest.raises(
    ReportError, match=r"has 12 examples, which 8 shards cannot split evenly: this layout cannot run"
  ):
    compile_report(step, plan, batch=jax.ShapeDtypeStruct((12, 16), "float32"), topology="cpu:8")
  with pytest.raises(ReportError, match=r"the batch has no array: \(16, 8\)"):
    compile_report(step, plan, batch=(16, 8), topology="cpu:8")


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
