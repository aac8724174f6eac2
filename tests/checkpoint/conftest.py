"""Checkpoints on disk for the tests of this room."""

from __future__ import annotations

import os

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


@pytest.fixture
def bytes_read(monkeypatch):
  """The sizes of all direct reads of array data, in a list that may be emptied."""
  sizes, read = [], os.preadv

  def counted(file, buffers, offset):
    sizes.append(read(file, buffers, offset))
    return sizes[-1]

  monkeypatch.setattr(os, "preadv", counted)
  return sizes
