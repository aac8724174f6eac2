"""`nnx-parallel verify`: reads every byte of a checkpoint directory and says what is damaged."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import checkpoints, options

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "verify",
    help="check every value and file of a checkpoint directory",
    description="Compares every array with the digest taken when it was saved, and every file with its"
    " size and checksum. Exit code 3: something is damaged.",
  )
  checkpoints.add_directory(parser)
  checkpoints.add_step(parser, "check", default="all")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Checks the steps, one line each."""
  from nnx_parallel.checkpoint import folders
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.damage import VanishedError

  checkpointer = Checkpointer(args.directory)
  found = sorted([*checkpointer.steps(), *folders.unrecognised_steps(checkpointer.directory)])
  steps = found if args.step is None else [args.step]
  if not steps:
    checkpointer.metadata()  # raises, and says why there is nothing
  good = damaged = 0
  for step in steps:
    try:
      problems = checkpointer.verify(step)
    except VanishedError:
      if args.step is not None:
        raise
      print(f"step {step}: removed or replaced meanwhile")
      continue
    good, damaged = good + (not problems), damaged + bool(problems)
    print(f"step {step}: {'damaged' if problems else 'good'}")
    for problem in problems.values():
      print(f"  {problem}")
  print(f"{good} good, {damaged} damaged")
  return options.NO if damaged else 0
