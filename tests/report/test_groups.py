import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnx_parallel.report.program.hlo_devices import AxisFinder, group_labels

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def lists(sizes, axes):
  """Groups over `axes`, written as nested lists: the slow and obvious way."""
  ids = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
  names = list(sizes)
  kept = [n for n in names if n not in axes]
  moved = ids.transpose([names.index(n) for n in (*kept, *axes)])
  rows = moved.reshape(-1, int(np.prod([sizes[a] for a in axes])))
  return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"


@pytest.mark.parametrize("text", [
  "{{0,2},{4,6},{1,3},{5,7}}, use_global_device_ids=true", "[4,2]<=[4,2]T(1,0), dimensions={0}",
  "mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}, use_global_device_ids=true",
  "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}", "mesh['a'=4,'b'=2] {'a':(2)2}",
  "mesh['x'=2,'y'=4], device_ids=(0,2,1,3,4,6,5,7) {'y':(2)2}",
])  # fmt: skip
def test_every_encoding_of_the_same_groups_names_the_same_axis(text):
  assert AxisFinder(SIZES).match(group_labels(text, 8)) == (("fsdp",), True)


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
