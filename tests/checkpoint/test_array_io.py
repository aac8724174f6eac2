import dataclasses
import json

import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint import array_io, manifest, storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError


def damaged(tmp_path, change):
  """A step of one array whose metadata is changed, in files that TensorStore writes."""
  tree = {"w": np.ones((8, 4), np.float32)}
  Checkpointer(tmp_path).save(1, tree)
  folder = f"{tmp_path}/1/model/"
  store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": folder}}).result()
  change(store)
  record = Checkpointer(tmp_path).metadata(1)
  step = storage.epath.Path(tmp_path / "1")
  (step / manifest.FILE).unlink()
  manifest.write(dataclasses.replace(record, files=storage.all_files(step)), step)
  return tree


@pytest.mark.parametrize("change", [{"shape": [4, 4]}, {"chunk_shape": [0, 4]}, {"data_type": "int32"}])
def test_metadata_of_another_array_is_damage(tmp_path, change):
  def edit(store):
    record = json.loads(store["w/zarr.json"])
    (record["chunk_grid"]["configuration"] if "chunk_shape" in change else record).update(change)
    store["w/zarr.json"] = json.dumps(record)

  tree = damaged(tmp_path, edit)
  with pytest.raises(CheckpointError, match=r"step 1 is damaged: model/w cannot be read"):
    Checkpointer(tmp_path).restore(tree)


def test_each_chunk_has_a_checksum_and_orbax_s_own_have_none(tmp_path):
  tree = {"w": np.ones((8, 4), np.float32)}
  Checkpointer(tmp_path / "ours").save(1, tree)
  with array_io.quiet():
    ocp.save_checkpointables(tmp_path / "theirs", {"model": tree})
  for folder, found in ((tmp_path / "ours" / "1", True), (tmp_path / "theirs", False)):
    store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/model/"}})
    codecs = json.loads(store.result()["w/zarr.json"])["codecs"]
    assert ("crc32c" in [codec["name"] for codec in codecs]) == found
