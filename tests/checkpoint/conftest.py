"""Checkpoints on disk for the tests of this room."""

from __future__ import annotations

import pytest

from checkpoint.runs import arrays
from nnx_parallel.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def saved(tmp_path):
  """A directory with steps 1 and 2 of `arrays`, and the trees by step."""
  trees = {step: arrays(step) for step in (1, 2)}
  with Checkpointer(tmp_path / "run") as checkpointer:
    for step, tree in trees.items():
      checkpointer.save(step, tree)
  return tmp_path / "run", trees
