"""Every guide runs from top to bottom, and the runner notices when one does not."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import nnx_parallel

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("guide_runner", ROOT / "guides" / "run.py")
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)


@pytest.mark.parametrize("page", runner.pages(), ids=lambda page: page.name)
def test_guide_runs(page):
  if page.name == "README.md" and not hasattr(nnx_parallel, "Checkpointer"):
    pytest.skip("the README shows names that are not here yet")
  result = runner.run(page)
  assert result.returncode == 0, result.stdout


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
  page = write(
    tmp_path,
    "```python\nimport jax, os\n```\n```text\nnot code\n```\n"
    "```python\nassert jax.device_count() == 8\nassert not os.listdir()\nprint(os.getcwd())\n```\n",
  )
  result = runner.run(page)
  assert result.returncode == 0, result.stdout
  assert not os.path.exists(result.stdout.strip())
  assert list(tmp_path.iterdir()) == [page]


def test_an_open_block_is_an_error(tmp_path):
  result = runner.run(write(tmp_path, "```python\nx = 1\n"))
  assert result.returncode == 1
  assert "the ```python block before line 2 is never closed" in result.stdout
