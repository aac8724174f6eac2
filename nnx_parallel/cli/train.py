"""`nnx-parallel train`: trains a recipe on a mesh, with progress, metrics, a picture and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx_parallel.cli import options
from nnx_parallel.errors import CheckpointError, TrainError

if TYPE_CHECKING:
  import nnx_parallel as nxp
  from nnx_parallel.cli.main import Commands
  from nnx_parallel.recipes import Recipe
  from nnx_parallel.recipes.job import Job
  from nnx_parallel.train.metrics import Record

Say = Callable[[str], None]


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "train",
    help="train a recipe on a mesh",
    description="Trains a recipe. Without an accelerator, the CPU is made to look like as many"
    " devices as the mesh has.",
  )
  options.add_recipe(parser)
  options.add_mesh(parser)
  options.add_optimizer(parser)
  add = parser.add_argument
  add("--steps", type=positive, default=200, metavar="N", help="the last step's number (200)")
  add("--microbatches", type=positive, metavar="N", help="cut each global batch into N parts")
  add("--text", metavar="DIR", help="folder of text to learn, for recipes that read text")
  add("--checkpoint", metavar="DIR", help="save the last step here")
  add("--save-every", type=positive, metavar="N", help="save each N-th step too")
  add("--resume", action="store_true", help="go on from the newest step in --checkpoint, if any")
  add("--out", metavar="DIR", help="folder for metrics and loss curve (runs/RECIPE)")
  add("--compilation-cache", metavar="DIR", help="keep compiled programs here for the next start")
  add("--quiet", action="store_true", help="print only the last step and the result")
  parser.set_defaults(run=run, usage_error=parser.error)


def positive(text: str) -> int:
  """A whole number from 1 up, for argparse."""
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text} is less than 1")
  return number


def run(args: argparse.Namespace) -> int:
  """Trains, evaluates, saves, and says where everything is."""
  if args.checkpoint is None and (args.resume or args.save_every):
    args.usage_error("--resume and --save-every need --checkpoint DIR")
  import nnx_parallel as nxp
  from nnx_parallel.recipes import load_recipe
  from nnx_parallel.recipes.job import plan_recipe

  recipe = load_recipe(args.recipe)
  if args.text is not None:
    recipe = recipe.with_text(args.text)
  sizes = options.mesh_sizes(recipe, args.mesh)
  options.start_devices(sizes, args.devices)
  if args.compilation_cache is not None:
    nxp.compilation_cache(args.compilation_cache)
  mesh = options.real_mesh(sizes, args.devices)
  plan = plan_recipe(recipe, mesh, **options.optimizer_options(args))
  check_first_batch(recipe, plan)
  with open_checkpoints(args.checkpoint, resume=args.resume) as checkpointer:
    job = make_job(recipe, plan, checkpointer, microbatches=args.microbatches)
    train(args, job, checkpointer)
  return 0


def train(args: argparse.Namespace, job: Job, checkpointer: nxp.Checkpointer | None) -> None:
  """Takes a job to the last step, evaluating before and after."""
  out = Path(args.out or Path("runs", job.recipe.name))
  say: Say = (lambda text: None) if args.quiet else print
  say(f"{job.recipe.name}, {describe(job)}")
  if job.step >= args.steps:
    print(f"step {job.step} is reached; go on with --steps {job.step + args.steps}")
    return
  say(f"held out at step {job.step}: {format_record(job.evaluate())}")
  train_with_progress(job, args.steps, out, checkpointer, args.save_every, quiet=args.quiet)
  print(f"held out at step {job.step}: {format_record(job.evaluate())}")
  say(f"metrics     {out / 'metrics.jsonl'}")
  say(f"loss curve  {draw(out, job.recipe.name)}")
  if args.checkpoint is None:
    say("checkpoint  none; keep the model with --checkpoint DIR")
  else:
    say(f"checkpoint  {Path(args.checkpoint, str(job.step))}")


def check_first_batch(recipe: Recipe, plan: nxp.ShardingPlan) -> None:
  """Reads and places one batch, so that missing data or a wrong size is said before the model is made."""
  import nnx_parallel as nxp

  if recipe.batches is not None:
    for batch in recipe.batches(0, split="train"):
      nxp.shard_batch(batch, plan)
      return


@contextlib.contextmanager
def open_checkpoints(folder: str | Path | None, *, resume: bool) -> Generator[nxp.Checkpointer | None]:
  """The checkpoints of a run; a folder that holds some must not be mixed with a new run."""
  import nnx_parallel as nxp

  if folder is None:
    yield None
    return
  with nxp.Checkpointer(folder) as checkpointer:
    steps = checkpointer.steps()
    if steps and not resume:
      raise CheckpointError(
        f"{folder} holds the checkpoints of an earlier run.",
        details=f"steps {', '.join(map(str, steps))}",
        fix="--resume to go on from the newest, or another --checkpoint DIR.",
      )
    yield checkpointer


def make_job(
  recipe: Recipe,
  plan: nxp.ShardingPlan,
  checkpointer: nxp.Checkpointer | None,
  *,
  microbatches: int | None = None,
) -> Job:
  """Restores the newest good checkpoint, or creates the job when there is none yet."""
  from nnx_parallel.recipes.job import Job

  parts = microbatches or (recipe.microbatches() if recipe.microbatches is not None else 1)
  if checkpointer is not None and checkpointer.steps():
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always", UserWarning)
      job = Job.restore(recipe, plan, checkpointer, microbatches=parts)
    for warning in caught:
      print(f"warning: {warning.message}", file=sys.stderr)
    return job
  return Job.start(recipe, plan, microbatches=parts)


def describe(job: Job) -> str:
  """Where a job runs, how large it is, and where it starts, in one line."""
  from nnx_parallel.layout.mesh import axis_sizes
  from nnx_parallel.layout.render import format_bytes

  parameters = sum(math.prod(leaf.shape) for leaf in job.plan.leaves if leaf.kind == "Param")
  start = f", from step {job.step}" if job.step else ""
  return (
    f"{parameters:,} parameters on mesh {options.format_sizes(axis_sizes(job.plan.mesh))},"
    f" {format_bytes(job.plan.bytes_per_device())} per device with the optimizer{start}"
  )


def train_with_progress(
  job: Job,
  steps: int,
  out: Path,
  checkpointer: nxp.Checkpointer | None = None,
  save_every: int | None = None,
  *,
  quiet: bool = False,
) -> None:
  """Trains to `steps`; shows progress, writes `metrics.jsonl`, saves, on SIGTERM too.

  Args:
    job: is advanced in place.
    steps: the number of the last step.
    out: folder for the metrics.
    checkpointer: where to save the last step, and each `save_every`-th; None saves nothing.
    save_every: in steps.
    quiet: show the last step only.
  """
  from nnx_parallel.train.metrics import MetricsLog
  from nnx_parallel.train.progress import StepProgress

  with (
    MetricsLog(out / "metrics.jsonl", after=job.step) as log,
    StepProgress(steps, start=job.step, unit=job.unit, quiet=quiet) as progress,
  ):

    def observe(step: int, values: Record) -> None:
      log.write(step, values)
      progress.update(step, values)

    def last_state() -> dict[str, Any]:
      job.report(observe)
      print(f"asked to end: saving step {job.step}", flush=True)
      return job.state()

    hold = contextlib.nullcontext
    if checkpointer is not None:
      hold = checkpointer.hold
      checkpointer.save_on_sigterm(last_state)
    stride = save_every or steps
    while job.step < steps:
      job.train(min(steps, (job.step // stride + 1) * stride), observe, hold=hold)
      if checkpointer is not None:
        job.save(checkpointer)


def draw(out: Path, title: str) -> str:
  """Draws the loss curve next to the metrics; returns where it is, or why there is none."""
  from nnx_parallel.train.metrics import draw_curves, read_metrics

  try:
    return str(draw_curves(read_metrics(out / "metrics.jsonl"), out / "loss.png", title=title))
  except TrainError as error:
    return f"not drawn: {error.what} {error.fix}"


def format_record(record: Record) -> str:
  """Metrics in one line.

  Example:
    >>> format_record({"loss": 1.25, "bits_per_byte": 1.8034})
    'loss 1.2500, bits_per_byte 1.8034'
  """
  return ", ".join(f"{name} {value:.4f}" for name, value in record.items()) or "no held-out batches"
