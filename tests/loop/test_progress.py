"""A bar on a terminal, a few plain lines in a log, one when quiet."""

import io
import re

import pytest
from rich.console import Console

from nnx_parallel.loop.progress import StepProgress

VALUES = {"loss": 2.5, "close": 0.5, "seconds": 0.125, "tokens_per_second": 32768.0}


def shown(steps, *, start=0, terminal=False, width=120, quiet=False):
  out = io.StringIO()
  console = Console(file=out, force_terminal=terminal, width=width, legacy_windows=False)
  with StepProgress(steps, start=start, quiet=quiet, console=console) as progress:
    for step in range(start + 1, steps + 1):
      progress.update(step, VALUES)
  return out.getvalue()


def test_quiet_shows_the_last_step_only():
  (line,) = shown(200, quiet=True).splitlines()
  assert line == "step 200/200  loss 2.5000  close 0.5000  32,768 tokens/s  125 ms/step"
  assert shown(200, quiet=True, terminal=True).count("\n") == 1


def visible(text):
  return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize(("width", "close"), [(120, True), (80, False)])
def test_a_terminal_gets_one_line_that_is_redrawn(width, close):
  text = visible(shown(50, terminal=True, width=width))
  last = text.strip().splitlines()[-1]
  assert last.startswith("step 50/50")
  assert "loss 2.5000" in last
  assert "32,768 tokens/s  125 ms/step" in last
  assert ("close" in last) == close
  assert len(last.rstrip()) <= width
