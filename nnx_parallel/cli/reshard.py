"""`nnx-parallel reshard`: rewrites a step so that a target layout reads it in whole files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import options

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
  parser.add_argument("directory", metavar="DIR", help="where the steps are")
  parser.add_argument("out", metavar="OUT", help="the directory to write to")
  options.add_recipe(parser)
  options.add_mesh(parser)
  parser.add_argument("--step", type=int, metavar="N", help="the step to rewrite (default: the newest)")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Reads, verifies and writes one step."""
  from nnx_parallel.recipes import load_recipe
  from nnx_parallel.recipes.job import plan_recipe

  recipe = load_recipe(args.recipe, needs=("init",))
  sizes = options.mesh_sizes(recipe, args.mesh)
  options.start_devices(sizes, args.devices)
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.reshard import reshard

  plan = plan_recipe(recipe, options.real_mesh(sizes, args.devices))
  with Checkpointer(args.out) as destination:
    step = reshard(Checkpointer(args.directory), destination, plan, args.step)
    record = destination.metadata(step)
  print(f"step {step}: {record.nbytes:,} bytes in {len(record.files)} files -> {args.out}")
  return 0
