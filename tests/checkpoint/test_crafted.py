"""Files that somebody wrote on purpose: with the right SHA-256, and a body that is none of ours."""

import hashlib
import json

import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from checkpoint.runs import assert_same, target_of
from nnx_parallel.checkpoint import storage
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import DamagedError
from nnx_parallel.checkpoint.manifest import FILE
from nnx_parallel.errors import CheckpointError


def digest(text):
  return hashlib.sha256(text.encode()).hexdigest()


def sign_again(step, edit):
  """Edits the header and the body of a manifest, and signs both."""
  file = step / FILE
  header, body = map(json.loads, file.read_text().splitlines())
  del header["sha256"]
  edit(header, body)
  write(file, header, json.dumps(body))


def write(file, header, body):
  header["body"] = digest(body)
  header["sha256"] = digest(json.dumps(header, sort_keys=True, separators=(",", ":")))
  file.write_text(f"{json.dumps(header)}\n{body}\n")


def leaf(**fields):
  return lambda header, body: body["items"]["model"]["leaves"]["w"].update(fields)


def field(**fields):
  return lambda header, body: body.update(fields)


def head(**fields):
  return lambda header, body: header.update(fields)


def rename_item(header, body):
  body["items"]["../2/model"] = body["items"].pop("model")


def without(*names):
  def edit(header, body):
    for part in (header, body, body.get("items", {}).get("model", {}).get("leaves", {}).get("w", {})):
      for name in names:
        part.pop(name, None)

  return edit


EDITS = {
  "a folder above": leaf(folder="../../1/model/w"), "an absolute folder": leaf(folder="/etc"),
  "another leaf's folder": leaf(folder="b"), "an item above": rename_item,
  "files above": field(files={"../../secret": 3}), "an absolute file": field(files={"/etc/passwd": 3}),
  "a negative shape": leaf(shape=[-8, -16]), "a shape of floats": leaf(shape=[8.0, 16.0]),
  "a shape that is none": leaf(shape=3), "another shape": leaf(shape=[8, 15]),
  "an endless shape": leaf(shape=[2**62, 2**62]), "a digest of text": leaf(digest="a"),
  "an unknown dtype": leaf(dtype="float99"), "objects": leaf(dtype="object"),
  "an unknown encoding": leaf(encoding="zip"),
  "keys of an unknown kind": leaf(dtype="key<fry>", encoding="key:none"),
  "a key that is none": leaf(encoding="key:threefry2x32"), "empty and not empty": leaf(encoding="empty"),
  "no shape": without("shape"), "no items": without("items"), "no step": without("step"),
  "no time": without("time"), "items of a list": field(items=[]), "a step of text": head(step="two"),
  "a time of text": head(time="now"), "metrics of text": head(metrics={"loss": "low"}),
  "metrics of a list": head(metrics=[1]), "sizes of text": field(files={"a": "1"}),
  "values that are no float": field(extra={"a": {"__float__": "much"}}),
}  # fmt: skip


def test_fields_of_a_later_version_are_ignored(saved):
  directory, trees = saved
  wanted = Checkpointer(directory).metadata(2)
  for edit in (leaf(colour="red"), field(colour="red"), head(colour="red")):
    sign_again(directory / "2", edit)
  assert Checkpointer(directory).metadata() == wanted
  assert_same(Checkpointer(directory).restore(target_of(trees[2])), trees[2])


@pytest.mark.cases(15)
@pytest.mark.parametrize("name", EDITS)
def test_a_signed_manifest_that_lies_is_damage(saved, name):
  directory, trees = saved
  sign_again(directory / "2", EDITS[name])
  checkpointer = Checkpointer(directory)
  with pytest.raises(DamagedError, match=r"2/nnx_parallel\.json is damaged: it does not match the format"):
    checkpointer.metadata(2)
  assert checkpointer.latest() == 1
  assert list(checkpointer.verify(2)) == [FILE]
  if name == "a folder above":  # the others go the same way
    with pytest.warns(UserWarning, match="step 2 was passed over"):
      assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])
    with pytest.warns(UserWarning, match=r"later steps \[2\] in"):
      checkpointer.save(3, trees[1])
    assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize("text", ["", "{}", "[" * 200_000, "[]", "null"])
def test_a_body_that_is_none_is_damage(saved, text):
  directory, trees = saved
  file = directory / "2" / FILE
  header = json.loads(file.read_text().splitlines()[0])
  del header["sha256"]
  write(file, header, text)
  checkpointer = Checkpointer(directory)
  with pytest.raises(DamagedError, match="is damaged"):
    checkpointer.metadata(2)
  assert checkpointer.latest() == 1
  checkpointer.save(3, trees[1])


def test_an_array_larger_than_the_memory_is_no_damage(tmp_path):
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, {"w": np.zeros(4, np.int8)})
  size = 1 << 50
  folder = f"{tmp_path}/1/model/"
  store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": folder}}).result()
  store["w/zarr.json"] = store["w/zarr.json"].replace(b'"shape":[4]', b'"shape":[%d]' % size)

  def edit(header, body):
    leaf(shape=[size], nbytes=size)(header, body)
    body["files"] = storage.all_files(epath.Path(tmp_path / "1"))
    del body["files"][FILE]

  sign_again(tmp_path / "1", edit)
  with pytest.raises(CheckpointError, match=r"cannot read .*\n.*\n.*not a sign of damage"):
    checkpointer.restore(as_numpy=True)
