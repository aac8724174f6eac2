import hypothesis
import pytest
from hypothesis import strategies as st

from nnx_parallel.checkpoint import paths
from nnx_parallel.errors import CheckpointError

PARTS = st.recursive(
  st.one_of(st.text(max_size=6), st.text("0.-,()\\s", max_size=5), st.integers(-1000, 1000)),
  lambda inner: st.lists(inner, max_size=3).map(tuple),
  max_leaves=4,
)


@hypothesis.given(st.lists(PARTS, max_size=5).map(tuple))
def test_any_path_comes_back(path):
  assert paths.parse(paths.format(path)) == path


@hypothesis.given(st.lists(st.lists(PARTS, max_size=3).map(tuple), max_size=4, unique=True))
def test_different_paths_stay_different(many):
  assert len({paths.format(path) for path in many}) == len(many)
  assert len({paths.file_name(paths.format(path)) for path in many}) == len(many)


def test_file_names_are_short_and_safe():
  name = paths.file_name("x/" * 300)
  assert len(name) < 200
  assert "/" not in name
  assert paths.file_name("_METADATA") == "%5FMETADATA"


def test_other_keys_are_refused():
  with pytest.raises(CheckpointError, match=r"the part 1\.5 is a float.*\n  Fix: use names, ints or tuples"):
    paths.format(("a", 1.5))
