import dataclasses
import html
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.html import plan_page
from nnx_parallel.report.memory import memory_plan
from report import layouts

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def report():
  plan = layouts.plan(data=2, fsdp=2, tensor=2)
  return compile_report(nxp.train_step(layouts.loss), plan, batch=layouts.batch(), topology="cpu:8")


@pytest.fixture(scope="module")
def pages(report):
  plan = layouts.plan(fsdp=4, tensor=2)
  memory = memory_plan(plan, layouts.loss, layouts.batch(), chip="h100")
  return {
    "report": report.to_html(),
    "plan": plan_page(plan, memory, title="my <model>"),
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


HEADINGS = {
  "report": [
    "Memory per device",
    "In memory at the peak, besides the arguments",
    "Arguments per device, largest first",
    "Sent per step, by kind and axis (payload)",
    "Collectives, largest first",
  ],
  "plan": ["Planned memory per device, at least", "Largest leaves"],
}


@pytest.mark.parametrize("name", HEADINGS)
def test_a_page_is_complete_and_loads_nothing(pages, name):
  found = Structure()
  found.feed(pages[name])
  assert found.outside == []
  assert not re.search(r"@import|url\(|https?://", pages[name])
  assert found.tags.count("table") == found.tags.count("thead") == found.tags.count("tbody") > 0
  shown = [h.partition(": ")[0] for h in found.headings]
  assert [h for h in shown if h in HEADINGS[name]] == HEADINGS[name]


def test_a_plan_is_headed_by_what_it_is_and_whether_it_fits(pages):
  head = "my &lt;model&gt; on data=1 x fsdp=4 x tensor=2 = 8 devices"
  assert f"<title>{head}</title>" in pages["plan"]
  assert f"<h1>{head}</h1>" in pages["plan"]
  assert "<p class='verdict'>May fit on h100: needs at least " in pages["plan"]


def test_the_bar_of_memory_has_the_shares_of_what_is_usable(report):
  page = dataclasses.replace(report, categories={"parameters": 4 * 2**30, "other": 0}).to_html()
  assert "<i style='width:25.00%;background:#0072B2' title='parameters'></i></div>" in page
  assert "</b>parameters 4 GiB (100 %)</span>" in page


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


def test_a_page_says_that_the_compiler_stopped(report):
  page = dataclasses.replace(report, compiled=False).to_html()
  assert "The compiler stopped for lack of memory" in page


def test_a_page_stays_inside_its_frame(report):
  assert "&quot;" in report._repr_html_()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize("width", [420, 1000])
@pytest.mark.parametrize("name", HEADINGS)
def test_a_browser_lays_the_page_out(pages, name, width, tmp_path):
  """Opens the page, and lets it say how wide it is."""
  probe = """<script>addEventListener('load', () => {
    document.title = 'PROBE ' + (document.documentElement.scrollWidth <= innerWidth);
  })</script>"""
  page = tmp_path / "page.html"
  page.write_text(pages[name].replace("</body>", probe + "</body>"))
  command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
  done = subprocess.run(
    [*command, f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{page}"],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert "<title>PROBE true</title>" in done.stdout, done.stderr[-500:]
