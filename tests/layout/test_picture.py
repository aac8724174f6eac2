"""Pictures: the blocks drawn are the ones that the devices hold."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.text import Text

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.layout.show.picture import elements, holders

GUIDES = Path(__file__).resolve().parent.parent.parent / "guides"


class Holder(nnx.Module):
  def __init__(self, shape, names):
    self.w = nnx.Param(jnp.zeros(shape), **named(*names))


def plan_of(shape, names, mesh, **kwargs):
  return nxp.plan(lambda: Holder(shape, names), mesh, **kwargs)


CASES = {
  "rows and columns": ((8, 8), ("x", "y")),
  "one split dim": ((8, 8), (None, "y")),
  "two axes on one dim": ((8, 8), (("y", "x"), None)),
  "three dims": ((4, 2, 4), ("z", "x", "y")),
  "whole": ((8, 8), (None, None)),
  "scalar": ((), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_blocks_are_those_of_jax(case):
  shape, names = CASES[case]
  mesh = nxp.make_mesh(x=2, y=2, z=2)
  leaf = plan_of(shape, names, mesh)["w"]
  blocks = holders(leaf)
  held = {
    device: f"[{', '.join(elements(leaf, dim, shard) for dim, shard in enumerate(index))}]"
    for *index, device in ((*at[:-1], int(device)) for at, device in np.ndenumerate(blocks))
  }
  for device, slices in leaf.sharding.devices_indices_map(shape).items():
    whole = [piece == slice(None) for piece in slices]
    told = [":" if w else f"{p.start}:{p.stop}" for w, p in zip(whole, slices, strict=True)]
    assert held[device.id] == f"[{', '.join(told)}]"
  assert len(held) == 8


def texts(figure):
  figure.draw_without_rendering()
  return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def boxes(figure, style):
  return [box for box in figure.axes[0].patches if box.get_linestyle() == style]


def test_a_picture_names_the_array_its_sides_and_every_device():
  figure = plan_of((8, 8), ("x", "y"), nxp.make_mesh(x=4, y=2)).picture("w")
  shown = texts(figure)
  assert "w  float32[8,8]  (x, y)\nmesh x=4 x y=2; 32 B per device" in shown
  assert {"dim 0 over x", "dim 1 over y", "2:4", "4:8"} <= set(shown)
  assert {str(device.id) for device in jax.devices()} <= set(shown)


def test_dims_downwards_are_told_apart():
  shown = texts(plan_of((4, 2, 4), ("z", "x", "y"), nxp.make_mesh(x=2, y=2, z=2)).picture("w"))
  assert {"dim 0 over z, dim 1 over x", "2:4, 0:1"} <= set(shown)


def test_nothing_overlaps():
  mesh = nxp.abstract_mesh(x=64, y=64)
  for figure in (plan_of((2**20, 2**20), names, mesh).picture("w") for names in (("x", "y"), (None, "y"))):
    shown = texts(figure)
    assert "0:16384" in shown
    found = [t.get_window_extent() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    assert not [(a, b) for n, a in enumerate(found) for b in found[:n] if a.overlaps(b)]
    assert all(figure.bbox.x0 <= t.x0 and t.x1 <= figure.bbox.x1 for t in found)


def test_padding_is_dashed_and_its_elements_are_the_logical_ones():
  figure = plan_of((9, 2), ("x", None), nxp.make_mesh(x=8), uneven="pad").picture("w")
  assert len(boxes(figure, "--")) == 4
  assert {"8:9", "9:9"} <= set(texts(figure))
  assert "In each block: the devices that hold it. Dashed: with padding." in texts(figure)


def test_padding_of_either_side_marks_a_block():
  figure = plan_of((9, 5), ("x", "y"), nxp.make_mesh(x=2, y=4), uneven="pad").picture("w")
  assert len(boxes(figure, "--")) == 6


def test_large_meshes_are_cut_and_the_rest_is_counted():
  figure = plan_of((64, 64), ("x", "y"), nxp.abstract_mesh(x=64, y=64)).picture("w")
  assert len(boxes(figure, "-")) == 16 * 16
  assert any(f"{64 * 64 - 16 * 16} more are not drawn." in text for text in texts(figure))


def test_many_holders_are_summed_up():
  assert "0, 1 ... 7 (8)" in texts(plan_of((8,), (None,), nxp.make_mesh(x=8)).picture("w"))


def test_the_picture_of_the_guide_is_the_one_of_today():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  figure = plan_of((4096, 512), ("tensor", "fsdp"), mesh).picture("w")
  file = (GUIDES / "embedding.svg").read_text()
  assert all(line.removeprefix("w ") in file for text in texts(figure) for line in text.splitlines())


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_picture_is_written_by_matplotlib(suffix, start, tmp_path):
  file = tmp_path / f"w.{suffix}"
  plan_of((8,), ("x",), nxp.make_mesh(x=8)).picture("w").savefig(file)
  assert file.read_bytes().startswith(start)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
  for name in ("matplotlib", "matplotlib.figure", "matplotlib.patches"):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(
    nxp.errors.ReportError, match=r"matplotlib is not installed.\n  Fix: pip install 'nnx-parallel\[plots\]'"
  ):
    plan_of((8,), ("x",), nxp.make_mesh(x=8)).picture("w")
