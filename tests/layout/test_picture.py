"""Pictures: the blocks drawn are the ones that the devices hold."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.layout.show.picture import blocks


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
  found = blocks(leaf)
  held = {device: found.slices(*at) for at, devices in found.holders.items() for device in devices}
  for device, slices in leaf.sharding.devices_indices_map(shape).items():
    whole = [piece == slice(None) for piece in slices]
    told = [":" if w else f"{p.start}:{p.stop}" for w, p in zip(whole, slices, strict=True)]
    assert held[device.id] == f"[{', '.join(told)}]"
  assert len(held) == 8


def test_the_svg_is_well_formed_and_names_every_device():
  svg = plan_of((8, 8), ("x", "y"), nxp.make_mesh(x=4, y=2)).picture("w")
  texts = [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
  assert texts[:2] == ["w  float32[8,8]  (x, y)", "mesh x=4 x y=2; 32 B per device"]
  assert {str(device.id) for device in jax.devices()} <= set(texts)


def test_long_slices_stay_inside_their_block():
  svg = plan_of((2**20, 2**20), ("x", "y"), nxp.abstract_mesh(x=2, y=2)).picture("w")
  root, name = ET.fromstring(svg), "{http://www.w3.org/2000/svg}"
  right = max(
    float(rect.get("x", 0)) + float(rect.get("width")) for rect in root.iter(f"{name}rect") if rect.get("x")
  )
  small = [text for text in root.iter(f"{name}text") if text.get("font-size") == "9"]
  assert small[-1].text == "[524288:1048576, 524288:1048576]"
  assert float(small[-1].get("x")) + 0.6 * 9 * len(small[-1].text) < right


def test_padding_is_dashed_and_its_elements_are_the_logical_ones():
  plan = plan_of((9, 2), ("x", None), nxp.make_mesh(x=8), uneven="pad")
  svg = plan.picture("w")
  assert svg.count("stroke-dasharray") == 4
  assert "[8:9, :]" in svg
  assert "[9:9, :]" in svg
  assert "dashed: with padding" in svg


def test_large_meshes_are_cut_and_the_rest_is_counted():
  plan = plan_of((64, 64), ("x", "y"), nxp.abstract_mesh(x=64, y=64))
  assert f"{64 * 64 - 16 * 16} more blocks not drawn" in plan.picture("w")


def test_many_holders_are_summed_up():
  assert "0, 1 ... 7 (8)" in plan_of((8,), (None,), nxp.make_mesh(x=8)).picture("w")


def test_files(tmp_path):
  plan = plan_of((8, 8), ("x", None), nxp.make_mesh(x=8))
  plan.save_picture("w", str(tmp_path / "w.svg"))
  plan.save_picture("w", str(tmp_path / "w.png"))
  assert (tmp_path / "w.svg").read_text() == plan.picture("w")
  assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
  with pytest.raises(nxp.errors.PlanError, match=r"the suffix '.gif' is not .svg or .png"):
    plan.save_picture("w", "w.gif")


def test_png_without_matplotlib_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.raises(
    nxp.errors.PlanError, match=r"matplotlib is not installed.\n  Fix: pip install .nnx-parallel\[plots\]"
  ):
    plan_of((8,), ("x",), nxp.make_mesh(x=8)).save_picture("w", "w.png")
