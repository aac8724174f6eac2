from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_parallel as nxp
from nnx_parallel.errors import ReportError
from nnx_parallel.report import svg
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.html import notebook_frame, plan_page, report_page, report_svg
from nnx_parallel.report.memory import memory_plan
from report import layouts

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "img", "rect", "line", "i"}


@pytest.fixture(scope="module")
def report():
  plan = layouts.plan(data=2, fsdp=2, tensor=2)
  return compile_report(nxp.train_step(layouts.loss), plan, batch=layouts.batch(), topology="cpu:8")


@pytest.fixture(scope="module")
def pages(report):
  plan = layouts.plan(fsdp=8)
  return {
    "report": report_page(report),
    "plan": plan_page(plan, memory_plan(plan, layouts.loss, layouts.batch(), chip="h100")),
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


@pytest.mark.parametrize("name", ["report", "plan"])
def test_a_page_is_complete_and_loads_nothing(pages, name):
  found = Structure()
  found.feed(pages[name])
  assert found.outside == []
  assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", pages[name])
  assert found.tags.count("svg") >= 3
  expected = {
    "report": ["Memory per device", "Predicted step", "Sent per step, by kind and axis", "Devices"],
    "plan": ["Planned memory per device", "State by size, per device", "Devices", "Largest leaves"],
  }
  assert [h for h in found.headings if h in expected[name]] == expected[name]


@pytest.mark.parametrize("picture", ["memory", "treemap", "devices", "collectives", "timeline"])
def test_pictures_are_valid_xml(report, picture):
  text = report_svg(report, picture)
  root = ET.fromstring(text[text.index("<svg") :])
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) >= 1


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
@pytest.mark.parametrize("name", ["report", "plan"])
def test_a_browser_lays_the_page_out(pages, name, tmp_path):
  """Opens the page, and lets it say how wide it is, how many shapes it drew, and whether text overlaps."""
  probe = """<script>addEventListener('load', () => {
    const rects = [...document.querySelectorAll('svg rect')].filter(r => r.getBBox().width > 0).length;
    const wide = document.documentElement.scrollWidth <= innerWidth;
    document.title = 'PROBE ' + btoa(JSON.stringify([rects, wide, document.body.scrollHeight]));
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
  rects, no_sideways_scroll, height = json.loads(base64.b64decode(found.group(1)))
  assert rects >= 10
  assert no_sideways_scroll
  assert height > 900
