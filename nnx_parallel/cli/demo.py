"""`nnx-parallel demo`: the main job once on real text, with every claim checked; `make demo` runs it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nnx_parallel.cli import options
from nnx_parallel.cli.train import describe, draw, format_record, format_times
from nnx_parallel.errors import CheckpointError

if TYPE_CHECKING:
  import nnx_parallel as nxp
  from nnx_parallel.loop.job import Job
  from nnx_parallel.loop.loader import Recipe
  from nnx_parallel.loop.metrics import Record

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
DEVICES = 8
# Other meshes to restore on: another shape, other axis names on fewer devices, and one device.
PLACES = {
  "data=4 tensor=2": {"data": 4, "fsdp": 1, "tensor": 2},
  "replica=2 shard=2": {"replica": 2, "shard": 2},
  "one device": {"data": 1, "fsdp": 1, "tensor": 1},
}
TOLERANCE = 1e-5  # largest relative difference of a loss; training is in float32
RECORD = "demo.txt"  # the summary of a demo; the next demo may replace a folder that has it


@dataclasses.dataclass(frozen=True)
class Continued:
  """The next losses after a restore on another mesh.

  Attributes:
    title: the title of the mesh.
    devices: the number of devices.
    losses: the losses of the next steps.
    difference: the largest relative difference to the run that never stopped.
    misplaced: the arrays without their planned layout.
  """

  title: str
  devices: int
  losses: list[float]
  difference: float
  misplaced: list[str]


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "demo",
    run,
    help="the main job once: plan, train, save, restore elsewhere, compare",
    description="Trains text_lm on 8 simulated devices, restores it on other meshes and on one device,"
    " and checks that each continues as the run that never stopped. Exit code 3: a claim does not hold.",
  )
  add = parser.add_argument
  add("--out", default="runs/demo", metavar="DIR", help="where files go (runs/demo)")
  add("--steps", type=options.positive, default=200, metavar="N", help="training steps (200)")
  add("--next-steps", type=options.positive, default=5, metavar="N", help="steps compared (5)")
  add("--text", metavar="DIR", help="text to train on (Python's standard library)")


def run(args: argparse.Namespace) -> int:
  """Runs the demo; exit code 3 when a claim does not hold."""
  import nnx_parallel as nxp
  from nnx_parallel.loop.job import Job, plan_recipe
  from nnx_parallel.loop.loader import load_recipe
  from nnx_parallel.loop.progress import StepProgress

  started = time.perf_counter()
  recipe = load_recipe("text_lm").given(text=args.text)
  options.start_devices(MESH, DEVICES)
  out = fresh_folder(Path(args.out))
  folder = out / "checkpoint"

  heading("1. Plan", "every array of model and optimizer, before anything is allocated")
  plan = plan_recipe(recipe, options.real_mesh(MESH, DEVICES))
  plan.show()

  heading("2. Train", f"{args.steps} steps on {DEVICES} simulated CPU devices")
  print(describe_text(args.text))
  job = Job.start(recipe, plan)
  print(describe(job))
  before = job.evaluate()
  print(f"held out before  {format_record(before)}")
  with nxp.loop.MetricsLog(out / "metrics.jsonl") as log:
    shown = StepProgress(args.steps, unit=job.unit)
    result = job.train(args.steps, progress=shown, trackers=[log.write])
  after = job.evaluate()
  print(format_times(result))
  print(f"held out after   {format_record(after)}")

  with nxp.Checkpointer(folder) as checkpointer:
    heading("3. Save", "model, optimizer, random state and data cursor, in one commit")
    start = time.perf_counter()
    job.save(checkpointer)
    saved = time.perf_counter() - start
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"step {job.step} in {folder / str(job.step)}: {size / 1e6:.1f} MB, {saved:.1f} s")
    heading("4. Restore elsewhere", f"and take the same next {args.next_steps} steps there; the loss of each")
    straight = _losses(job, args.next_steps)
    others = [continue_at(title, recipe, checkpointer, straight) for title in PLACES]
    print_comparison(straight, others, args.steps)

  failures = find_failures(before, after, others)
  worst = max(other.difference for other in others)
  summary = (
    f"held-out text: {before['bits_per_byte']:.2f} -> {after['bits_per_byte']:.2f} bits per byte\n"
    f"restored on {len(others)} other layouts: the next losses agree within {worst:.1e}"
    f" (allowed {TOLERANCE:.0e})\n"
    + "".join(f"FAILED: {failure}\n" for failure in failures)
    + f"\ncheckpoint  {folder}\n"
    f"loss curve  {draw(out, 'text_lm')}\n"
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
  """An empty folder; the folder of an earlier demo is replaced.

  Raises:
    CheckpointError: the folder holds other files than a demo's.
  """
  if folder.is_dir() and any(folder.iterdir()):
    if not (folder / RECORD).is_file():
      raise CheckpointError(
        f"{folder} is not empty, and no demo made it.",
        details=f"it holds {', '.join(sorted(p.name for p in folder.iterdir())[:5])}",
        fix="another --out DIR, or delete the folder.",
      )
    shutil.rmtree(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / RECORD).touch()
  return folder


def describe_text(folder: str | None) -> str:
  """The size and source of the text, in one line."""
  from nnx_parallel.recipes import text_lm

  folder = folder or os.environ.get("NXP_TEXT")
  train, held_out = text_lm.read_text(folder, 1)
  source = folder or f"Python {platform.python_version()}'s own library"
  return f"{len(train) / 1e6:.1f} MB of text to learn, {len(held_out) / 1e6:.1f} MB held out: {source}"


def continue_at(
  title: str, recipe: Recipe, checkpointer: nxp.Checkpointer, straight: Sequence[float]
) -> Continued:
  """Restores on a mesh of `PLACES` and takes as many steps as the run that never stopped took."""
  import nnx_parallel as nxp
  from nnx_parallel.create.layout_check import differences
  from nnx_parallel.loop.job import Job, plan_recipe

  sizes, rules = PLACES[title], None
  devices = math.prod(sizes.values())
  if "shard" in sizes:  # not the axes of the recipe's rules
    batch = ("replica", "shard")
    rules = nxp.LogicalRules(batch=batch, embed="shard", mlp=None, heads=None, vocab=["shard", None])
  plan = plan_recipe(recipe, options.real_mesh(sizes, devices), rules)
  job = Job.restore(recipe, plan, checkpointer)
  misplaced = [text for texts in differences(job.model, plan, job.optimizer) for text in texts]
  losses = _losses(job, len(straight))
  difference = max(abs(a - b) / abs(b) for a, b in zip(losses, straight, strict=True))
  return Continued(title, devices, losses, difference, misplaced)


def _losses(job: Job, count: int) -> list[float]:
  return [record["loss"] for record in job.train(job.step + count).history]


def print_comparison(straight: Sequence[float], others: Sequence[Continued], step: int) -> None:
  """Prints the losses on each mesh, step by step, with the losses of the run that never stopped."""
  from nnx_parallel.core.text import print_text, text_table

  columns = [("never stopped", DEVICES, straight, "")]
  columns += [(o.title, o.devices, o.losses, f"{o.difference:.1e}") for o in others]
  header = ["step", *(title for title, *_ in columns)]
  rows = [["devices", *(str(devices) for _, devices, *_ in columns)]]
  for at in range(len(straight)):
    rows.append([f"{step + 1 + at}", *(f"{losses[at]:.7f}" for _, _, losses, _ in columns)])
  rows.append(["difference", *(difference for *_, difference in columns)])
  print_text(text_table(header, rows, right=range(1, len(header))))


def find_failures(before: Record, after: Record, others: Sequence[Continued]) -> list[str]:
  """The claims that do not hold."""
  failures: list[str] = []
  if not after["bits_per_byte"] < before["bits_per_byte"]:
    failures.append("the held-out text is not predicted better than before training")
  for other in others:
    if not other.difference <= TOLERANCE:
      failures.append(f"{other.title}: losses differ by {other.difference:.1e}, over {TOLERANCE:.0e}")
    if other.misplaced:
      failures.append(f"{other.title}: not in the planned layout: {', '.join(other.misplaced)}")
  return failures
