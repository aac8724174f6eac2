"""The harness measures what it says, pairs the rounds, and writes what a reader needs."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from benchmarks.harness import ROOT, Record, Timing, environment, measure


def test_ratio_is_the_median_of_the_rounds_not_the_ratio_of_the_medians():
  baseline = Timing("plain", (1.0, 10.0, 2.0))
  case = Timing("ours", (2.0, 10.0, 6.0))
  assert case.ratio(baseline) == (1.5, 2.0, 2.5)
  assert case.median / baseline.median == 3.0
  assert Timing("once", (3.0,)).ratio(Timing("plain", (2.0,))) == (1.5, 1.5, 1.5)


def test_rounds_of_different_runs_cannot_be_paired():
  with pytest.raises(ValueError, match="argument 2 is longer"):
    Timing("ours", (1.0,)).ratio(Timing("plain", (1.0, 2.0)))


def test_cases_take_turns():
  calls = []
  timings = measure(
    {name: lambda name=name: calls.append(name) for name in "abc"}, rounds=8, warmup=2, calls=1
  )
  assert calls[:6] == list("aabbcc")
  rounds = [calls[start : start + 3] for start in range(6, len(calls), 3)]
  assert all(sorted(turn) == list("abc") for turn in rounds)
  assert len({tuple(turn) for turn in rounds}) > 1
  assert [len(timings[name].seconds) for name in "abc"] == [8, 8, 8]


def test_each_timing_is_for_one_call():
  ticks = iter(range(0, 1000, 10))
  timings = measure({"a": lambda: jnp.zeros(2)}, rounds=3, warmup=1, calls=5, clock=lambda: next(ticks))
  assert timings["a"].seconds == (2.0, 2.0, 2.0)


def test_cases_with_the_same_figures_are_rows_of_one_table():
  record = Record("toy", "Toys", command="make toys")
  for group, bytes_sent in (("dp", 3), ("fsdp", 4)):
    timings = {"plain": Timing("plain", (2e-3, 2e-3)), "ours": Timing("ours", (3e-3, 3e-3))}
    record.compare(timings, baseline="plain", group=group)
    record.value("sent", bytes_sent, "GiB", group=group)
    record.value("need", 2 * bytes_sent, "GiB", group=group)
  page = record.markdown({})
  assert (
    "| group | plain | ours |\n| --- | --- | --- |\n| dp | 2 ms | 1.50 (1.50 to 1.50) |\n| fsdp |" in page
  )
  assert (
    "| group | sent | need |\n| --- | --- | --- |\n| dp | 3 GiB | 6 GiB |\n| fsdp | 4 GiB | 8 GiB |" in page
  )


def test_record_is_written_as_json_and_markdown(tmp_path):
  record = Record("toy", "Time of a toy", command="python -m benchmarks.toy", notes=["Two cores."])
  timings = {"plain": Timing("plain", (2e-3, 2e-3)), "ours": Timing("ours", (3e-3, 3e-3))}
  record.compare(timings, baseline="plain", group="10 Variables")
  record.value("temporaries", 19.25, "MiB")
  page = record.write(tmp_path).read_text()
  assert "| 10 Variables | ours | 1.50 | 1.50 to 1.50 | 3 ms | 2 | plain |" in page
  assert "| case | value |\n| --- | --- |\n| temporaries | 19.25 MiB |" in page
  assert "Two cores." in page
  content = json.loads((tmp_path / "toy.json").read_text())
  assert [row["case"] for row in content["rows"]] == ["plain", "ours", "temporaries"]
  assert content["environment"].keys() == environment().keys()
  assert {"date", "cpu", "cores", "devices", "jax", "flax", "commit"} <= environment().keys()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["fuzz", "seams", "soak", "torture"])
def test_the_searches_of_make_start_in_an_environment_that_has_only_the_package(name):
  variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
  assert f"-m benchmarks.{name} " in (ROOT / "Makefile").read_text().replace("\n", " \n")
  subprocess.run(command, env=variables, cwd=ROOT, check=True, capture_output=True, timeout=120)
