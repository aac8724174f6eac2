"""`nnx-parallel plan`: how a recipe is laid out on a mesh, and whether it fits; no device is needed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nnx_parallel.cli import options
from nnx_parallel.cli.compile import abstract_batch, add_step, loss_of
from nnx_parallel.errors import ReportError

if TYPE_CHECKING:
  from nnx_parallel.cli.main import Commands
  from nnx_parallel.layout.plan import ShardingPlan
  from nnx_parallel.loop.loader import Recipe
  from nnx_parallel.report.estimate.memory import MemoryPlan
  from nnx_parallel.report.estimate.roofline import StepTime


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "plan",
    help="show how a recipe is laid out on a mesh",
    description="Prints every Variable of the model and its optimizer: shape, layout, bytes per"
    " device, and why. Needs no devices: the mesh may be as large as you like. With --chip, --batch,"
    " --microbatches or --remat, also the planned memory of a train step; exit code 3: it does not fit the"
    " chip.",
  )
  options.add_recipe(parser)
  options.add_mesh(parser)
  options.add_optimizer(parser)
  alone = parser.add_mutually_exclusive_group()
  alone.add_argument("--explain", metavar="PATH", help="how one Variable came to its layout, alone")
  alone.add_argument(
    "--json", action="store_true", help="the plan alone as JSON, which ShardingPlan.from_json reads"
  )
  parser.add_argument("--chip", metavar="NAME", help="compare the planned memory with this chip's: v5e, h100")
  add_step(parser)
  options.add_way(parser)
  options.add_page(parser)
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Prints the plan, and says by the exit code whether its memory fits where a chip is named."""
  import nnx_parallel as nxp
  from nnx_parallel.core.text import print_text
  from nnx_parallel.loop.job import plan_recipe
  from nnx_parallel.loop.loader import load_recipe

  shown = not (args.json or args.explain)
  step = bool(args.batch or args.microbatches or args.remat != options.AS_WRITTEN)
  if step and not (shown or args.chip or args.html):
    raise ReportError(
      "--batch, --microbatches and --remat change a step's memory, which --json and --explain do not show.",
      fix="leave them out, or add --chip NAME (the exit code says whether it fits) or --html FILE.",
    )
  recipe = load_recipe(args.recipe, needs=("init",))
  sizes = options.mesh_sizes(recipe, args.mesh, args.rules)
  if args.devices is not None or -1 in sizes.values():
    options.start_devices(sizes, args.devices)
    mesh = options.real_mesh(sizes, args.devices)
  else:
    mesh = nxp.abstract_mesh(sizes)
  plan = plan_recipe(
    recipe, mesh, options.changed_rules(recipe, args.rules), **options.optimizer_options(args)
  )
  asked = bool(args.chip) or (shown and step)
  wanted = asked or (args.html and recipe.loss and recipe.batches)
  memory, time = _planned(recipe, plan, args) if wanted else (None, None)
  if args.html:
    options.write_page(args.html, nxp.plan_page(plan, memory, time, title=recipe.name))
  if args.json:
    print(plan.to_json(), end="")
  elif args.explain is not None:
    print(plan.explain(args.explain))
  else:
    plan.show()
    audit = plan.audit()
    if audit:
      print_text(f"\n{audit}")
    if asked:
      print_text(f"\n{memory}")
  fits = memory is None or memory.headroom_bytes is None or memory.headroom_bytes >= 0
  return 0 if fits else options.NO


def _planned(
  recipe: Recipe, plan: ShardingPlan, args: argparse.Namespace
) -> tuple[MemoryPlan, StepTime | None]:
  """Memory, and for the page on a chip time, of the recipe's step: from its loss and its first batch."""
  from nnx_parallel.report.estimate.memory import memory_plan
  from nnx_parallel.report.estimate.roofline import predict_time

  loss = loss_of(recipe)
  batch = abstract_batch(recipe, args.batch)
  parts = recipe.parts(args.microbatches)
  way: dict[str, Any] = {"microbatches": parts, "remat": args.remat}
  memory = memory_plan(plan, loss, batch, chip=args.chip, **way)
  if not (args.html and args.chip):
    return memory, None
  return memory, predict_time(plan, loss, batch, chip=args.chip, **way)
