from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_parallel as nxp
from nnx_parallel.errors import ReportError
from nnx_parallel.report import svg
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.memory import memory_plan
from nnx_parallel.report.estimate.roofline import predict_time
from nnx_parallel.report.html import notebook_frame, plan_page, report_page, report_svg
from nnx_parallel.report.search.search import search
from nnx_parallel.report.units import format_bytes, format_seconds
from report import layouts

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "img", "rect", "line", "i"}


@pytest.fixture(scope="module")
def report():
  plan = layouts.plan(data=2, fsdp=2, tensor=2)
  return compile_report(nxp.train_step(layouts.loss), plan, batch=layouts.batch(), topology="cpu:8")


@pytest.fixture(scope="module")
def found():
  rules = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor")
  return search(layouts.init, layouts.loss, "tpu:v5e:4x4", batch=layouts.batch(), rules=rules)


@pytest.fixture(scope="module")
def pages(report, found):
  plan = layouts.plan(fsdp=4, tensor=2)
  memory = memory_plan(plan, layouts.loss, layouts.batch(), chip="h100")
  time = predict_time(plan, layouts.loss, layouts.batch(), chip="h100")
  return {
    "report": report_page(report),
    "plan": plan_page(plan, memory, time, title="my <model>"),
    "search": found.to_html(),
  }


class Structure(HTMLParser):
  """Collects tags, headings and everything that would be loaded from elsewhere."""

  def __init__(self):
    super().__init__()
    self.tags, self.headings, self.outside, self._in = [], [], [], None

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self._in = tag
    self.outside += [v for k, v in attrs if k in ("src", "href", "data") and v]

  def handle_data(self, data):
    if self._in in ("h1", "h2"):
      self.headings.append(data)
    self._in = None


@pytest.mark.parametrize("name", ["report", "plan", "search"])
def test_a_page_is_complete_and_loads_nothing(pages, name):
  found = Structure()
  found.feed(pages[name])
  assert found.outside == []
  assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", pages[name])
  assert found.tags.count("svg") >= {"report": 5, "plan": 5, "search": 2}[name]
  expected = {
    "search": [
      "Fastest for their memory",
      "Other meshes, at their best",
      "Predicted step of the winner",
      "The winner",
    ],
    "report": ["Memory per device", "Predicted step", "Sent per step, by kind and axis", "Devices"],
    "plan": [
      "Planned memory per device",
      "Predicted step",
      "Predicted sending, by axis",
      "State by size, per device",
      "Devices",
      "Largest leaves",
    ],
  }
  assert [h for h in found.headings if h in expected[name]] == expected[name]


def test_a_plan_is_headed_by_what_it_is_and_whether_it_fits(pages):
  head = "my &lt;model&gt; on data=1 x fsdp=4 x tensor=2 = 8 devices"
  assert f"<title>{head}: fits h100</title>" in pages["plan"]
  assert f"<h1>{head}</h1>" in pages["plan"]
  assert re.search(
    r"<p class='verdict fits'>FITS, as planned: a step needs about .* usable on h100\.", pages["plan"]
  )


def test_equal_layers_are_one_row_of_a_plans_page():
  layers = lambda: nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(12)])
  page = plan_page(nxp.plan(layers, nxp.abstract_mesh(fsdp=8), nxp.fsdp(min_size=8)))
  assert "<td>*.kernel</td><td class=n>12</td><td>float32[8,8]</td><td>(-, fsdp)</td>" in page
  assert "<td>3.kernel</td>" not in page
  assert "<title>3.kernel: 32 B</title>" in page


def test_a_cloud_has_scales_and_uses_them():
  points = [(svg.Item("a", 3 * 2**20, ""), 0.002), (svg.Item("b", 2**20, "", "front"), 0.004)]
  picture = svg.scatter(
    points, ("memory", "time"), svg.Item("usable", 2**34, "16 GiB"), (format_bytes, format_seconds)
  )
  assert "usable 16 GiB: far to the right" in picture
  assert [text for text in re.findall(r">([^<>]+)</text>", picture) if re.match(r"\d.* (MiB|ms)$", text)] == [
    "1 MiB", "2 MiB", "1.0 ms", "2.0 ms", "3.0 ms", "4.0 ms",
  ]  # fmt: skip
  right = max(float(x) for x in re.findall(r"cx='([\d.]+)'", picture))
  assert right > 800
  near = svg.scatter(points, ("memory", "time"), svg.Item("usable", 2**23, "8 MiB"))
  assert "far to the right" not in near


@pytest.mark.parametrize("picture", ["memory", "treemap", "devices", "collectives", "timeline"])
def test_pictures_are_valid_xml(report, picture):
  text = report_svg(report, picture)
  root = ET.fromstring(text[text.index("<svg") :])
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) >= 1


def test_every_label_of_a_bar_is_in_the_picture(report):
  text = report_svg(report, "memory")
  assert all(name in text for name in ("parameters", "optimizer", "working memory"))


def test_a_report_that_sends_nothing_has_no_picture_of_it(report):
  quiet = dataclasses.replace(report, collectives=())
  with pytest.raises(
    ReportError, match=r"nothing to draw in 'collectives'(.|\n)*Nothing is sent(.|\n)*Fix: another picture"
  ):
    report_svg(quiet, "collectives")


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_picture_is_written_for_papers(report, suffix, tmp_path):
  pytest.importorskip("matplotlib")
  file = tmp_path / f"memory.{suffix}"
  nxp.save_svg(report_svg(report, "memory"), file)
  assert file.read_bytes()[:4] == {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix]


def test_a_png_shows_what_the_svg_shows(tmp_path):
  image = pytest.importorskip("matplotlib.image")
  parts = [svg.Item("a", 3, "3"), svg.Item("b", 1, "1")]
  nxp.save_svg(svg.stacked_bar(parts), tmp_path / "bar.png")
  pixels = image.imread(tmp_path / "bar.png")
  row = pixels[pixels.shape[0] * 36 // 88, :, 2]  # through the bar: blue is high, orange has none
  assert row[pixels.shape[1] // 3] > 0.6
  assert row[-pixels.shape[1] // 10] < 0.1


def test_another_file_is_refused(tmp_path):
  with pytest.raises(ReportError, match=r"cannot write a picture as bar\.gif(.|\n)*\.svg, \.png or \.pdf"):
    nxp.save_svg(svg.bars([svg.Item("a", 1, "1")]), tmp_path / "bar.gif")


def test_a_search_is_drawn_as_a_cloud_with_its_front(found):
  page = found.to_html()
  marked = sum(c.time.seconds <= 4 * found.pareto()[0].time.seconds for c in found.pareto())
  assert page.count("r='5'") == marked >= 1
  assert page.count("r='2'") >= 10
  assert "nxp.make_mesh" in page
  assert "usable 15.75 GiB" in page


def test_an_unknown_picture_is_refused(report):
  with pytest.raises(ReportError, match="no picture 'pie'"):
    report_svg(report, "pie")  # pyright: ignore[reportArgumentType]


def test_names_with_markup_are_escaped(report):
  text = svg.treemap([svg.Item("<b>&'\"", 1, "1")])
  ET.fromstring(text)
  assert "<b>" not in text
  assert "&quot;" in notebook_frame('<p class="x">')


@settings(deadline=None)
@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=40))
def test_a_treemap_fills_its_box_in_proportion(values):
  values = sorted(values, reverse=True)
  boxes = svg.squarify(values, svg.Box(0, 0, 900, 400))
  total = sum(values)
  for value, box in zip(values, boxes, strict=True):
    assert box.width * box.height == pytest.approx(900 * 400 * value / total, rel=1e-3, abs=1e-2)
    assert -1e-6 <= box.x <= box.x + box.width <= 900.1
    assert -1e-6 <= box.y <= box.y + box.height <= 400.1


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("name", ["report", "plan", "search"])
def test_a_browser_lays_the_page_out(pages, name, tmp_path):
  """Opens the page, and lets it say how wide it is, how many shapes it drew, and whether text overlaps."""
  probe = """<script>addEventListener('load', () => {
    const rects = [...document.querySelectorAll('svg rect')].filter(r => r.getBBox().width > 0).length;
    const wide = document.documentElement.scrollWidth <= innerWidth;
    const cut = [...document.querySelectorAll('svg')].flatMap(s => {
      const box = s.getBoundingClientRect();
      return [...s.querySelectorAll('text')].filter(t => {
        const b = t.getBoundingClientRect();
        return b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1;
      }).map(t => t.textContent);
    });
    document.title = 'PROBE ' + btoa(JSON.stringify([rects, wide, document.body.scrollHeight, cut.join()]));
  })</script>"""
  page = tmp_path / "page.html"
  page.write_text(pages[name].replace("</body>", probe + "</body>"))
  command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,900"]
  done = subprocess.run(
    [*command, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{page}"],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  found = re.search(r"<title>PROBE ([\w+/=]+)</title>", done.stdout)
  assert found, done.stderr[-500:]
  rects, no_sideways_scroll, height, cut = json.loads(base64.b64decode(found.group(1)))
  assert rects >= {"report": 10, "plan": 10, "search": 3}[name]
  assert cut == ""
  assert no_sideways_scroll
  assert height > {"report": 900, "plan": 900, "search": 700}[name]
