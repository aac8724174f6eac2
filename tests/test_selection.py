"""What `cases(n)`, `each_case`, `everyday`, `--first` and `--rest` select."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MODULE = """
import pytest

@pytest.mark.cases(2)
@pytest.mark.parametrize("x", range(5))
def test_some(x): ...

@pytest.mark.cases(3)
def test_one(): ...

@pytest.mark.each_case
@pytest.mark.parametrize("x", range(3))
def test_each(x): ...

@pytest.mark.slow
def test_slow(): ...

@pytest.mark.slow
@pytest.mark.everyday
def test_path(): ...
"""


EACH = ["each[0]", "each[1]", "each[2]"]
CHOSEN = {
  (): ["some[0]", "some[1]", "some[2]", "some[3]", "some[4]", "one", *EACH, "slow", "path"],
  ("-m", "not nightly"): ["some[0]", "some[3]", "one", *EACH, "slow", "path"],
  ("--first",): ["some[0]", "one", *EACH, "path"],
  ("--rest",): ["some[3]", "slow"],
  ("--part", "1/2"): ["some[0]", "some[1]", "some[2]", "some[3]", "some[4]", "one", *EACH, "slow", "path"],
  ("--part", "2/2"): [],
}


def test_cases_that_are_chosen(tmp_path):
  (tmp_path / "test_toy.py").write_text(MODULE)
  common = ["-p", "conftest", "-c", str(HERE.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
  common += ["--collect-only", "-q", str(tmp_path)]
  code = f"import pytest\nfor options in {[*CHOSEN]}: pytest.main([*{common}, *options]); print('end')"
  variables = {**os.environ, "PYTHONPATH": str(HERE), "PYTEST_ADDOPTS": ""}
  words = [sys.executable, "-c", code]
  done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=120)
  *runs, _ = done.stdout.split("end\n")
  found = [[line.split("::test_")[1] for line in run.splitlines() if "::" in line] for run in runs]
  assert found == [*CHOSEN.values()], done.stdout + done.stderr
