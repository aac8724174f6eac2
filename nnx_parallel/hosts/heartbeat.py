"""Messages of a process to the launcher: it has made a step, or it ended because it was asked to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VARIABLE = "NNX_PARALLEL_HEARTBEAT"  # a file of this process
STOPPED = 75  # exit code of a loop that SIGTERM ended in order; sysexits.h has it for "try again later"


def beat(step: int) -> None:
  """Writes the step where the launcher looks; does nothing without a launcher that looks."""
  if file := os.environ.get(VARIABLE):
    with contextlib.suppress(FileNotFoundError):  # the launcher is gone, and this process soon
      Path(file).write_text(str(step))


def last_beat(file: Path) -> int | None:
  """The newest step; None before the first, and while it is being written."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    return int(file.read_text())
  return None
