"""`make demo`: the main job once on real text, with every claim checked."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nnx_parallel as nxp
from nnx_parallel.cli import options
from nnx_parallel.cli.train import describe, format_record
from nnx_parallel.core.text import print_text, text_table
from nnx_parallel.loop.loader import Recipe, load_recipe
from nnx_parallel.loop.progress import StepProgress
from nnx_parallel.loop.recipe import plan_recipe, restore, start
from nnx_parallel.loop.run import Run
from nnx_parallel.recipes import text_lm
from nnx_parallel.report import layout_check

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
DEVICES = 8
# Other meshes to restore on: another shape, other axis names on fewer devices, and one device.
PLACES = {
  "data=4 tensor=2": {"data": 4, "fsdp": 1, "tensor": 2},
  "replica=2 shard=2": {"replica": 2, "shard": 2},
  "one device": {"data": 1, "fsdp": 1, "tensor": 1},
}
NEXT_STEPS = 5  # that are compared
TOLERANCE = 1e-5  # largest relative difference of a loss; training is in float32
RECORD = "demo.txt"  # the summary of a demo; the next demo may replace a folder that has it


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description="Trains text_lm on 8 simulated devices, restores it on other meshes and on one device, and"
    " checks that each continues as the run that never stopped. Exit code 3: a claim does not hold."
  )
  parser.add_argument("--out", default="runs/demo", metavar="DIR", help="where files go (runs/demo)")
  parser.add_argument("--steps", type=options.positive, default=200, metavar="N", help="training steps (200)")
  parser.add_argument("--text", metavar="DIR", help="text to train on (Python's standard library)")
  return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
  started = time.perf_counter()
  recipe = load_recipe("text_lm").given(text=args.text)
  options.start_devices(MESH, DEVICES)
  out = fresh_folder(Path(args.out))

  heading("1. Plan", "every array of model and optimizer, before anything is allocated")
  plan = plan_recipe(recipe, options.real_mesh(MESH, DEVICES))
  plan.show()

  heading("2. Train", f"{args.steps} steps on {DEVICES} simulated CPU devices")
  print(describe_text(args.text))
  trained = start(recipe, plan)
  print(describe(plan, 0))
  evaluate: Any = trained.evaluate
  before = evaluate()
  print(f"held out before  {format_record(before)}")
  with nxp.loop.MetricsLog(out / "metrics.jsonl") as log:
    trained.train(args.steps, progress=StepProgress(args.steps, unit=trained.unit), trackers=[log.write])
  after = evaluate()
  print(f"held out after   {format_record(after)}")

  with nxp.Checkpointer(out / "checkpoint") as checkpointer:
    heading("3. Save", "model, optimizer, random state and data cursor, in one commit")
    trained.save(checkpointer)
    size = checkpointer.metadata().nbytes
    print(f"step {trained.at.step} in {checkpointer.directory / str(trained.at.step)}: {size / 1e6:.1f} MB")
    heading("4. Restore elsewhere", f"and take the same next {NEXT_STEPS} steps there; the loss of each")
    losses = {"never stopped": next_losses(trained)}
    failures: list[str] = []
    for title in PLACES:
      losses[title], misplaced = continue_at(title, recipe, checkpointer)
      failures += [f"{title}: not in the planned layout: {name}" for name in misplaced]
    print_comparison(losses, args.steps)

  worst = max(differences(losses).values())
  failures += find_failures(before["bits_per_byte"], after["bits_per_byte"], differences(losses))
  summary = (
    f"held-out text: {before['bits_per_byte']:.2f} -> {after['bits_per_byte']:.2f} bits per byte\n"
    f"restored on {len(PLACES)} other layouts: the next losses agree within {worst:.1e}"
    f" (allowed {TOLERANCE:.0e})\n"
    + "".join(f"FAILED: {failure}\n" for failure in failures)
    + f"\ncheckpoint  {out / 'checkpoint'}\n"
    f"metrics     {out / 'metrics.jsonl'}\n\n"
    "next:\n"
    "  nnx-parallel plan text_lm --mesh data=16,fsdp=64,tensor=4 --batch 1024 --chip v5e\n"
    "  nnx-parallel train text_lm --mesh data=4,fsdp=2 --text DIR --checkpoint DIR\n"
    "  nnx-parallel train digits --mesh data=8\n"
  )
  heading("5. Summary", f"{time.perf_counter() - started:.0f} s")
  print(summary, end="")
  (out / RECORD).write_text(summary)
  return options.NO if failures else 0


def heading(title: str, text: str) -> None:
  """Prints the title of a section."""
  from rich.console import Console

  Console(highlight=False, soft_wrap=True).print(f"\n[bold]{title}[/bold]  [dim]{text}[/dim]")


def fresh_folder(folder: Path) -> Path:
  """An empty folder; the folder of an earlier demo is replaced."""
  if folder.is_dir() and any(folder.iterdir()):
    if not (folder / RECORD).is_file():
      raise SystemExit(f"{folder} is not empty, and no demo made it.\n  Fix: another --out DIR.")
    shutil.rmtree(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / RECORD).touch()
  return folder


def describe_text(folder: str | None) -> str:
  """The size and source of the text, in one line."""
  folder = folder or os.environ.get("NXP_TEXT")
  train, held_out = text_lm.read_text(folder, 1)
  source = folder or f"Python {platform.python_version()}'s own library"
  return f"{len(train) / 1e6:.1f} MB of text to learn, {len(held_out) / 1e6:.1f} MB held out: {source}"


def continue_at(
  title: str, recipe: Recipe, checkpointer: nxp.Checkpointer
) -> tuple[Sequence[float], list[str]]:
  """Restores on a mesh of `PLACES`; returns the next losses, and arrays without their planned layout."""
  sizes, rules = PLACES[title], None
  if "shard" in sizes:  # not the axes of the recipe's rules
    batch = ("replica", "shard")
    rules = nxp.LogicalRules(
      batch=batch, embed="shard", mlp=None, heads=None, vocab=nxp.LogicalRules.first("shard", None)
    )
  plan = plan_recipe(recipe, options.real_mesh(sizes, math.prod(sizes.values())), rules)
  trained = restore(recipe, plan, checkpointer).run
  found = layout_check.differences(trained.model, plan, trained.optimizer)
  return next_losses(trained), [text for texts in found for text in texts]


def next_losses(trained: Run) -> Sequence[float]:
  """Takes the next steps."""
  return [record["loss"] for record in trained.train(trained.at.step + NEXT_STEPS).history]


def differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
  """The largest relative difference to the run that never stopped, which comes first, by title."""
  straight, *others = losses.values()
  found = [max(abs(a - b) / abs(b) for a, b in zip(one, straight, strict=True)) for one in others]
  return dict(zip([*losses][1:], found, strict=True))


def print_comparison(losses: Mapping[str, Sequence[float]], step: int) -> None:
  """Prints the losses on each mesh, step by step."""
  rows = [
    [f"{step + 1 + at}", *(f"{loss:.7f}" for loss in row)]
    for at, row in enumerate(zip(*losses.values(), strict=True))
  ]
  rows.append(["difference", "", *(f"{difference:.1e}" for difference in differences(losses).values())])
  print_text(text_table(["step", *losses], rows, right=range(1, len(losses) + 1)))


def find_failures(before: float, after: float, found: Mapping[str, float]) -> list[str]:
  """The claims about losses that do not hold."""
  failures = [
    f"{title}: losses differ by {difference:.1e}, over {TOLERANCE:.0e}"
    for title, difference in found.items()
    if not difference <= TOLERANCE
  ]
  if not after < before:
    failures.append("the held-out text is not predicted better than before training")
  return failures


if __name__ == "__main__":
  sys.exit(run(parse()))
