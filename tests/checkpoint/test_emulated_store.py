"""Checkpoints in an emulated Google Cloud Storage, over HTTP. `make store` installs what it needs."""

import pytest

pytest.importorskip("gcsfs", reason="the emulated store is not installed; `make store` installs it")
pytest.importorskip("gcp_storage_emulator")

from checkpoint.runs import arrays, assert_same, target_of
from emulated_store import emulator
from nnx_parallel import cli
from nnx_parallel.checkpoint import manifest
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError


@pytest.fixture(scope="module")
def bucket():
  with emulator() as address:
    yield address


def names(checkpointer):
  return sorted(path.name for path in checkpointer.directory.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_are_saved_restored_verified_and_retained(bucket, asynchronous):
  directory = f"{bucket}/retained-{asynchronous}"  # does not exist: a store has no empty folders
  trees = {step: arrays(step) for step in (1, 2, 3)}
  with Checkpointer(directory, max_to_keep=2, asynchronous=asynchronous) as checkpointer:
    assert checkpointer.steps() == []
    for step, tree in trees.items():
      checkpointer.save(step, tree, metrics={"loss": 1 / step})
    checkpointer.wait()
    assert checkpointer.steps() == [2, 3]
    assert names(checkpointer) == ["2", "3"]
  other = Checkpointer(directory)
  assert other.latest() == 3
  assert_same(other.restore(target_of(trees[3])), trees[3])
  assert_same(other.restore(target_of(trees[2]), step=2), trees[2])
  assert other.verify() == {}
  assert other.metadata(2).metrics == {"loss": 0.5}


def test_a_save_that_was_killed_is_removed_by_the_next(bucket):
  checkpointer = Checkpointer(f"{bucket}/killed")
  checkpointer.save(1, arrays(1))
  checkpointer.save(2, arrays(2))
  (checkpointer.directory / "2" / manifest.FILE).unlink()
  (checkpointer.directory / "2.nnx-saving").write_text("")
  assert checkpointer.latest() == 1
  checkpointer.save(3, arrays(3))
  assert names(checkpointer) == ["1", "3"]


def test_a_changed_object_is_damage(bucket):
  checkpointer = Checkpointer(f"{bucket}/damaged")
  for step in (1, 2):
    checkpointer.save(step, arrays(step))
  chunks = sorted((checkpointer.directory / "2" / "model" / "w").glob("c/*/*"))
  chunk = next(path for path in chunks if path.stat().length)
  data = bytearray(chunk.read_bytes())
  data[len(data) // 2] ^= 1
  chunk.write_bytes(bytes(data))
  with pytest.raises(CheckpointError, match="step 2 is damaged"):
    checkpointer.restore(target_of(arrays(2)))
  with pytest.warns(UserWarning, match="step 2 was passed over"):
    assert_same(checkpointer.restore(target_of(arrays(1)), on_corrupt="fallback"), arrays(1))


def test_commands_read_a_store(bucket, capsys):
  directory = f"{bucket}/commands"
  with Checkpointer(directory) as checkpointer:
    checkpointer.save(5, arrays())
  assert cli.main(["inspect", directory]) == 0
  assert "5" in capsys.readouterr().out
  assert cli.main(["verify", directory]) == 0
