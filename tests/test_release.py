"""What `make release` asks of a release, before it builds anything."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "release.py"


@pytest.mark.parametrize(
  ("words", "said"),
  [
    ((), ["which version?  Fix: make release VERSION=0.1.0rc1"]),
    (
      ("9.9.9",),
      [
        "9.9.9 is not ready:",
        "nnx_parallel.__version__ is 0.",
        "Fix: set it to 9.9.9",
        "CHANGELOG.md has no section '## [9.9.9] - YYYY-MM-DD'",
      ],
    ),
  ],
)
def test_a_release_that_is_not_ready_says_what_is_missing(words, said):
  done = subprocess.run(
    [sys.executable, TOOL, *words], capture_output=True, text=True, timeout=60, check=False
  )
  assert done.returncode == 1
  assert all(one in done.stderr for one in said), done.stderr
