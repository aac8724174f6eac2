import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_parallel.report.program.hlo_devices import AxisFinder, group_labels, group_rows, pair_labels

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def lists(sizes, axes):
  """Groups over `axes`, written as nested lists: the slow and obvious way."""
  ids = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
  names = list(sizes)
  kept = [n for n in names if n not in axes]
  moved = ids.transpose([names.index(n) for n in (*kept, *axes)])
  rows = moved.reshape(-1, int(np.prod([sizes[a] for a in axes])))
  return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"


@pytest.mark.parametrize(
  "text",
  [
    "{{0,2},{4,6},{1,3},{5,7}}, use_global_device_ids=true",
    "[4,2]<=[4,2]T(1,0), dimensions={0}",
    "mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}, use_global_device_ids=true",
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}",
    "mesh['a'=4,'b'=2] {'a':(2)2}",
    "mesh['x'=2,'y'=4], device_ids=(0,2,1,3,4,6,5,7) {'y':(2)2}",
  ],
)
def test_every_encoding_of_the_same_groups_names_the_same_axis(text):
  labels, rows = group_labels(text, 8), group_rows(text, 8)
  assert AxisFinder(SIZES).match(labels) == (("fsdp",), True)
  assert sorted(n for row in rows for n in row) == list(range(8))
  assert all({int(labels[n]) for n in row} == {min(row)} for row in rows)


def test_device_ids_as_a_transposed_iota():
  # A 2x4 mesh whose devices run down the columns: position (x, y) holds id 2y + x.
  labels = group_labels("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", 8)
  assert labels.tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def test_empty_braces_mean_everyone():
  assert AxisFinder(SIZES).match(group_labels("{}", 8)) == (("data", "fsdp", "tensor"), True)


def test_half_of_an_axis_is_reported_as_a_part():
  found = AxisFinder({"data": 2, "model": 4}).match(group_labels("{{0,1},{2,3},{4,5},{6,7}}", 8))
  assert found == (("model",), False)


def test_pairs_of_a_ring_are_one_axis():
  pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
  assert AxisFinder({"data": 2, "ring": 4}).match(pair_labels(pairs, 8)) == (("ring",), True)


def test_unreadable_groups_are_an_error():
  with pytest.raises(ValueError, match="cannot read the device groups 'gibberish'"):
    group_labels("gibberish", 8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_set_of_axes_of_any_mesh_is_recovered(shape, data):
  sizes = {f"a{n}": size for n, size in enumerate(shape)}
  wide = [name for name, size in sizes.items() if size > 1]
  options = [c for k in range(1, len(wide) + 1) for c in itertools.combinations(wide, k)]
  if not options:
    return
  axes = data.draw(st.sampled_from(options))
  labels = group_labels(lists(sizes, axes), int(np.prod(shape)))
  assert AxisFinder(sizes).match(labels) == (axes, True)
