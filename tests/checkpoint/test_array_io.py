import dataclasses
import json

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from checkpoint.runs import assert_same
from nnx_parallel.checkpoint import array_io, manifest, storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError

RNG = np.random.default_rng(0)


@pytest.fixture
def foreign(tmp_path):
  """A run whose steps 1 and 2 Orbax stored compressed, and its tree."""
  tree = {"w": RNG.standard_normal((8, 4)).astype(np.float32), "b": np.ones(3, np.float32)}
  checkpointer = Checkpointer(tmp_path)
  context = ocp.Context()
  context.array_options.saving.use_ocdbt = False
  for step in (1, 2):
    checkpointer.save(step, tree)
    folder, record = checkpointer.directory / str(step), checkpointer.metadata(step)
    folder.rmtree()
    with context, array_io.quiet():
      ocp.save_checkpointables(folder, {"model": tree})
    sizes = storage.all_files(folder)
    hashes = {name: storage.sha256(folder / name) for name in sizes}
    manifest.write(dataclasses.replace(record, files=sizes, hashes=hashes), folder)
  return checkpointer, tree


def test_what_orbax_stores_otherwise_is_not_damaged(foreign):
  checkpointer, tree = foreign
  assert checkpointer.latest() == 2
  assert checkpointer.verify() == {}
  assert checkpointer.diff(tree).fits
  assert_same(checkpointer.restore(tree, on_corrupt="fallback"), tree)
  assert checkpointer.restored.step == 2


@pytest.mark.parametrize(
  "change",
  [
    lambda grid, record: record.update(shape=[4, 4]),
    lambda grid, record: grid.update(chunk_shape=[0, 4]),
    lambda grid, record: record.update(data_type="int32"),
  ],
  ids=["shape", "chunk", "dtype"],
)
def test_metadata_of_another_array_is_damage_also_unverified(tmp_path, change):
  tree = {"w": np.ones((8, 4), np.float32)}
  Checkpointer(tmp_path).save(1, tree)
  file = tmp_path / "1" / "model" / "w" / "zarr.json"
  record = json.loads(file.read_text())
  change(record["chunk_grid"]["configuration"], record)
  file.write_text(json.dumps(record))
  with pytest.raises(CheckpointError, match=r"step 1 is damaged: model/w/zarr\.json has"):
    Checkpointer(tmp_path, verify="off").restore(tree)


def test_a_chunk_that_is_missing_is_not_read_as_zeros(tmp_path):
  tree = {"w": np.ones((8, 4), np.float32)}
  Checkpointer(tmp_path).save(1, tree)
  (tmp_path / "1" / "model" / "w" / "c" / "0" / "0").unlink()
  with pytest.raises(CheckpointError, match="step 1 is damaged: model/w/c/0/0 is missing"):
    Checkpointer(tmp_path, verify="off").restore(tree)
