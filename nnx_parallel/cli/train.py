"""`nnx-parallel train`: trains a recipe on a mesh, with progress, metrics, a picture and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx_parallel.cli import options
from nnx_parallel.errors import CheckpointError, ReportError, TrainError

if TYPE_CHECKING:
  import nnx_parallel as nxp
  from nnx_parallel.cli.main import Commands
  from nnx_parallel.recipes import Recipe
  from nnx_parallel.recipes.job import Job
  from nnx_parallel.train.metrics import Record
  from nnx_parallel.train.remat import Policy

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
  options.add_way(parser)
  options.add_optimizer(parser)
  add = parser.add_argument
  add("--steps", type=options.positive, default=200, metavar="N", help="the last step's number (200)")
  add("--batch", type=options.positive, metavar="N", help="examples in a global batch, where the recipe asks")
  add("--seed", type=int, metavar="N", help="the seed of initial values and data, where the recipe asks")
  add("--text", metavar="DIR", help="folder of text to learn, for recipes that read text")
  add(
    "--eval-every", type=options.positive, metavar="N", help="evaluate each N-th step too, not only the last"
  )
  add(
    "--early-stop",
    type=options.positive,
    metavar="N",
    help="end after N evaluations in a row without a lower eval_loss",
  )
  add("--checkpoint", metavar="DIR", help="save the last step here")
  add("--save-every", type=options.positive, metavar="N", help="save each N-th step too")
  add("--save-every-minutes", type=float, metavar="M", help="save after so many minutes too")
  add(
    "--keep",
    type=options.positive,
    metavar="N",
    help="keep the newest N steps, and the one of the lowest eval_loss",
  )
  add(
    "--resume",
    nargs="?",
    const="latest",
    type=step_name,
    metavar="STEP",
    help="go on from a step in --checkpoint, if there is any: a number, best, or latest (when left out)",
  )
  add("--out", metavar="DIR", help="folder for metrics, loss curve and profile (runs/RECIPE)")
  add(
    "--log-every",
    type=options.positive,
    default=1,
    metavar="N",
    help="one record for N steps, of their means (1)",
  )
  add("--tensorboard", metavar="DIR", help="write TensorBoard files there too")
  add("--profile", type=window, metavar="A:B", help="trace the steps A to B for xprof")
  add(
    "--peak-flops", type=float, metavar="F", help="peak FLOP/s of a device, for MFU (the chip's in bfloat16)"
  )
  add(
    "--check-gradients",
    action="store_true",
    help="first check that the gradients are right on this layout; where they are wrong, exit with 3",
  )
  add("--compilation-cache", metavar="DIR", help="keep compiled programs here for the next start")
  add("--quiet", action="store_true", help="print only the last step and the result")
  parser.set_defaults(run=run, usage_error=parser.error)


def step_name(text: str) -> int | str:
  """A step, for argparse: its number, `latest` or `best`."""
  if text in ("latest", "best"):
    return text
  try:
    return int(text)
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} is not a step: a number, latest or best") from None


def window(text: str) -> tuple[int, int]:
  """The first and last step of a profile, for argparse.

  Example:
    >>> window("10:12")
    (10, 12)
  """
  first, _, last = text.partition(":")
  if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
    raise argparse.ArgumentTypeError(f"{text!r} is not a window of steps, such as 10:12")
  return int(first), int(last)


def run(args: argparse.Namespace) -> int:
  """Trains, evaluates, saves, and says where everything is."""
  saves = args.save_every or args.save_every_minutes
  if args.checkpoint is None and (args.resume is not None or saves or args.keep):
    args.usage_error("--resume, --save-every, --save-every-minutes and --keep need --checkpoint DIR")
  if args.early_stop and not args.eval_every:
    args.usage_error("--early-stop needs --eval-every N")
  import nnx_parallel as nxp
  from nnx_parallel.recipes import load_recipe
  from nnx_parallel.recipes.job import plan_recipe

  recipe = load_recipe(args.recipe).given(text=args.text, batch=args.batch, seed=args.seed)
  sizes = options.mesh_sizes(recipe, args.mesh, args.rules)
  options.start_devices(sizes, args.devices)
  if args.compilation_cache is not None:
    nxp.compilation_cache(args.compilation_cache)
  mesh = options.real_mesh(sizes, args.devices)
  rules = options.changed_rules(recipe, args.rules)
  plan = plan_recipe(recipe, mesh, rules, **options.optimizer_options(args))
  settings = {"batch": check_first_batch(recipe, plan), **asked(args)}
  with open_checkpoints(args.checkpoint, resume=args.resume, keep=args.keep) as checkpointer:
    job = make_job(
      recipe,
      plan,
      checkpointer,
      args.resume,
      microbatches=args.microbatches,
      remat=args.remat,
      settings=settings,
    )
    if args.check_gradients:
      found = job.check_gradients()
      print(found.summary if found else found)
      if not found:
        return options.NO
    train(args, job, checkpointer)
  return 0


def train(args: argparse.Namespace, job: Job, checkpointer: nxp.Checkpointer | None) -> None:
  """Takes a job to the last step, evaluating before and after."""
  import nnx_parallel as nxp
  from nnx_parallel.train.progress import StepProgress

  out = Path(args.out or Path("runs", job.recipe.name))
  say: Say = (lambda text: None) if args.quiet else print
  say(f"{job.recipe.name}, {describe(job)}")
  if job.step >= args.steps:
    print(f"step {job.step} is reached; go on with --steps {job.step + args.steps}")
    return
  shown = StepProgress(args.steps, start=job.step, unit=job.unit, quiet=args.quiet)
  shown.note(job.step, f"held out  {format_record(job.evaluate())}")
  with contextlib.ExitStack() as stack:
    log = stack.enter_context(nxp.MetricsLog(out / "metrics.jsonl", after=job.step))
    trackers = [log.write]
    if args.tensorboard is not None:
      trackers.append(stack.enter_context(nxp.TensorBoardLog(args.tensorboard, after=job.step)).write)
    result = job.train(
      args.steps,
      progress=shown,
      trackers=trackers,
      log_every=args.log_every,
      evaluate=job.evaluate,
      eval_every=args.eval_every,
      early_stop=nxp.EarlyStop("eval_loss", args.early_stop) if args.early_stop else None,
      checkpointer=checkpointer,
      save_every=args.save_every,
      save_every_minutes=args.save_every_minutes,
      profile=args.profile,
      profile_dir=out / "profile",
      peak_flops=args.peak_flops,
    )
  if result.stopped == "early":
    print(f"ended at step {job.step}: no lower eval_loss in {args.early_stop} evaluations")
  print(f"held out at step {job.step}: {format_record(evaluation(result.metrics))}")
  say(f"time        {format_times(result)}")
  say(f"metrics     {log.path}" + (f" (an earlier run's: {log.earlier})" if log.earlier else ""))
  say(f"loss curve  {draw(out, job.recipe.name)}")
  if args.tensorboard is not None:
    say(f"tensorboard --logdir {args.tensorboard}")
  if args.profile is not None:
    say(f"profile     xprof {out / 'profile'}")
  if args.checkpoint is None:
    say("checkpoint  none; keep the model with --checkpoint DIR")
  else:
    say(f"checkpoint  {Path(args.checkpoint, str(job.step))}")


def check_first_batch(recipe: Recipe, plan: nxp.ShardingPlan) -> int:
  """Reads and places one batch, so that missing data or a wrong size is said before the model is made.

  Returns:
    Its number of examples; 0 when there is no batch.
  """
  import nnx_parallel as nxp
  from nnx_parallel.train.losses import examples_in

  if recipe.batches is not None:
    for batch in recipe.batches(0, split="train"):
      nxp.shard_batch(batch, plan, whole=True)
      return examples_in(batch)
  return 0


def asked(args: argparse.Namespace) -> dict[str, Any]:
  """The options that decide what is computed, to be kept in the checkpoints."""
  names = ("steps", "zero", "offload", "remat", "text", "seed", "eval_every", "early_stop")
  return {name: getattr(args, name) for name in names} | {"rules": options.format_rules(args.rules)}


@contextlib.contextmanager
def open_checkpoints(
  folder: str | Path | None, *, resume: int | str | None, keep: int | None
) -> Generator[nxp.Checkpointer | None]:
  """The checkpoints of a run; a folder that holds some must not be mixed with a new run."""
  import nnx_parallel as nxp

  if folder is None:
    yield None
    return
  with nxp.Checkpointer(folder, max_to_keep=keep, best="eval_loss") as checkpointer:
    steps = checkpointer.steps()
    if steps and resume is None:
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
  step: int | str | None = "latest",
  *,
  microbatches: int | None = None,
  remat: Policy = None,
  settings: Mapping[str, Any] | None = None,
) -> Job:
  """Restores a checkpoint (the newest good one), or creates the job when there is none yet."""
  from nnx_parallel.recipes.job import Job

  parts = recipe.parts(microbatches)
  how: dict[str, Any] = {"microbatches": parts, "remat": remat, "settings": settings}
  if checkpointer is not None and (checkpointer.steps() or step not in (None, "latest")):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always", UserWarning)
      job = Job.restore(recipe, plan, checkpointer, step, **how)
    for warning in caught:
      print(f"warning: {warning.message}", file=sys.stderr)
    if job.changes:
      print(f"settings other than those of step {job.step}: {'; '.join(job.changes)}", file=sys.stderr)
    return job
  return Job.start(recipe, plan, **how)


def describe(job: Job) -> str:
  """Where a job runs, how large it is, and where it starts, in one line."""
  from nnx_parallel.layout.mesh import axis_sizes
  from nnx_parallel.layout.render import format_bytes

  start = f", from step {job.step}" if job.step else ""
  return (
    f"{job.plan.num_parameters():,} parameters on mesh {options.format_sizes(axis_sizes(job.plan.mesh))},"
    f" {format_bytes(job.plan.bytes_per_device())} per device with the optimizer{start}"
  )


def draw(out: Path, title: str) -> str:
  """Draws the loss curve next to the metrics; returns where it is, or why there is none."""
  from nnx_parallel.train.metrics import draw_curves, read_metrics

  try:
    return str(draw_curves(read_metrics(out / "metrics.jsonl"), out / "loss.png", title=title))
  except (ReportError, TrainError) as error:
    return f"not drawn: {error.what} {error.fix}"


def evaluation(metrics: Record) -> Record:
  """The metrics of the evaluations, by their own names.

  Example:
    >>> evaluation({"loss": 2.0, "eval_loss": 1.5})
    {'loss': 1.5}
  """
  prefix = "eval_"
  return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def format_times(result: nxp.FitResult) -> str:
  """What the time of a run went into, and how much of the chip's peak the steps used."""
  seconds = result.seconds
  total = sum(seconds.values())
  parts = sorted(seconds.items(), key=lambda item: (item[0] != "step", -item[1]))
  shares = [f"{kind} {spent / total:.0%}" for kind, spent in parts if spent >= total / 200]
  mfu = result.metrics.get("mfu")
  used = "MFU n/a (the peak of this device is not known)" if mfu is None else f"MFU {mfu:.1%}"
  return f"{total:.1f} s: {', '.join(shares)}; {used}"


def format_record(record: Record) -> str:
  """Metrics in one line.

  Example:
    >>> format_record({"loss": 1.25, "bits_per_byte": 1.8034})
    'loss 1.2500, bits_per_byte 1.8034'
  """
  return ", ".join(f"{name} {value:.4f}" for name, value in record.items()) or "no held-out batches"
