"""The text recipe: what it reads, what it holds out, where its cursor points, and what the model sees."""

import dataclasses
import itertools
import sysconfig

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel.errors import RecipeError
from nnx_parallel.recipes import text_lm

SMALL = text_lm.Config(width=16, depth=2, heads=2, mlp=24, sequence=12, batch=4, held_out_batches=2)


def small(config=SMALL):
  # The names of the dims mean nothing without a mesh and rules.
  with nnx.use_eager_sharding(False):
    return text_lm.init(config)


@pytest.fixture
def folder(tmp_path):
  for i in range(40):
    (tmp_path / f"{i}.txt").write_text(f"file {i}: " + "words and more words. " * (i + 2))
  return tmp_path


def windows(folder, start, count, config=SMALL):
  source = text_lm.batches(start, text=str(folder), config=config)
  rows = [b["inputs"] for b in itertools.islice(source, -(-count // config.batch))]
  return np.concatenate(rows)[:count]


# Text


def test_by_default_it_reads_the_standard_library_and_nothing_installed_beside_it():
  root = sysconfig.get_paths()["stdlib"]
  files = text_lm.find_text(text_lm.Path(root), suffix=".py", skip=text_lm.NOT_THE_LIBRARY)
  assert "argparse.py" in files
  assert not [f for f in files if "site-packages" in f or not f.endswith(".py")]
  train, held_out = text_lm.read_text(None, 1000)
  assert len(train) + len(held_out) > sum(map(len, files.values()))  # and the line ends between files


def test_hidden_and_binary_files_are_no_text(tmp_path):
  (tmp_path / "deep").mkdir()
  (tmp_path / ".git").mkdir()
  (tmp_path / "deep" / "a.md").write_text("text")
  (tmp_path / ".git" / "config").write_text("hidden")
  (tmp_path / ".hidden").write_text("hidden")
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / "zeros.bin").write_bytes(b"ab\0cd")
  (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
  assert text_lm.find_text(tmp_path) == {"deep/a.md": b"text"}


def test_train_and_held_out_share_no_file_and_new_files_move_none(folder):
  files = text_lm.find_text(folder)
  train, held_out = (set(side) for side in text_lm.split_files(files))
  assert train
  assert held_out
  assert not train & held_out
  assert train | held_out == set(files.values())
  more = files | {f"new{i}": b"new %d" % i for i in range(30)}
  later_train, later_held_out = (set(side) for side in text_lm.split_files(more))
  assert train < later_train
  assert held_out <= later_held_out


@pytest.mark.parametrize("content", [None, "tiny"])
def test_too_little_text_is_an_error_that_says_how_much_there_is(tmp_path, content):
  if content:
    (tmp_path / "a.txt").write_text(content)
  count, size = (1, 4) if content else (0, 0)
  said = (
    rf"a window takes 13 bytes\.\n  {count} text files, {size} bytes for training, 0 held out\n  Fix: --text"
  )
  with pytest.raises(RecipeError, match=said):
    next(text_lm.batches(text=str(tmp_path), config=SMALL))


# Cursor


def test_targets_are_the_next_bytes(folder):
  batch = next(text_lm.batches(text=str(folder), config=SMALL))
  assert batch["inputs"].shape == batch["targets"].shape == (4, 12)
  assert batch["inputs"].dtype == np.int32
  np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("start", [1, 4, 9])
def test_the_cursor_is_a_sample_index_whatever_the_batch_size(folder, start):
  straight = windows(folder, 0, 20)
  wide = dataclasses.replace(SMALL, batch=5)
  np.testing.assert_array_equal(windows(folder, start, 8), straight[start : start + 8])
  np.testing.assert_array_equal(windows(folder, start, 10, wide), straight[start : start + 10])


def test_held_out_batches_are_fixed_and_end(folder):
  first = list(text_lm.batches(split="held_out", text=str(folder), config=SMALL))
  again = list(text_lm.batches(99, split="held_out", text=str(folder), config=SMALL))
  assert len(first) == 2
  np.testing.assert_array_equal(first[1]["inputs"], again[1]["inputs"])


# Model


def test_no_position_sees_a_later_byte():
  model, tokens = small(), np.arange(24, dtype=np.int32).reshape(2, 12)
  changed = tokens.copy()
  changed[:, 7] = 200
  logits = nnx.jit(lambda model, tokens: model(tokens))
  difference = jnp.abs(logits(model, tokens) - logits(model, changed)).max(axis=(0, 2))
  assert (difference[:7] == 0.0).all()
  assert (difference[7:] > 0.0).all()


def test_loss_is_in_nats_and_in_bits():
  batch = {"inputs": np.zeros((2, 12), np.int32), "targets": np.ones((2, 12), np.int32)}
  nats, metrics = text_lm.loss(small(), batch)
  assert nats.shape == ()
  np.testing.assert_allclose(metrics["bits_per_byte"] * np.log(2), nats, rtol=1e-6)
