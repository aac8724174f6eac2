"""`nnx-parallel train`: trains a recipe on a mesh, with progress, metrics, a loss curve and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import nnx_parallel as nxp
from nnx_parallel.cli import options
from nnx_parallel.errors import CheckpointError, NnxParallelError

if TYPE_CHECKING:
  from nnx_parallel.loop.loader import Recipe
  from nnx_parallel.loop.metrics import Record
  from nnx_parallel.loop.run import Run

# The options that decide what is computed; they are stored in the checkpoints.
_SETTINGS = ("steps", "zero", "offload", "remat", "text", "seed", "eval_every", "early_stop")


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "train",
    run,
    *options.STEP,
    *options.LAYERS,
    help="train a recipe on a mesh",
    description="Trains a recipe. Without an accelerator, as many CPU devices as the mesh has are simulated.",
  )

  def count(name: str, help: str, default: int | None = None) -> None:
    parser.add_argument(name, type=options.positive, default=default, metavar="N", help=help)

  def path(name: str, help: str) -> None:
    parser.add_argument(name, metavar="DIR", help=help)

  add = parser.add_argument
  count("--steps", "the last step's number (200)", 200)
  count("--batch", "examples in a global batch, for recipes that take it")
  add("--seed", type=int, metavar="N", help="seed of initial values and data, for recipes that take it")
  path("--text", "folder of text to train on, for recipes that read text")
  count("--eval-every", "evaluate every N-th step, not only the last")
  count("--early-stop", "end after N evaluations in a row without a lower eval_loss")
  path("--checkpoint", "save the last step here")
  count("--save-every", "also save every N-th step")
  count("--keep", "keep the newest N steps, and the step with the lowest eval_loss")
  add(
    "--resume",
    nargs="?",
    const="latest",
    type=step_name,
    metavar="STEP",
    help="continue from a step in --checkpoint, if there is any: a number, best, or latest (without STEP)",
  )
  path("--out", "folder for metrics and profile (runs/RECIPE)")
  count("--log-every", "one record for N steps, of their means (1), and a line in a log for each")
  add("--profile", type=window, metavar="A:B", help="trace the steps A to B for xprof")
  add(
    "--peak-flops", type=float, metavar="F", help="peak FLOP/s of a device, for MFU (the chip's in bfloat16)"
  )
  add(
    "--check-gradients",
    action="store_true",
    help="first check that the gradients are right on this layout; where they are wrong, exit with 3",
  )
  path("--compilation-cache", "keep compiled programs here for the next start")
  add("--quiet", action="store_true", help="print only the last step and the result")


def step_name(text: str) -> int | str:
  """A step, for argparse: its number, `latest` or `best`."""
  if text in ("latest", "best"):
    return text
  try:
    return int(text)
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} is not a step: a number, latest or best") from None


def window(text: str) -> tuple[int, int]:
  """The first and last step of a profile, for argparse."""
  first, _, last = text.partition(":")
  if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
    raise argparse.ArgumentTypeError(f"{text!r} is not a window of steps, such as 10:12")
  return int(first), int(last)


def run(args: argparse.Namespace) -> int:
  """Trains, evaluates, saves, and prints where everything is."""
  if args.checkpoint is None and (args.resume is not None or args.save_every or args.keep):
    args.usage_error("--resume, --save-every and --keep need --checkpoint DIR")
  if args.early_stop and not args.eval_every:
    args.usage_error("--early-stop needs --eval-every N")
  from nnx_parallel.hosts.bringup import mark_failed

  try:
    return _run(args)
  except NnxParallelError:
    mark_failed()  # the other processes of the job wait for this process, but need not
    raise


def _run(args: argparse.Namespace) -> int:
  recipe = nxp.recipes.load_recipe(args.recipe).given(text=args.text, batch=args.batch, seed=args.seed)
  mesh = options.mesh_on_devices(args, recipe, join=True)
  if args.compilation_cache is not None:
    nxp.compilation_cache(args.compilation_cache)
  plan = options.make_plan(args, recipe, mesh)
  examples = examples_in_first_batch(recipe, plan)
  with contextlib.ExitStack() as stack:
    checkpointer = None
    if args.checkpoint is not None:
      folder = nxp.Checkpointer(args.checkpoint, max_to_keep=args.keep, best="eval_loss")
      checkpointer = stack.enter_context(folder)
      if (steps := checkpointer.prepare()) and args.resume is None:
        raise CheckpointError(
          f"{args.checkpoint} holds the checkpoints of an earlier run.",
          details=f"steps {', '.join(map(str, steps))}",
          fix="--resume to continue from the newest, or another --checkpoint DIR.",
        )
    started = make_run(args, recipe, plan, checkpointer, examples)
    if args.check_gradients:
      found = check_gradients(started, plan)
      print(found.summary if found else found)
      if not found:
        return options.NO
    train(args, recipe, plan, started, checkpointer)
  return 0


def check_gradients(started: Run, plan: nxp.Plan) -> nxp.verify.GradientCheck:
  """Checks on the next batch that the gradients are right on this layout. It trains nothing."""
  from nnx_parallel.layout.constrain import default_scope

  step, batches = cast(Any, started.step), cast(Any, started.batches)
  batch = next(iter(batches(started.at.samples)), None)
  if batch is None:
    raise nxp.errors.TrainError(
      "the recipe has no batch to check gradients on.", fix="batches() with one or more batches."
    )
  with default_scope(plan.activation_rules):
    return step.check_gradients(started.model, started.optimizer, batch)


def train(
  args: argparse.Namespace,
  recipe: Recipe,
  plan: nxp.Plan,
  started: Run,
  checkpointer: nxp.Checkpointer | None,
) -> None:
  """Trains to the last step, with an evaluation before and after."""
  from nnx_parallel.loop.progress import StepProgress

  out = Path(args.out or Path("runs", recipe.name))
  evaluate: Any = started.evaluate
  main = nxp.hosts.main_process()  # it prints; all train, evaluate and save
  if main and not args.quiet:
    print(f"{recipe.name}, {describe(plan, started.at.step)}")
  if started.at.step >= args.steps:
    if main:
      print(f"step {started.at.step} is reached; continue with --steps {started.at.step + args.steps}")
    return
  every = args.log_every is not None
  shown = StepProgress(
    args.steps, start=started.at.step, unit=started.unit, every_update=every, quiet=args.quiet
  )
  shown.note(started.at.step, f"held out  {format_record(evaluate())}")
  with contextlib.ExitStack() as stack:
    log = stack.enter_context(nxp.loop.MetricsLog(out / "metrics.jsonl", after=started.at.step))
    result = started.train(
      args.steps,
      progress=shown,
      trackers=[log.write],
      log_every=args.log_every,
      evaluate=evaluate,
      eval_every=args.eval_every,
      early_stop=nxp.loop.EarlyStop("eval_loss", args.early_stop) if args.early_stop else None,
      checkpointer=checkpointer,
      save_every=args.save_every,
      profile=args.profile,
      profile_dir=out / "profile",
      peak_flops=args.peak_flops,
    )
  if not main:
    return
  if result.stopped == "early":
    print(f"ended at step {started.at.step}: no lower eval_loss in {args.early_stop} evaluations")
  held_out = {name[5:]: x for name, x in result.metrics.items() if name.startswith("eval_")}
  print(f"held out at step {started.at.step}: {format_record(held_out)}")
  if args.quiet:
    return
  earlier = f" (an earlier run's: {log.earlier})" if log.earlier else ""
  mfu = result.metrics.get("mfu")
  known = "n/a (the peak of this device is not known)" if mfu is None else f"{mfu:.1%}"
  print(f"metrics     {log.path}{earlier}\nMFU         {known}")
  if args.profile is not None:
    print(f"profile     xprof {out / 'profile'}")
  none = "none; keep the model with --checkpoint DIR"
  print(f"checkpoint  {none if args.checkpoint is None else Path(args.checkpoint, str(started.at.step))}")


def examples_in_first_batch(recipe: Recipe, plan: nxp.Plan) -> int:
  """Places a batch, so that missing data or a wrong size is an error early; returns its examples, or 0."""
  from nnx_parallel.train.losses import examples_in

  if recipe.batches is not None:
    for batch in recipe.batches(0, split="train"):
      nxp.shard_batch(batch, plan, global_batch=True)
      return examples_in(batch)
  return 0


def make_run(
  args: argparse.Namespace,
  recipe: Recipe,
  plan: nxp.Plan,
  checkpointer: nxp.Checkpointer | None,
  examples: int,
) -> Run:
  """Restores the run from the step of `--resume`, or creates it when there is no checkpoint yet."""
  settings = {name: getattr(args, name) for name in _SETTINGS}
  settings |= {"batch": examples, "rules": options.format_rules(args.rules)}
  how = {"settings": settings, "options": options.step_options(args)}
  if checkpointer is None or not (checkpointer.steps() or args.resume not in (None, "latest")):
    return nxp.recipes.start(recipe, plan, microbatches=recipe.parts(args.microbatches), **how)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", UserWarning)
    found = nxp.recipes.restore(
      recipe, plan, checkpointer, args.resume, microbatches=args.microbatches, **how
    )
  if not nxp.hosts.main_process():
    return found.run
  for warning in caught:
    print(f"warning: {warning.message}", file=sys.stderr)
  step = found.run.at.step
  if found.relaid is not None:
    print(f"a different layout than at step {step}:\n{found.relaid}", file=sys.stderr)
  if found.changes:
    print(f"settings changed since step {step}: {'; '.join(found.changes)}", file=sys.stderr)
  return found.run


def describe(plan: nxp.Plan, step: int) -> str:
  """The size of a model, its mesh, and the step it starts from, in one line."""
  from nnx_parallel.core.mesh import axis_sizes
  from nnx_parallel.core.text import format_bytes

  start = f", resumed from step {step}" if step else ""
  return (
    f"{plan.num_parameters():,} parameters on mesh {options.format_sizes(axis_sizes(plan.mesh))},"
    f" {format_bytes(plan.bytes_per_device())} per device with the optimizer{start}"
  )


def format_record(record: Record) -> str:
  """Metrics in one line."""
  return ", ".join(f"{name} {value:.4f}" for name, value in record.items()) or "no held-out batches"
