"""`nnx-parallel plan`: how a recipe is laid out on a mesh; nothing is allocated, no device is needed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nnx_parallel.cli import options

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "plan",
    help="show how a recipe is laid out on a mesh",
    description="Prints every Variable of the model and its optimizer: shape, layout, bytes per"
    " device, and why. Needs no devices: the mesh may be as large as you like.",
  )
  options.add_recipe(parser)
  options.add_mesh(parser)
  parser.add_argument("--explain", metavar="PATH", help="how one Variable came to its layout")
  parser.add_argument(
    "--json", action="store_true", help="the plan as JSON, which ShardingPlan.from_json reads"
  )
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Prints the plan."""
  import nnx_parallel as nxp
  from nnx_parallel.recipes import load_recipe
  from nnx_parallel.recipes.job import plan_recipe

  recipe = load_recipe(args.recipe, needs=("init",))
  sizes = options.mesh_sizes(recipe, args.mesh)
  if args.devices is not None or -1 in sizes.values():
    options.start_devices(sizes, args.devices)
    mesh = options.real_mesh(sizes, args.devices)
  else:
    mesh = nxp.abstract_mesh(sizes)
  plan = plan_recipe(recipe, mesh)
  if args.json:
    print(plan.to_json(), end="")
  elif args.explain is not None:
    print(plan.explain(args.explain))
  else:
    print(plan)
    audit = plan.audit()
    if audit:
      print(f"\n{audit}")
  return 0
