"""`nnx-parallel reshard`: rewrites a step so that a target layout reads it in whole files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import checkpoints

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "reshard",
    help="rewrite a checkpoint for another layout",
    description="Writes one step again, cut as the recipe is laid out on the mesh, into another directory."
    " Any layout restores from any checkpoint; this only makes many restores of one layout faster.",
  )
  checkpoints.add_directory(parser)
  parser.add_argument("out", metavar="OUT", help="the directory to write to")
  checkpoints.add_target(parser)
  checkpoints.add_step(parser, "rewrite")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Reads, verifies and writes one step."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.reshard import reshard

  plan = checkpoints.load_plan(args)
  with Checkpointer(args.out) as destination:
    step = reshard(Checkpointer(args.directory), destination, plan, args.step)
    record = destination.metadata(step)
  print(f"step {step}: {record.nbytes:,} bytes in {len(record.files)} files -> {args.out}")
  return 0
