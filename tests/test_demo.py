"""The demo, short: it computes what it claims, and fails when a claim does not hold."""

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from nnx_parallel.recipes import text_lm

SPEC: Any = importlib.util.spec_from_file_location("demo", Path(__file__).parents[1] / "tools/demo.py")
demo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(demo)

WORSE = "the held-out text is not predicted better than before training"
DIFFER = "one device: losses differ by {:.1e}, over 1e-05"
nan = float("nan")


@pytest.mark.parametrize(("after", "off"), [(2.5, 1e-7), (8.6, 1e-7), (nan, 1e-7), (2.5, 2e-5), (2.5, nan)])
def test_claims_that_do_not_hold_are_failures(after, off):
  failures = [WORSE] * (after != 2.5) + [DIFFER.format(off)] * (off != 1e-7)
  assert demo.find_failures(8.5, after, {"one device": off}) == failures


def test_the_folder_of_an_earlier_demo_is_replaced(tmp_path):
  folder = demo.fresh_folder(tmp_path / "demo")
  (folder / "old").touch()
  assert [p.name for p in demo.fresh_folder(folder).iterdir()] == [demo.RECORD]


SMALL = dataclasses.replace(text_lm.CONFIG, width=32, mlp=64, sequence=32, held_out_batches=2)


@pytest.mark.slow
def test_the_demo(tmp_path, capfd, monkeypatch):
  for name in ("init", "batches"):
    monkeypatch.setattr(text_lm, name, functools.partial(getattr(text_lm, name), config=SMALL))
  out = tmp_path / "demo"
  assert demo.run(demo.parse(["--out", str(out), "--steps", "6"])) == 0
  text, warned = capfd.readouterr()
  assert "Involuntary full rematerialization" not in warned
  for part in ("1. Plan", "2. Train", "3. Save", "4. Restore", "5. Summary"):
    assert part in text
  assert "restored on 3 other layouts" in (out / "demo.txt").read_text()
  assert len(Path(out, "metrics.jsonl").read_text().splitlines()) == 6
  assert (out / "checkpoint" / "6").is_dir()
