"""What the pictures of reports show: every part, with its size, on scales with units."""

import dataclasses
import sys

import pytest
from matplotlib.text import Text

import nnx_parallel as nxp
from nnx_parallel.errors import ReportError
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.roofline import StepTime
from nnx_parallel.report.figures import devices_figure, memory_figure, time_figure
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
  chip = nxp.report.chip("v5e")
  figure = memory_figure({"parameters": 4 * GIB, "optimizer": 8 * GIB, "working memory": 6 * GIB}, chip)
  assert drawn_bars(figure) == [(0, 4), (4, 12), (12, 18)]
  shown = texts(figure)
  assert {"parameters", "optimizer", "working memory", "4 GiB", "8 GiB", "6 GiB"} <= set(shown)
  assert "memory per device (GiB)" in shown
  assert "usable: 15.75 GiB" in shown
  assert figure.axes[0].lines[0].get_xdata()[0] == pytest.approx(15.75)


def test_what_is_usable_far_away_is_said_in_words():
  figure = memory_figure({"parameters": 2**20}, nxp.report.chip("v5e"))
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
  shown = texts(report.picture("memory"))
  assert {"parameters", "optimizer", "working memory"} <= set(shown)


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


def test_a_large_mesh_is_cut_and_the_rest_is_counted():
  shown = texts(devices_figure({"data": 64, "fsdp": 4, "tensor": 1, "expert": 64}))
  assert f"In each box: the number of the device. {64 * 4 * 64 - 16 * 16} more are not drawn." in shown
  assert {"data, fsdp", "expert"} <= set(shown)
  assert "0" in texts(devices_figure({"data": 1}))


def test_empty_subjects_are_drawn_empty():
  idle = dataclasses.replace(TIME, compute=0.0, memory=0.0, overlapped={}, waiting={})
  assert drawn_bars(memory_figure({"parameters": 0}, nxp.report.chip("v5e"))) == []
  assert drawn_bars(time_figure(idle)) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("picture", ["memory", "devices", "collectives", "timeline"])
def test_without_matplotlib_the_error_says_what_to_install(report, picture, monkeypatch):
  for name in ("matplotlib", "matplotlib.figure", "matplotlib.patches"):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(ReportError, match=r"Fix: pip install 'nnx-parallel\[plots\]'"):
    report.picture(picture)
