from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.memory import memory_plan
from nnx_parallel.report.estimate.roofline import predict_time
from nnx_parallel.report.html import notebook_frame, plan_page, report_page
from nnx_parallel.report.search.search import search
from report import layouts

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
  without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", pages[name])
  assert not re.search(r"@import|url\((?!#)|https?://", without_namespaces)
  assert found.tags.count("svg") == {"report": 5, "plan": 4, "search": 2}[name]
  expected = {
    "search": [
      "Pareto front of memory and time; times are relative to the fastest",
      "Best candidate of each other mesh",
      "Predicted step of the winner",
      "The winner",
    ],
    "report": ["Memory per device", "Predicted step", "Sent per step, by kind and axis", "Devices"],
    "plan": [
      "Planned memory per device",
      "Predicted step",
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


def test_a_plans_page_has_its_notes():
  plan = nxp.plan(
    lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
    nxp.abstract_mesh(fsdp=8),
    [nxp.fsdp(), nxp.PathRules([("nothing", None)])],
  )
  assert plan.notes
  for note in plan.notes:
    assert f"<p>note: {html.escape(note)}</p>" in plan_page(plan)


@pytest.mark.parametrize("name", ["report", "plan", "search"])
def test_without_matplotlib_a_page_has_tables_and_says_what_is_missing(report, found, name, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  plan = layouts.plan(fsdp=4, tensor=2)
  time = predict_time(plan, layouts.loss, layouts.batch(), chip="h100")
  pages = {"report": report.to_html, "plan": lambda: plan_page(plan, time=time), "search": found.to_html}
  page = pages[name]()
  assert "<svg" not in page
  assert "no pictures. For them: pip install &#x27;nnx-parallel[plots]&#x27;" in page
  text = {"report": "working memory  ", "plan": "Predicted step\n", "search": "Predicted step\n"}[name]
  assert text in page


def test_a_page_says_that_the_compiler_stopped(report, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  page = dataclasses.replace(report, compiled=False).to_html()
  assert "The compiler stopped for lack of memory" in page


def test_a_search_page_has_the_code_of_the_winner(found):
  page = found.to_html()
  assert "nxp.make_mesh" in page
  assert "usable: 15.75 GiB" in page


def test_a_page_stays_inside_its_frame():
  assert "&quot;" in notebook_frame('<p class="x">')


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("name", ["report", "plan", "search"])
def test_a_browser_lays_the_page_out(pages, name, tmp_path):
  """Opens the page, and lets it say how wide it is, how many shapes it drew, and whether text overlaps."""
  probe = """<script>addEventListener('load', () => {
    const shapes = [...document.querySelectorAll('svg path')].filter(p => p.getBBox().width > 0).length;
    const wide = document.documentElement.scrollWidth <= innerWidth;
    const cut = [...document.querySelectorAll('svg')].flatMap(s => {
      const box = s.getBoundingClientRect();
      return [...s.querySelectorAll('text')].filter(t => {
        const b = t.getBoundingClientRect();
        return b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1;
      }).map(t => t.textContent);
    });
    document.title = 'PROBE ' + btoa(JSON.stringify([shapes, wide, document.body.scrollHeight, cut.join()]));
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
  shapes, no_sideways_scroll, height, cut = json.loads(base64.b64decode(found.group(1)))
  assert shapes >= {"report": 10, "plan": 10, "search": 3}[name]
  assert cut == ""
  assert no_sideways_scroll
  assert height > {"report": 900, "plan": 900, "search": 700}[name]
