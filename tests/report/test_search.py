"""The search for a layout: the meshes it tries, what it drops and compiles, and how it ranks."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx_parallel as nxp
from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import chip
from nnx_parallel.report.memory import memory_plan
from nnx_parallel.report.search import factorisations, meshes, search, work_of
from nnx_parallel.report.topology import read_machine
from report.stack import BATCH, RULES, WIDTH, init, loss


def test_every_factorisation_is_tried_once():
  found = [tuple(s.values()) for s in factorisations(12, ("a", "b", "c"))]
  assert len(found) == len(set(found)) == 18
  assert all(math.prod(s) == 12 for s in found)


@pytest.mark.parametrize(("topology", "expected"), [
  ("cpu:4", "4,1,1 2,1,2 1,4,1 1,2,2 1,1,4"),
  ("gpu:h100:4x8", "32,1,1 16,1,2 8,1,4 4,8,1 4,4,2 4,2,4 4,1,8 2,8,2 1,32,1 1,16,2 1,8,4 1,4,8"),
])  # fmt: skip
def test_usual_meshes_keep_tensor_parallelism_on_the_fast_links(topology, expected):
  found = meshes(read_machine(topology), ("data", "fsdp", "tensor"), ("data", "fsdp"))
  assert {tuple(s.values()) for s in found} == {tuple(map(int, x.split(","))) for x in expected.split()}


def find(topology, batch=BATCH, **options):
  options = {"rules": RULES, "optimizer": optax.adam(1e-3), "compile_best": 0, **options}
  return search(init, loss, topology, batch=batch, **options)


def test_search_finds_what_may_fit_and_prints_the_winner_on_top():
  result = find("tpu:v5e:4x8")
  assert result.best is result.fitting[0]
  exact = [c.memory.exact_bytes for c in result.fitting]
  assert exact == sorted(exact)
  lines = str(result).splitlines()
  assert lines[2] == "The winner, by exact bytes, not compiled:"
  assert lines[4:8] == [f"  {line}" for line in result.code().splitlines()]
  assert len(result.table().rows) == len({c.mesh_text for c in result.fitting})
  assert json.loads(result.to_json())["best"]["mesh"] == dict(result.best.sizes)
  # What is printed is what the plan of the winner says.
  how = {"microbatches": result.best.memory.microbatches, "remat": result.best.memory.remat}
  assert result.best.memory == memory_plan(result.best.plan, loss, BATCH, **how)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": 2}, {"optimizer_memory": "pinned_host"}], ids=str)
def test_the_code_of_the_winner_runs(options):
  rules = nxp.LogicalRules(batch="data", embed=None, mlp=None, layers=None) if options else RULES
  result = find("cpu:8", rules=rules, **options)
  for name, value in options.items():
    assert f"{name}={json.dumps(value)}" in result.code()
  found = json.loads(result.to_json())["best"]
  assert (found["zero"], found["offload"]) == (options.get("zero", 0), "optimizer_memory" in options)
  scope = {"nxp": nxp, "init": init, "loss": loss, "rules": rules, "optimizer": optax.adam(1e-3)}
  exec(result.code(), scope)
  batch = nxp.shard_batch(np.zeros(BATCH.shape, np.float32), scope["plan"])
  assert float(scope["step"](scope["model"], scope["state"], batch)["loss"]) == 0.0


def test_meshes_that_cannot_split_the_batch_are_left_out_with_the_reason():
  result = find("gpu:h100:2x8", jax.ShapeDtypeStruct((24, WIDTH), jnp.float32))
  (reason,) = result.refused
  assert reason.startswith("batch has 24 examples, which 16 shards cannot split evenly")
  assert f"{result.refused[reason]} meshes are left out: {reason}" in " ".join(str(result).split())
  assert all(math.prod((c.sizes["data"], c.sizes["fsdp"])) in (1, 2, 4, 8) for c in result.fitting)


def test_nothing_fits():
  huge = jax.ShapeDtypeStruct((1 << 22, WIDTH), jnp.float32)
  rules = nxp.LogicalRules(batch=None, embed="fsdp", mlp="fsdp2", layers=None)
  result = find("tpu:v5e:2x2", huge, rules=rules, remat=["none"], max_microbatches=1)
  assert result.best is None
  assert "Nothing fits. The smallest" in str(result)
  with pytest.raises(ReportError, match="no layout fits on tpu:v5e:2x2"):
    result.code()


def reported(fits=True, need=2**20, flops=1.0, sent=0):
  """Stands in for a report of the compiler."""
  collectives = [SimpleNamespace(slices=1, overlapped=False, sent_bytes=sent)] if sent else []
  cost = SimpleNamespace(arithmetic={"float32": flops}, flops=flops, hbm_bytes=8, uncounted={})
  totals = SimpleNamespace(per_device=sent)
  given = {"fits": fits, "need_bytes": need, "target": "8 x cpu", "cost": cost, "collectives": collectives}
  return SimpleNamespace(**given, sent=lambda: totals)


@pytest.fixture
def compiler(monkeypatch):
  """Stands in for the compiler: gives these reports, one for each layout, and lists the plans."""

  def given(*reports):
    left, seen = iter(reports), []
    report = lambda step, plan, **_: seen.append(plan) or next(left)
    monkeypatch.setattr("nnx_parallel.report.search.compile_report", report)
    return seen

  return given


def test_one_layout_of_each_mesh_is_compiled_and_the_least_work_wins(compiler):
  seen = compiler(reported(flops=3e9), reported(flops=2e9, sent=1), reported(flops=2e9, sent=2**30))
  found = find("cpu:8", compile_best=3)
  assert len({str(plan.mesh) for plan in seen}) == 3
  assert [c.report.cost.flops for c in found.fitting[:3]] == [2e9, 3e9, 2e9]
  assert found.best is found.fitting[0]
  assert "The winner, compiled for 8 x cpu: it fits:" in str(found)
  assert [row[-1] for row in found.table().rows[:3]] == ["1 B", "0 B", "1 GiB"]
  assert len(json.loads(found.to_json())["compiled"]) == 3


def test_a_refusal_asks_the_next_layout_for_more_room(compiler):
  """The compiler needs more than the least memory, and as much more is expected of the other layouts."""
  one = jax.ShapeDtypeStruct((1 << 22, WIDTH), jnp.float32)
  options = {"rules": nxp.LogicalRules(batch="fsdp", embed="fsdp", mlp=None, layers=None), "remat": "none"}
  alone = find("tpu:v5e:2x2", one, **options)
  usable = chip("v5e").usable_bytes
  seen = compiler(reported(fits=False, need=usable + 1), reported())
  found = find("tpu:v5e:2x2", one, **options, compile_best=2)
  assert len(seen) == 2
  first, second = alone.best.memory, found.best.memory
  assert second.need_bytes * (usable + 1) / first.need_bytes <= usable
  assert second.microbatches > first.microbatches
  assert found.fitting[-1].refused.startswith("the compiler needs 15.75 GiB")
  assert found.notes[0].endswith("is refused: the compiler needs 15.75 GiB.")


def test_work_is_what_binds_and_what_is_waited_for():
  cpu = chip("cpu")
  report = reported(flops=cpu.peak("float32"), sent=int(cpu.link_bandwidth))
  assert work_of(report, cpu) == pytest.approx(2)
  report.collectives[0].overlapped = True
  assert work_of(report, cpu) == pytest.approx(1)
  report.collectives[0].slices = 2
  assert work_of(report, cpu) == pytest.approx(cpu.link_bandwidth / cpu.network_bandwidth)


def test_the_compiler_decides():
  result = find("cpu:8", optimizer=optax.sgd(0.1), compile_best=1)
  assert [c.report is not None for c in result.fitting[:2]] == [True, False]
  assert result.best.report.fits
  text = str(result)
  assert "The winner, compiled for 8 x cpu: it fits:" in text
  assert "compiled" in result.table().columns[5]
  (note,) = find("cpu:8", optimizer=None, compile_best=1).notes
  assert "ranked by exact bytes: a step needs search(..., optimizer=)" in note
  far = find("tpu:v5e:4x4", compile_best=1)
  assert "16 simulated devices are needed, and this process has 8" in far.notes[0] or far.best.report


def test_what_no_layout_could_have_is_an_error():
  with pytest.raises(ReportError, match=r"max_microbatches=0(.|\n)*at least 1"):
    find("cpu:8", max_microbatches=0)
  with pytest.raises(nxp.errors.PlanError, match="zero=1 splits optimizer state, but there is no optimizer"):
    find("cpu:8", optimizer=None, zero=1)
