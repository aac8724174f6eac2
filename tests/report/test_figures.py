"""What the pictures of reports show: every part, with its size, on scales with units."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from matplotlib.text import Text

import nnx_parallel as nxp
from nnx_parallel.core.figures import svg_text
from nnx_parallel.core.text import format_bytes
from nnx_parallel.errors import ReportError
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.roofline import StepTime
from nnx_parallel.report.figures import (
  cut,
  devices_figure,
  memory_figure,
  search_figure,
  time_figure,
  treemap,
)
from nnx_parallel.report.search.search import search
from report import layouts

GIB = 2**30
TIME = StepTime(
  compute=0.002,
  memory=0.001,
  overlapped={"fsdp": 0.0015},
  waiting={"tensor": 0.001},
  arithmetic={"float32": 1e9},
  model_flops=1e9,
  peak=1e15,
)


@pytest.fixture(scope="module")
def report():
  plan = layouts.plan(data=2, fsdp=2, tensor=2)
  return compile_report(
    nxp.train_step(layouts.loss), plan, batch=layouts.batch(), topology="cpu:8", chip="v5e"
  )


def texts(figure) -> list[str]:
  figure.draw_without_rendering()
  return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def drawn_bars(figure) -> list[tuple[float, float]]:
  """Start and end of each bar, from the top."""
  patches = sorted(figure.axes[0].patches, key=lambda bar: bar.get_y())
  return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in patches]


def test_memory_adds_up_from_bar_to_bar_and_shows_what_is_usable():
  chip = nxp.chip("v5e")
  figure = memory_figure({"parameters": 4 * GIB, "optimizer": 8 * GIB, "working memory": 6 * GIB}, chip)
  assert drawn_bars(figure) == [(0, 4), (4, 12), (12, 18)]
  shown = texts(figure)
  assert {"parameters", "optimizer", "working memory", "4 GiB", "8 GiB", "6 GiB"} <= set(shown)
  assert "memory per device (GiB)" in shown
  assert "usable: 15.75 GiB" in shown
  assert figure.axes[0].lines[0].get_xdata()[0] == pytest.approx(15.75)


def test_what_is_usable_far_away_is_said_in_words():
  figure = memory_figure({"parameters": 2**20}, nxp.chip("v5e"))
  assert figure.axes[0].get_xlabel() == "memory per device (MiB); usable: 15.75 GiB, far to the right"
  assert not figure.axes[0].lines


def test_waiting_starts_where_the_longest_overlapping_term_ends():
  figure = time_figure(TIME)
  ends = ((0, 2), (0, 1), (0, 1.5), (2, 3), (3, 3.15))
  share = 100 / 3.15
  assert drawn_bars(figure) == [pytest.approx((start * share, end * share)) for start, end in ends]
  assert figure.axes[0].get_xlabel() == "share of a step (%)"
  assert {"overlaps", "waited for", "exposed communication", "tensor (waiting)"} <= set(texts(figure))


def test_a_report_has_each_picture(report):
  kinds = {f"{kind} over {axes}" for kind, axes in report.bytes_by("kind", "axes")}
  assert kinds <= set(texts(report.picture("collectives")))
  assert "share of a step (%)" in texts(report.picture("timeline"))
  assert {str(n) for n in range(8)} <= set(texts(report.picture("devices")))
  assert {"parameters", "optimizer", "working memory"} <= set(texts(report.picture("memory")))
  assert {"up.kernel\n8 KiB", "batch\n64 KiB", "model: 16 KiB per device"} <= set(
    texts(report.picture("treemap"))
  )


@pytest.mark.parametrize(
  ("picture", "changed", "reason"),
  [
    ("collectives", {"collectives": ()}, "'collectives': the step sends nothing"),
    ("timeline", {"chip": None}, "'timeline': no figures of the chip are known"),
    ("pie", {}, "no picture 'pie'"),
  ],
)
def test_what_cannot_be_drawn_says_why(report, picture, changed, reason):
  with pytest.raises(ReportError, match=rf"{reason}(.|\n)*Fix: (another|one of)"):
    dataclasses.replace(report, **changed).picture(picture)


def test_a_treemap_sums_the_layers_of_a_list_and_its_text_stays_inside_the_boxes():
  leaves = [(f"blocks.{n}.mlp.{name}.kernel", 2**18, "model") for n in range(32) for name in ("up", "down")]
  leaves += [(f"head{n}.kernel", 2**20 // (n + 1), "model") for n in range(20)]
  figure = treemap([*leaves, ("optimizer/opt_state.0.mu.$x$", 2**24, "optimizer"), ("empty", 0, "model")])
  axes = figure.axes[0]
  boxes = [patch.get_window_extent() for patch in axes.patches]
  assert len(boxes) == 2 + 20 + 2
  labels = [text for text in axes.texts if text.get_visible()]
  assert "blocks.*.mlp.up.kernel\n32 arrays\n8 MiB" in [label.get_text() for label in labels]
  assert len(labels) > 5
  for label in labels:
    inner = label.get_window_extent()
    assert any(
      box.x0 <= inner.x0 and inner.x1 <= box.x1 and box.y0 <= inner.y0 and inner.y1 <= box.y1 for box in boxes
    )
  assert "mu.$x$\n16 MiB" in [label.get_text().replace("\\$", "$") for label in labels]
  total = 16 * 2**20 + sum(2**20 // (n + 1) for n in range(20))
  assert f"model: {format_bytes(total)} per device" in texts(figure)


@pytest.mark.parametrize("values", [[1.0], [5.0, 3.0, 1.0, 1.0], [1e6, *[1.0] * 39]])
def test_a_rectangle_is_cut_in_proportion(values):
  for value, (x, y, width, height) in zip(values, cut(values, (0.0, 0.0, 9.0, 4.0)), strict=True):
    assert width * height == pytest.approx(36 * value / sum(values))
    assert 0 <= x <= x + width <= 9 + 1e-9
    assert 0 <= y <= y + height <= 4 + 1e-9


def test_a_large_mesh_is_cut_and_the_rest_is_counted():
  shown = texts(devices_figure({"data": 64, "fsdp": 4, "tensor": 1, "expert": 64}))
  assert f"In each box: the number of the device. {64 * 4 * 64 - 16 * 16} more are not drawn." in shown
  assert {"data, fsdp", "expert"} <= set(shown)
  assert "0" in texts(devices_figure({"data": 1}))


def test_a_search_is_a_cloud_with_its_front():
  rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")
  found = search(layouts.init, layouts.loss, "tpu:v5e:4x4", batch=layouts.batch(), rules=rules)
  figure = search_figure(found)
  others, front, fastest, smallest = figure.axes[0].lines
  best = found.pareto()[0].time.seconds
  assert len(front.get_xdata()) == sum(c.time.seconds <= 4 * best for c in found.pareto()) > 1
  assert len(others.get_xdata()) >= 10
  assert fastest.get_ydata()[0] == min(front.get_ydata())
  assert smallest.get_xdata()[0] == min(front.get_xdata())
  shown = texts(figure)
  assert "predicted time of a step, relative to the fastest" in shown
  assert any(f"fastest: {found.pareto()[0].mesh_text}" in text for text in shown)


def test_a_figure_is_the_same_text_each_time_and_its_letters_are_letters(report):
  first, again = (svg_text(report.picture("memory")) for _ in range(2))
  assert first == again
  assert ">working memory</text>" in first


def test_empty_subjects_are_drawn_empty():
  idle = dataclasses.replace(TIME, compute=0.0, memory=0.0, overlapped={}, waiting={})
  assert texts(treemap([])) == []
  assert "model: 0 B per device" in texts(treemap([("a", 0, "model")]))
  assert drawn_bars(memory_figure({"parameters": 0}, nxp.chip("v5e"))) == []
  assert drawn_bars(time_figure(idle)) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("picture", ["memory", "treemap", "devices", "collectives", "timeline"])
def test_without_matplotlib_the_error_says_what_to_install(report, picture, monkeypatch):
  for name in ("matplotlib", "matplotlib.figure", "matplotlib.patches"):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(ReportError, match=r"Fix: pip install 'nnx-parallel\[plots\]'"):
    report.picture(picture)
