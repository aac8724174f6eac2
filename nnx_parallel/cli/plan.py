"""`nnx-parallel plan`: the layout of a recipe on a mesh, and whether it fits; no device is needed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, cast

import nnx_parallel as nxp
from nnx_parallel.cli import options
from nnx_parallel.cli.compile import abstract_batch
from nnx_parallel.errors import ReportError

if TYPE_CHECKING:
  from nnx_parallel.loop.loader import Recipe


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "plan",
    run,
    *options.STEP,
    "--pipeline",
    "--batch",
    "--chip",
    "--html",
    help="show how a recipe is laid out on a mesh",
    description="Prints every Variable of the model and its optimizer: shape, layout, bytes per"
    " device, and why. Needs no devices: the mesh may be as large as you like. With --chip, --batch,"
    " --microbatches, --pipeline or --remat, also the planned memory of a train step; exit code 3: it does"
    " not fit the chip.",
  )
  alone = parser.add_mutually_exclusive_group()
  alone.add_argument("--explain", metavar="PATH", help="only how the layout of one Variable was decided")
  alone.add_argument("--json", action="store_true", help="only the plan, as JSON that Plan.from_json reads")


def run(args: argparse.Namespace) -> int:
  """Prints the plan; exit code 3: its memory does not fit the chip."""
  from nnx_parallel.core.text import print_text

  shown = not (args.json or args.explain)
  step = bool(args.batch or args.microbatches or args.pipeline or args.remat != options.AS_WRITTEN)
  if step and not (shown or args.chip or args.html):
    raise ReportError(
      "--batch, --microbatches, --pipeline and --remat change a step's memory, which --json and --explain do"
      " not show.",
      fix="leave them out, or add --chip NAME (the exit code is 3 when it does not fit) or --html FILE.",
    )
  asked = bool(args.chip) or (shown and step)
  recipe = nxp.recipes.load_recipe(args.recipe, needs=("init", "loss", "batches") if asked else ("init",))
  sizes = options.mesh_sizes(recipe, args.mesh, args.rules, args.pipeline)
  is_real = args.devices is not None or -1 in sizes.values()
  mesh = options.mesh_on_devices(args, recipe) if is_real else nxp.abstract_mesh(sizes)
  plan = options.make_plan(args, recipe, mesh)
  wanted = asked or (args.html and recipe.loss and recipe.batches)
  memory = _planned(recipe, plan, args) if wanted else None
  if args.html:
    options.write_page(args.html, nxp.report.plan_page(plan, memory, title=recipe.name))
  if args.json:
    print(plan.to_json(), end="")
  elif args.explain is not None:
    print(plan.explain(args.explain))
  else:
    if memory is not None and asked:
      print_text(f"{memory.verdict}\n")  # the question of most readers; the tables below have the numbers
    plan.show()
    if audit := plan.audit():
      print_text(f"\n{audit}")
    if asked:
      print_text(f"\n{memory}")
  fits = memory is None or memory.headroom_bytes is None or memory.headroom_bytes >= 0
  return 0 if fits else options.NO


def _planned(recipe: Recipe, plan: nxp.Plan, args: argparse.Namespace) -> nxp.report.MemoryPlan:
  """The memory of the recipe's step on its first batch."""
  return nxp.memory_plan(
    plan,
    cast(Any, recipe.loss),
    abstract_batch(recipe, args.batch),
    microbatches=recipe.parts(args.microbatches),
    remat=args.remat,
    layers=args.layers,
    pipeline=args.pipeline,
    chip=args.chip,
  )
