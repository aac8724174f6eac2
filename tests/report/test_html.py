import dataclasses
import re
from html.parser import HTMLParser

import pytest

import nnx_parallel as nxp
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.html import plan_page
from nnx_parallel.report.memory import memory_plan
from report import layouts


@pytest.fixture(scope="module")
def report():
  plan = layouts.plan(data=2, fsdp=2, tensor=2)
  return compile_report(nxp.train_step(layouts.loss), plan, batch=layouts.batch(), topology="cpu:8")


@pytest.fixture(scope="module")
def pages(report):
  plan = layouts.plan(fsdp=4, tensor=2)
  memory = memory_plan(plan, layouts.loss, layouts.batch(), chip="h100")
  return {"report": report.to_html(), "plan": plan_page(plan, memory, title="my <model>")}


class Structure(HTMLParser):  # Collects tags, headings and everything that would be loaded from elsewhere
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
