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
  """Restores one step, and saves all that it holds."""
  from flax import traverse_util

  from nnx_parallel.checkpoint import paths
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.errors import CheckpointError

  plan = checkpoints.load_plan(args)
  source = Checkpointer(args.directory)
  if source.directory == Checkpointer(args.out).directory:
    raise CheckpointError(f"cannot reshard {source.directory} into itself.", fix="write to another folder.")
  record = source.metadata(args.step)
  restored = source.restore(plan, record.step)
  model, optimizer = restored if isinstance(restored, tuple) else (restored, None)
  extra = {name: source.restore_extra(name, step=record.step) for name in record.extra}
  for name in [name for name in record.items if name not in ("model", "optimizer")]:  # these have no plan
    leaves = source.restore_extra(name, step=record.step, as_numpy=True)
    extra[name] = traverse_util.unflatten_dict({paths.parse(path): leaf for path, leaf in leaves.items()})
  with Checkpointer(args.out) as destination:
    destination.save(record.step, model, optimizer, extra=extra, metrics=record.metrics, plan=plan)
    written = destination.metadata(record.step)
  print(f"step {record.step}: {written.nbytes:,} bytes in {len(written.files)} files -> {args.out}")
  return 0
