"""The demo, short: it computes what it claims, and fails when a claim does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnx_parallel import cli
from nnx_parallel.cli import demo


def continued(title="one device", difference=1e-7, misplaced=()):
  return demo.Continued(title, 1, [1.0], difference, list(misplaced))


BEFORE, AFTER = {"bits_per_byte": 8.5}, {"bits_per_byte": 2.5}


def test_claims_that_hold():
  assert demo.find_failures(BEFORE, AFTER, [continued()]) == []


@pytest.mark.parametrize(
  ("after", "other", "failure"),
  [
    ({"bits_per_byte": 8.6}, continued(), "not predicted better than before"),
    ({"bits_per_byte": float("nan")}, continued(), "not predicted better than before"),
    (AFTER, continued(difference=2e-5), "one device: losses differ by 2.0e-05, over 1e-05"),
    (AFTER, continued(difference=float("nan")), "losses differ by nan"),
    (AFTER, continued(misplaced=["w"]), "one device: not in the planned layout: w"),
  ],
)
def test_claims_that_do_not_hold(after, other, failure):
  (found,) = demo.find_failures(BEFORE, after, [other])
  assert failure in found


def test_the_comparison_fits_a_terminal_of_80_columns(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  others = [
    demo.Continued("data=4 tensor=2", 8, [1.0, 2.0], 3e-7, []),
    demo.Continued("replica=2 shard=2", 4, [1.0, 2.0], 2e-7, []),
    demo.Continued("one device", 1, [1.0, 2.0], 1e-7, []),
  ]
  demo.print_comparison([1.0, 2.0], others, 200)
  assert capsys.readouterr().out.splitlines() == [
    "step        never stopped  data=4 tensor=2  replica=2 shard=2  one device",
    "devices                 8                8                  4           1",
    "201             1.0000000        1.0000000          1.0000000   1.0000000",
    "202             2.0000000        2.0000000          2.0000000   2.0000000",
    "difference                         3.0e-07            2.0e-07     1.0e-07",
  ]


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
  (tmp_path / "thesis.tex").write_text("years of work")
  assert cli.main(["demo", "--out", str(tmp_path)]) == 1
  assert f"{tmp_path} is not empty, and no demo made it." in capsys.readouterr().err
  assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_folder_of_an_earlier_demo_is_replaced(tmp_path):
  folder = demo.fresh_folder(tmp_path / "demo")
  (folder / "old").touch()
  assert [p.name for p in demo.fresh_folder(folder).iterdir()] == [demo.RECORD]


@pytest.mark.slow
def test_the_demo(tmp_path, capfd):
  out = tmp_path / "demo"
  assert cli.main(["demo", "--out", str(out), "--steps", "6", "--next-steps", "2"]) == 0
  text, warned = capfd.readouterr()
  assert "Involuntary full rematerialization" not in warned
  for part in ("1. Plan", "2. Train", "3. Save", "4. Restore", "5. Summary"):
    assert part in text
  assert "restored on 3 other layouts" in (out / "demo.txt").read_text()
  assert len(Path(out, "metrics.jsonl").read_text().splitlines()) == 6
  assert (out / "loss.png").is_file()
  assert (out / "checkpoint" / "6").is_dir()
