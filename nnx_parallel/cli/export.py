"""`nnx-parallel export`: the model of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import options

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
  parser.add_argument("directory", metavar="DIR", help="where the steps are")
  parser.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
  options.add_recipe(parser)
  options.add_mesh(parser)
  parser.add_argument("--step", type=int, metavar="N", help="the step to export (default: the newest)")
  parser.add_argument("--mapping", metavar="FILE", help="a Python file with MAPPING = Mapping(...)")
  parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="leaves to leave out")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Restores, and writes the files."""
  from nnx_parallel.recipes import load_recipe
  from nnx_parallel.recipes.job import plan_recipe

  recipe = load_recipe(args.recipe, needs=("init",))
  sizes = options.mesh_sizes(recipe, args.mesh)
  options.start_devices(sizes, args.devices)
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.mapping import load_mapping
  from nnx_parallel.checkpoint.safetensors import export_safetensors

  mapping = load_mapping(args.mapping) if args.mapping else None
  plan = plan_recipe(recipe, options.real_mesh(sizes, args.devices))
  model = Checkpointer(args.directory).restore(plan, args.step, optimizer="drop")
  names = export_safetensors(args.out, model, mapping, skip=args.skip)
  print(f"{len(names)} arrays -> {args.out}")
  return 0
