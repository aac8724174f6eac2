"""Tells the launcher that a process has made a step."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VARIABLE = "NNX_PARALLEL_HEARTBEAT"  # a file of this process


def beat(step: int) -> None:
  """Writes the step where the launcher looks; does nothing without a launcher that looks."""
  if file := os.environ.get(VARIABLE):
    with contextlib.suppress(FileNotFoundError):  # the launcher is gone, and this process soon
      Path(file).write_text(str(step))


def last_beat(file: Path) -> tuple[int, float] | None:
  """The newest step and when it was made, in seconds since the epoch; None before the first."""
  try:
    return int(file.read_text() or 0), file.stat().st_mtime
  except FileNotFoundError:
    return None
