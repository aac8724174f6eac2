"""`nnx-parallel search`: which mesh, microbatches and remat a recipe should run with on a machine."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any, cast

import nnx_parallel as nxp
from nnx_parallel.cli import options
from nnx_parallel.cli.compile import abstract_batch, start_compiler

if TYPE_CHECKING:
  from nnx_parallel.report.search import Candidate

_MOST_SIMULATED = 1024


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "search",
    run,
    *("recipe", "--rules", "--zero", "--offload", "--layers", "--batch", "--json"),
    help="find a layout of a recipe that fits on a machine, with little work",
    description="Tries about a dozen meshes with microbatches and remat policies. The memory plan drops what"
    " cannot fit, and the counts of a compiler rank the best of the others. Prints the winner as code. Exit"
    " code 3: nothing fits.",
  )
  add = parser.add_argument
  add(
    "--pipeline",
    type=lambda text: options.pipeline(text) if ":" in text else text,  # the search chooses the order
    metavar="AXIS[:VIRTUAL_STAGES][:ORDER]",
    help="also try pipelines over this mesh axis; with AXIS alone, the order is 1f1b",
  )
  add("--topology", required=True, metavar="NAME", help="e.g. tpu:v5p:4x4x8, gpu:h100:4x8")
  add(
    "--compile-best",
    type=int,
    choices=range(65),
    default=3,
    metavar="N",
    help="compile at most N layouts (3); 0: none, the layouts are ranked by exact bytes",
  )
  add("--remat", nargs="+", choices=options.REMATS, default=("none", "dots", "full"), help="policies to try")


def run(args: argparse.Namespace) -> int:
  """Searches and prints; exit code 3: no layout fits."""
  from nnx_parallel.core.text import print_text
  from nnx_parallel.report.topology import missing_compiler, read_machine

  recipe, machine = nxp.recipes.load_recipe(args.recipe), read_machine(args.topology)
  # Simulated devices hold nothing, but each costs some memory of the process.
  simulate = args.compile_best and machine.devices <= _MOST_SIMULATED
  simulate = simulate and (machine.chip.platform == "cpu" or missing_compiler(machine) is not None)
  start_compiler({"all": machine.devices}, f"cpu:{machine.devices}" if simulate else args.topology, None)
  result = nxp.search(
    recipe.init,
    cast(Any, recipe.loss),
    args.topology,
    batch=abstract_batch(recipe, args.batch),
    rules=options.change_rules(recipe, args.rules),
    optimizer=recipe.optimizer() if recipe.optimizer is not None else None,
    compile_best=args.compile_best,
    layers=args.layers,
    pipeline=args.pipeline,
    remat=args.remat,
    zero=args.zero,
    optimizer_memory="pinned_host" if args.offload else None,
  )
  print(result.to_json()) if args.json else print_text(str(result))
  if result.best is not None and not args.json:
    print(f"Compiled alone:\n\n  {command(args, result.best)}\n")
  return 0 if result.best is not None else options.NO


def command(args: argparse.Namespace, best: Candidate) -> str:
  """The command that compiles a candidate, as a line for the shell."""
  words = ["nnx-parallel", "compile", args.recipe, "--topology", args.topology]
  words += ["--mesh", options.format_sizes(best.sizes), "--microbatches", str(best.memory.microbatches)]
  words += ["--remat", str(best.memory.remat), "--zero", str(args.zero)]
  words += ["--layers", args.layers] if args.layers else []
  words += ["--offload"] if args.offload else []
  if (found := best.pipeline) is not None:
    parts = [found.axis, str(found.virtual_stages) if found.virtual_stages > 1 else "", found.order or ""]
    words += ["--pipeline", ":".join(filter(None, parts))]
  words += ["--rules", options.format_rules(args.rules)] if args.rules else []
  words += ["--batch", str(args.batch)] if args.batch else []
  return shlex.join(words)
