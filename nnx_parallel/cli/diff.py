"""`nnx-parallel diff`: whether a checkpoint fits a recipe on a mesh, and what restoring it would cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import checkpoints, options

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "diff",
    help="compare a checkpoint with a recipe on a mesh",
    description="Compares a step with the recipe's model and optimizer, leaf by leaf: missing,"
    " extra, renamed, reshaped, of another dtype. Reads no array. Exit code 3: it does not fit.",
  )
  checkpoints.add_directory(parser)
  checkpoints.add_target(parser)
  checkpoints.add_step(parser, "compare")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Prints the comparison."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer

  plan = checkpoints.load_plan(args)
  diff = Checkpointer(args.directory).diff(plan, args.step)
  print(diff)
  return 0 if diff.fits else options.NO
