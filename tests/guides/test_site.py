"""The site that `make site` built: each link leads somewhere, each page opens in a browser, and fits a phone.

For the browser, install playwright and have Chromium or Chrome on the PATH.
"""

import functools
import http.server
import itertools
import shutil
import threading
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
PAGES = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html"))
PHONE, DESK = 420, 1280  # pixels

pytestmark = pytest.mark.skipif(not PAGES, reason="`make site` builds the site")


class Page(HTMLParser):  # The targets of a page's links, and its anchors
  def __init__(self, name: str):
    super().__init__()
    self.links, self.anchors = list[str](), set[str]()
    self.feed((SITE / name).read_text())

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    found = dict(attrs)
    self.anchors.add(found.get("id") or "")
    if tag in ("a", "link", "img", "script") and (link := found.get("href") or found.get("src")):
      self.links.append(link)


def test_each_link_leads_somewhere():
  pages = {name: Page(name) for name in PAGES}
  dead: list[str] = []
  for name, page in pages.items():
    for link in page.links:
      parts = urllib.parse.urlparse(link)
      if parts.scheme or parts.netloc:
        continue
      goal = (SITE / name).parent / urllib.parse.unquote(parts.path) if parts.path else SITE / name
      place = goal.resolve().relative_to(SITE).as_posix()
      anchor = urllib.parse.unquote(parts.fragment)
      if not goal.exists() or (anchor and place in pages and anchor not in pages[place].anchors):
        dead.append(f"{name}: {link}")
  assert not dead


class Quiet(http.server.SimpleHTTPRequestHandler):  # Serves files without a line for each
  def log_message(self, format: str, *args: object) -> None:
    del format, args


def test_each_page_opens_in_a_browser_and_fits_a_phone():
  playwright = pytest.importorskip("playwright.sync_api")
  own = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
  if own is None:
    pytest.skip("no Chromium on the PATH")
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  problems, answers = list[str](), list[tuple[str, int]]()
  with server, playwright.sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=own, args=["--no-sandbox"])
    view = browser.new_page()
    view.on("pageerror", lambda error: problems.append(f"{view.url}: {error}"))
    view.on("response", lambda answer: answers.append((answer.url, answer.status)))
    for width, name in itertools.product((PHONE, DESK), PAGES):
      view.set_viewport_size({"width": width, "height": 800})
      view.goto(f"http://127.0.0.1:{server.server_port}/{name}")
      wide = view.evaluate("document.documentElement.scrollWidth")
      if wide > width:
        problems.append(f"{name}: {wide} pixels wide in a window of {width}")
    browser.close()
    server.shutdown()
  assert not problems
  assert not [answer for answer in answers if answer[1] >= 400]
