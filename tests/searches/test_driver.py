"""What the searches share: verdicts, workers that die, shrinking and the record."""

import argparse
import json
import os
import subprocess
import sys
import types
from unittest import mock

import pytest

import conftest
from benchmarks import harness
from searches import driver, fuzz

TOY = """
import os
from searches import driver

BAD = ("WRONG",)

def cases(seed, given):
  return [(seed, n) for n in range(3)]

def check(case, given):
  if case == (1, 1):
    os.abort()
  if case[0] == 2:
    raise ValueError("odd")
  return {"verdict": "WRONG" if case[0] == 3 and case[1] else "right", "counts": {("rows", "seen"): 1}}

def smaller(case):
  yield case[0], case[1] - 1
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
  (tmp_path / "toy.py").write_text(TOY)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{harness.ROOT}")
  toy = types.ModuleType("toy", "A toy.")
  exec(TOY, toy.__dict__)
  return toy


def test_a_case_that_raises_or_dies_is_a_verdict_and_the_others_are_checked(toy):
  found = driver.results(toy, driver.arguments(toy, ["--seeds", "0:4"]))
  verdicts = {case: result["verdict"] for case, result in found}
  rows = ["right"] * 3, ["right", "abort", "right"], ["BROKEN"] * 3, ["right", "WRONG", "WRONG"]
  assert verdicts == {(seed, n): rows[seed][n] for seed in range(4) for n in range(3)}


def test_what_fails_is_made_smaller_while_it_fails_in_the_same_way(toy):
  given = driver.arguments(toy, [])
  assert driver.shrink(toy, given, (3, 2), {"verdict": "WRONG"})[0] == (3, 1)


def test_counts_are_recorded_and_other_groups_stay(toy, tmp_path, monkeypatch):
  monkeypatch.setattr(harness, "RESULTS", tmp_path)
  monkeypatch.setattr(harness.Record.write, "__defaults__", (tmp_path,))
  driver.record(toy, None, {("a", "tried"): 3}, {("a", "seconds"): (2, "s")})
  driver.record(toy, None, {("b", "tried"): 4}, {})
  rows = json.loads((tmp_path / "toy.json").read_text())["rows"]
  found = [(row["group"], row["case"], row["value"]) for row in rows]
  assert found == [("b", "tried", 4), ("a", "tried", 3), ("a", "seconds", 2)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["fuzz", "seams", "soak", "torture"])
def test_the_searches_of_make_start_in_an_environment_that_has_only_the_package(name):
  variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  command = [sys.executable, "-m", f"searches.{name}", "--help"]
  assert f"-m searches.{name} " in (harness.ROOT / "Makefile").read_text().replace("\n", " \n")
  subprocess.run(command, env=variables, cwd=harness.ROOT, check=True, capture_output=True, timeout=120)


REFUSED = {
  "--seeds x": "argument --seeds: 'x' is not FIRST:END, such as 0:100",
  "--seeds 1": "argument --seeds: '1' is not FIRST:END",
  "--step plain --explicit": "argument --explicit: not allowed with argument --step",
}


@pytest.mark.parametrize(("words", "said"), REFUSED.items())
def test_words_that_mean_nothing_are_refused(words, said, capsys):
  with pytest.raises(SystemExit):
    driver.arguments(fuzz, words.split())
  assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0/4", "5/4", "x", "1/0", "1"])
def test_a_share_of_the_tests_that_is_none_is_refused(text):
  with pytest.raises(argparse.ArgumentTypeError, match="is not K/N with K from 1 to N"):
    conftest.read_part(text)


def test_shares_have_each_file_once():
  items = [mock.Mock(path=n % 7) for n in range(60)]
  shares = [conftest.share(items, conftest.read_part(f"{k}/4")) for k in (1, 2, 3, 4)]
  assert sorted(path for share in shares for path in {item.path for item in share}) == [*range(7)]
  assert sum(map(len, shares)) == 60
