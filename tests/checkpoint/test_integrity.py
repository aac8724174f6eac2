import re
import shutil

import jax
import pytest

import nnx_parallel as nxp
from benchmarks import torture
from checkpoint.runs import arrays, assert_same, target_of
from nnx_parallel.checkpoint import array_io, manifest
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.damage import DamagedError
from nnx_parallel.errors import CheckpointError


def chunk_of(directory, step, name="w"):
  return min(path for path in (directory / str(step) / "model" / name / "c").rglob("*") if path.is_file())


def flip(path, bit=37):
  data = bytearray(path.read_bytes())
  data[bit // 8 % len(data)] ^= 1 << bit % 8
  path.write_bytes(data)


def test_damage_to_any_file_is_found_and_named():
  # The long form is `make torture`.
  found = torture.corruptions(20, seed=1)
  assert found["wrong"] == 0
  assert found["unnamed"] == 0
  assert found["named"] + found["harmless"] == 20


def test_a_flipped_bit_names_the_leaf_and_its_files(saved):
  directory, trees = saved
  flip(chunk_of(directory, 2))
  checkpointer = Checkpointer(directory)
  text = r"step 2 is damaged: .*model/w.*\n(.*\n)*  Fix: restore\(\.\.\., on_corrupt=\"fallback\"\)"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target_of(trees[2]))
  assert list(checkpointer.verify(2)) == ["model/w/c/0/0", "model/w"]
  assert checkpointer.verify(1) == {}


def test_large_files_are_checked_by_value_alone(saved, monkeypatch):
  directory, trees = saved
  assert "model/w/c/0/0" in Checkpointer(directory).metadata(2).hashes
  monkeypatch.setattr("nnx_parallel.checkpoint.save._HASHED_BYTES", 8)
  with Checkpointer(directory) as checkpointer:
    checkpointer.save(3, trees[2])
    chunk = chunk_of(directory, 3)
    assert str(chunk.relative_to(directory / "3")) not in checkpointer.metadata(3).hashes
    flip(chunk)
    text = r"the values of model/w differ from the saved values \(files under model/w\)"
    with pytest.raises(CheckpointError, match=text):
      checkpointer.restore(target_of(trees[2]), 3)
  with Checkpointer(directory, verify="metadata") as unverified, pytest.raises(AssertionError):
    assert_same(unverified.restore(target_of(trees[2]), 3), trees[2])


def test_a_damaged_array_is_named_in_any_layout(saved, monkeypatch):
  directory, trees = saved
  monkeypatch.setattr("nnx_parallel.checkpoint.save._HASHED_BYTES", 8)
  with Checkpointer(directory) as checkpointer:
    checkpointer.save(3, trees[2])
    flip(directory / "3" / "model" / "w" / "c" / "1" / "2", bit=8 * (4 * 4 * 1 + 3))
    text = "the values of model/w differ from the saved values"
    for mesh in (None, nxp.make_mesh(x=8)):
      with pytest.raises(CheckpointError, match=text):
        checkpointer.restore(target_of(trees[2], mesh), 3)
    assert re.search(text, checkpointer.verify(3)["model/w"])


def test_fallback_takes_the_newest_good_step_and_says_so(saved):
  directory, trees = saved
  flip(chunk_of(directory, 2))
  checkpointer = Checkpointer(directory)
  with pytest.warns(UserWarning, match="step 2 was passed over: step 2 is damaged"):
    again = checkpointer.restore(target_of(trees[1]), on_corrupt="fallback")
  assert_same(again, trees[1])
  assert checkpointer.restored.step == 1
  flip(chunk_of(directory, 1))
  with (
    pytest.warns(UserWarning, match="step 2 was"),
    pytest.raises(CheckpointError, match="step 1 is damaged"),
  ):
    checkpointer.restore(target_of(trees[1]), on_corrupt="fallback")


def test_fallback_is_for_damage_only(saved):
  directory, _ = saved
  with pytest.raises(CheckpointError, match="cannot restore step 2: it does not fit the target"):
    Checkpointer(directory).restore(target_of({"other": jax.numpy.ones(3)}), on_corrupt="fallback")


@pytest.mark.parametrize(
  ("harm", "text"),
  [
    (lambda f: f.unlink(), r"zarr\.json is missing"),
    (lambda f: f.write_bytes(f.read_bytes()[:-3]), r"zarr\.json has [\d,]+ bytes instead of [\d,]+"),
    (
      lambda f: f.write_bytes(f.read_bytes().replace(b"float32", b"float16")),
      r"zarr\.json does not have the cont",
    ),
  ],
)
def test_metadata_is_checked_before_reading(saved, harm, text):
  directory, trees = saved
  harm(directory / "2" / "model" / "w" / "zarr.json")
  with pytest.raises(CheckpointError, match=f"step 2 is damaged: model/w/{text}"):
    Checkpointer(directory, verify="metadata").restore(target_of(trees[2]))


def test_a_damaged_manifest_names_the_file(saved):
  directory, trees = saved
  file = directory / "2" / "nnx_parallel.json"
  whole = file.read_text()
  for text, why in [
    (whole[:100], "it cannot be read as JSON"),
    (whole.replace('"step":2', '"step":3'), "its contents do not have the SHA-256"),
    (whole.replace('"digest":', '"digest":1'), "its contents do not have the SHA-256"),
    ("[]", "it cannot be read as JSON"),
  ]:
    file.write_text(text)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))} is damaged: {why}"):
      Checkpointer(directory).restore(target_of(trees[2]))
    assert Checkpointer(directory).latest() == 1


@pytest.mark.parametrize("number", ["2", "0", "9", "2.5", '"3"', "null"])
def test_a_damaged_format_is_damage(saved, number):
  directory, trees = saved
  file = directory / "2" / "nnx_parallel.json"
  whole = file.read_text()
  file.write_text(whole.replace('"format":5', f'"format":{number}'))
  with pytest.warns(UserWarning, match=r"step 2 was passed over: .* do not have the SHA-256"):
    assert_same(Checkpointer(directory).restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])


def test_formats_of_other_versions(saved, monkeypatch):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  record = checkpointer.metadata(2)
  with monkeypatch.context() as patch:
    patch.setattr(manifest, "FORMAT", 7)
    manifest.write(record, checkpointer.directory / "2")
  text = r"it has format 7, and this version reads format 5\.\n  Fix: install the nnx_parallel"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target_of(trees[2]), on_corrupt="fallback")


def test_a_missing_manifest_is_damage(saved):
  directory, trees = saved
  checkpointer = Checkpointer(directory)
  checkpointer.save(3, trees[2])
  (directory / "2" / "nnx_parallel.json").unlink()
  assert_same(checkpointer.restore(target_of(trees[2])), trees[2])  # an old one is in nobody's way
  (directory / "3" / "nnx_parallel.json").unlink()
  text = r"3 is damaged, or something else wrote it: nnx_parallel\.json is missing\.\n  Fix: restore another"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.restore(target_of(trees[1]))
  with (
    pytest.warns(UserWarning, match="step 3 was passed over"),
    pytest.warns(UserWarning, match="step 2 was passed over"),
  ):
    assert_same(checkpointer.restore(target_of(trees[1]), on_corrupt="fallback"), trees[1])
  assert checkpointer.latest() == 1
  assert checkpointer.verify(1) == {}
  for step in (2, 3, "latest"):
    assert list(checkpointer.verify(step)) == ["nnx_parallel.json"]
  text = r"(?s)cannot save step 2: .* was not written by nnx_parallel, or is damaged.*Fix: move that fold"
  with pytest.raises(CheckpointError, match=text):
    checkpointer.save(2, trees[2], overwrite=True)


def test_latest_skips_what_is_not_whole(saved):
  directory, _ = saved
  (directory / "7").mkdir()
  shutil.copytree(directory / "2", directory / "8")
  (directory / "8" / "nnx_parallel.json").unlink()
  shutil.copytree(directory / "2", directory / "9")
  chunk_of(directory, 9).unlink()
  checkpointer = Checkpointer(directory)
  assert checkpointer.latest() == 2
  assert checkpointer.steps() == [1, 2, 9]


def test_the_item_that_is_not_wanted_may_be_gone(tmp_path):
  tree = arrays()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree, {"mu": tree["w"]})
  shutil.rmtree(tmp_path / "1" / "optimizer")
  assert_same(checkpointer.restore(target_of(tree), optimizer="drop"), tree)


def test_a_limit_on_threads_is_no_damage(saved, monkeypatch):
  directory, trees = saved

  def limited(*_, **__):
    raise RuntimeError("can't start new thread")

  with monkeypatch.context() as patch:
    patch.setattr(array_io, "read", limited)
    text = r"(?s)cannot read .*can.t start new thread.*not a sign of damage"
    with pytest.raises(CheckpointError, match=text) as error:
      Checkpointer(directory).restore(target_of(trees[2]), on_corrupt="fallback")
  assert not isinstance(error.value, DamagedError)
  assert_same(Checkpointer(directory).restore(target_of(trees[2])), trees[2])
