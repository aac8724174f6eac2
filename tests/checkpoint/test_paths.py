import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.checkpoint.manifest import file_name
from nnx_parallel.errors import CheckpointError


@pytest.mark.slow
@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.text(max_size=6), max_size=4, unique=True))
def test_different_names_have_different_folders(names):
  assert len({file_name(name) for name in names}) == len(names)


def test_file_names_are_short_and_safe():
  name = file_name("x/" * 300)
  assert len(name) < 200
  assert "/" not in name
  assert file_name("_METADATA") == "%5FMETADATA"
  assert [file_name(name) for name in ("layers.0.kernel", "a/b", "")] == ["layers.0.kernel", "a%2Fb", "%"]


def test_two_leaves_of_one_name_are_refused(tmp_path):
  tree = {"a.b": np.ones(2), "a": {"b": np.zeros(2)}}
  with pytest.raises(CheckpointError, match=r"'a\.b': there are two"):
    Checkpointer(tmp_path).save(1, tree)
