"""The harness measures what it says, pairs the rounds, and writes what a reader needs."""

import json

import jax.numpy as jnp

from benchmarks.harness import Record, Timing, environment, measure


def test_ratio_is_the_median_of_the_rounds_not_the_ratio_of_the_medians():
  baseline = Timing("plain", (1.0, 10.0, 2.0))
  case = Timing("ours", (2.0, 10.0, 6.0))
  assert case.ratio(baseline) == (1.5, 2.0, 2.5)
  assert case.median / baseline.median == 3.0
  assert Timing("once", (3.0,)).ratio(Timing("plain", (2.0,))) == (1.5, 1.5, 1.5)


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


def test_a_record_has_its_rows_and_where_it_was_measured(tmp_path, capsys):
  record = Record("toy", "Time of a toy", command="python -m benchmarks.toy", notes=["Two cores."])
  timings = {"plain": Timing("plain", (2e-3, 2e-3)), "ours": Timing("ours", (3e-3, 3e-3))}
  record.compare(timings, baseline="plain", group="10 Variables")
  record.value("temporaries", 19.25, "MiB")
  content = json.loads(record.write(tmp_path).read_text())
  printed = capsys.readouterr().out
  assert "| 10 Variables | ours | 1.5 (1.5 to 1.5) |" in printed
  assert "|  | temporaries | 19.2 MiB |" in printed
  assert content["notes"] == ["Two cores."]
  assert [row["case"] for row in content["rows"]] == ["plain", "ours", "temporaries"]
  assert content["environment"].keys() == environment().keys()
  assert {"date", "cpu", "cores", "devices", "jax", "flax", "commit"} <= environment().keys()
