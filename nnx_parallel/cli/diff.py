"""`nnx-parallel diff`: whether a checkpoint fits a recipe on a mesh, and what restoring it would cost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import options

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "diff",
    help="compare a checkpoint with a recipe on a mesh",
    description="Compares the newest step with the recipe's model and optimizer, leaf by leaf: missing,"
    " extra, renamed, reshaped, of another dtype. Reads no array. Exits with 1 when it does not fit.",
  )
  parser.add_argument("directory", metavar="DIR", help="where the steps are")
  options.add_recipe(parser)
  options.add_mesh(parser)
  parser.add_argument("--step", type=int, metavar="N", help="the step to compare (default: the newest)")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Prints the comparison."""
  from nnx_parallel.recipes import load_recipe
  from nnx_parallel.recipes.job import plan_recipe

  recipe = load_recipe(args.recipe, needs=("init",))
  sizes = options.mesh_sizes(recipe, args.mesh)
  options.start_devices(sizes, args.devices)
  from nnx_parallel.checkpoint.checkpointer import Checkpointer

  plan = plan_recipe(recipe, options.real_mesh(sizes, args.devices))
  diff = Checkpointer(args.directory).preflight(plan, args.step)
  print(diff)
  return 0 if diff.fits else 1
