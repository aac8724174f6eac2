"""Every guide runs from top to bottom and prints what it shows; the runner notices when one does not."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("guide_runner", ROOT / "guides" / "run.py")
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)

EVERYDAY = ("README.md", "01-", "30-")
"""The pages that `make test` runs, on the oldest Python too, where figures are not compared."""


def pages():
  for page in runner.pages():
    marks = [pytest.mark.slow, *([pytest.mark.everyday] if page.name.startswith(EVERYDAY) else [])]
    yield pytest.param(page, marks=marks, id=page.name)


@pytest.fixture(autouse=True)
def nightly_runs_compile_as_users_do(monkeypatch):
  if os.environ.get("NXP_NIGHTLY"):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")


@pytest.mark.parametrize("page", [*pages()])
def test_guide_runs(page, tmp_path):
  if page.name == "README.md":  # its script is the one that people keep in a folder and start again
    page = write(tmp_path, 2 * page.read_text())
  result = runner.run(page)
  assert result.returncode == 0, result.stdout
  assert "Involuntary full rematerialization" not in result.stdout


def write(tmp_path: Path, text: str) -> Path:
  page = tmp_path / "toy.md"
  page.write_text(text)
  return page


def test_a_failure_shows_the_page_and_the_line(tmp_path):
  page = write(tmp_path, "# Toy\n```python\nx = 1\n```\nText\n```python\ny = x\nraise OSError(y)\n```\n")
  result = runner.run(page)
  assert result.returncode == 1
  assert f'File "{page}", line 8, in <module>' in result.stdout
  assert "raise OSError(y)" in result.stdout


def test_blocks_share_a_namespace_and_see_eight_devices_in_an_empty_directory(tmp_path):
  first = "```python\nimport jax, os\n```\n```sh\nnot code\n```\n"
  second = "```python\nassert jax.device_count() == 8\nassert not os.listdir()\nprint(os.getcwd())\n```\n"
  page = write(tmp_path, first + second)
  result = runner.run(page)
  assert result.returncode == 0, result.stdout
  assert not os.path.exists(result.stdout.strip())
  assert list(tmp_path.iterdir()) == [page]


PRINTS = """```python
print("loss 0.5, 12,345 bytes, 1.5 s")
for row in range(4):
  print("row", row)
```
Some words.
```text
SHOWN
```
"""
ROWS = "row 0\nrow 1\nrow 2\nrow 3"
FIRST = "loss 0.5, 12,345 bytes, 1.5 s"

SHOWN = [
  f"{FIRST}\n{ROWS}", f"loss 0.5, 12,345 bytes, 98 ms\n{ROWS}", f"loss 0.5, ...\n{ROWS}", "...\nrow 3",
  f"{FIRST}\n...", f"{FIRST}\nrow 0\n...\nrow 2\n...", f"...\n{FIRST}\n{ROWS}\n...",
]  # fmt: skip
CHANGED = {
  f"loss 0.6, 12,345 bytes, 1.5 s\n{ROWS}": "-loss 0.6",
  f"loss 0.5, 12,346 bytes, 1.5 s\n{ROWS}": "-loss 0.5, 12,346",
  f"{FIRST}\nrow 0\nrow 2\nrow 3": "+row 1", f"{FIRST}\nrow 1\nrow 0\n...": "-row 0",
  f"{FIRST}\n...\nrow 2": "+row 3", ROWS: "+loss", f"{FIRST}\n{ROWS}\nrow 4": "-row 4", "": "+loss",
}  # fmt: skip


@pytest.mark.parametrize("shown", SHOWN)
def test_what_a_block_printed_may_be_shown_as(shown):
  printed = f"{FIRST}\n{ROWS}\n\n"
  assert runner.difference(shown, printed, exact=True) == ""
  assert runner.difference(shown, printed, exact=False) == ""


@pytest.mark.parametrize(("shown", "changed"), CHANGED.items())
def test_what_no_block_printed_is_found(shown, changed):
  assert f"\n{changed}" in runner.difference(shown, f"{FIRST}\n{ROWS}\n", exact=True)


@pytest.mark.parametrize("shown", ["row 0", "...\nline 3", f"{FIRST}\nrow 0"])
def test_an_altered_text_block_fails_the_page(tmp_path, shown):
  result = runner.run(write(tmp_path, PRINTS.replace("SHOWN", shown)))
  assert result.returncode == 1
  assert "toy.md:8: this is not what the block before it prints" in result.stdout
  assert runner.run(write(tmp_path, PRINTS.replace("SHOWN", f"{FIRST}\n{ROWS}"))).returncode == 0


@pytest.mark.parametrize("fence", ["text", "text newest"])
def test_a_block_for_the_newest_jax_is_compared_under_it_only(tmp_path, fence):
  page = write(tmp_path, f"```python\nprint('old words')\n```\n```{fence}\nnew words\n```\n")
  passes = fence == "text newest" and not runner.has_pinned_jax()
  assert runner.run(page).returncode == (0 if passes else 1)


@pytest.mark.parametrize("before", ["", "```python\nprint(1)\n```\n```text\n1\n```\n"])
def test_text_that_no_block_prints_has_another_fence(tmp_path, before):
  result = runner.run(write(tmp_path, f"{before}```text\nfrom a shell\n```\n"))
  assert result.returncode == 1
  assert "no ```python block printed this; fence it as sh, py or console" in result.stdout
  assert runner.run(write(tmp_path, f"{before}```console\nfrom a shell\n```\n")).returncode == 0
