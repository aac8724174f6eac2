"""`nnx-parallel export`: the model of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import checkpoints

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "export",
    help="write the model of a checkpoint as safetensors",
    description="Restores and verifies the model, and writes it as safetensors, with an index when there are"
    " several files.",
  )
  checkpoints.add_directory(parser)
  parser.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
  checkpoints.add_target(parser, optimizer=False)
  checkpoints.add_step(parser, "export")
  checkpoints.add_weight_map(parser, "leave out")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Restores, and writes the files."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.interop.safetensors import export_safetensors

  plan = checkpoints.load_plan(args)
  weight_map = checkpoints.load_weight_map(args)
  model = Checkpointer(args.directory).restore(plan, args.step, optimizer="drop")
  with checkpoints.skip_as_option():
    names = export_safetensors(args.out, model, weight_map, skip=args.skip)
  print(f"{len(names)} arrays -> {args.out}")
  return 0
