"""Checkpoints on disk for the tests of this package."""

import shutil

import pytest

from checkpoint.runs import arrays
from nnx_parallel.checkpoint.checkpointer import Checkpointer


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory):
  """What `saved` copies."""
  directory = tmp_path_factory.mktemp("saved") / "run"
  with Checkpointer(directory) as checkpointer:
    for step in (1, 2):
      checkpointer.save(step, arrays(step))
  return directory


@pytest.fixture
def saved(tmp_path, saved_once):
  """A directory with steps 1 and 2 of `arrays`, and the trees by step."""
  shutil.copytree(saved_once, tmp_path / "run")
  return tmp_path / "run", {step: arrays(step) for step in (1, 2)}
