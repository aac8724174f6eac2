"""`nnx-parallel import`: safetensors as a checkpoint that training can start from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import checkpoints
from nnx_parallel.errors import CheckpointError

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "import",
    help="turn safetensors into a checkpoint",
    description="Reads safetensors straight into the recipe's layout and saves them as step 0, with a fresh"
    " optimizer when the recipe has one.",
  )
  parser.add_argument("path", metavar="PATH", help="a .safetensors file, its index, or their folder")
  parser.add_argument("out", metavar="OUT", help="the checkpoint directory to write to")
  checkpoints.add_target(parser)
  checkpoints.add_weight_map(parser, "initialise")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Reads the files, and saves step 0."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.interop.safetensors import import_safetensors

  plan = checkpoints.load_plan(args)
  weight_map = checkpoints.load_weight_map(args)
  with Checkpointer(args.out) as checkpointer:
    if steps := checkpointer.steps():
      raise CheckpointError(
        f"cannot import into {args.out}: it holds the checkpoints of a run.",
        details=f"steps {', '.join(map(str, steps))}",
        fix="choose an empty directory for OUT.",
      )
    with checkpoints.skip_as_option():
      made = import_safetensors(args.path, plan, weight_map, skip=args.skip)
    model, optimizer = made if isinstance(made, tuple) else (made, None)
    checkpointer.save(0, model, optimizer, plan=plan)
    print(f"step 0: {checkpointer.metadata(0).nbytes:,} bytes -> {args.out}")
  return 0
