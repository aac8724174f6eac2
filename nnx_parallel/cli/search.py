"""`nnx-parallel search`: which mesh, microbatches and remat a recipe should run with on a machine."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from nnx_parallel.cli import options
from nnx_parallel.cli.compile import abstract_batch, loss_of, start_compiler

if TYPE_CHECKING:
  from nnx_parallel.report.search.search import Candidate

_MOST_SIMULATED = 1024


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "search",
    run,
    "recipe",
    "--rules",
    "--layers",
    "--batch",
    "--html",
    help="rank every layout of a recipe on a machine",
    description="Tries every factorisation of the mesh with microbatches, remat policies, ZeRO stages and"
    " offload, and with split sequences and experts where the model names them, by a model of memory and"
    " time; with --pipeline also stages; prints the Pareto front and the winner as code. Exit code 3:"
    " nothing fits.",
  )
  add = parser.add_argument
  add("--topology", required=True, metavar="NAME", help="e.g. tpu:v5p:4x4x8, gpu:h100:4x8")
  add(
    "--compile-best",
    type=options.positive,
    default=0,
    metavar="N",
    help="compile the N fastest for simulated devices, and the first of these for the machine",
  )
  add("--pipeline", metavar="AXIS", help="also try pipelines over a mesh axis of this name")
  add("--remat", nargs="+", choices=options.REMATS, help="policies to try (default: none dots full)")
  add("--zero", nargs="+", type=int, choices=(0, 1, 2), help="ZeRO stages to try (default: 0 1 2)")
  add(
    "--offload",
    action=argparse.BooleanOptionalAction,
    help="optimizer state always, or never, in host memory (default: both are tried)",
  )
  add("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
  """Searches and prints; exit code 3: no layout fits."""
  from nnx_parallel.core.text import print_text
  from nnx_parallel.loop.loader import load_recipe
  from nnx_parallel.report.search.search import search
  from nnx_parallel.report.topology import read_machine

  recipe = load_recipe(args.recipe)
  devices = read_machine(args.topology).devices
  # Simulated devices hold nothing, but each costs some memory of the process.
  simulate = args.compile_best and devices <= _MOST_SIMULATED
  start_compiler({"all": devices}, f"cpu:{devices}" if simulate else args.topology, None)
  tried: dict[str, Any] = {"remat": args.remat, "zero": args.zero, "offload": args.offload}
  result = search(
    recipe.init,
    loss_of(recipe),
    args.topology,
    batch=abstract_batch(recipe, args.batch),
    rules=options.changed_rules(recipe, args.rules),
    optimizer=recipe.optimizer() if recipe.optimizer is not None else None,
    compile_best=args.compile_best,
    layers=args.layers,
    pipeline=args.pipeline,
    **{name: value for name, value in tried.items() if value is not None},
  )
  print(result.to_json()) if args.json else print_text(str(result))
  if result.best is not None and not args.json:
    print(f"Compiled alone:\n\n  {command(args, result.best)}\n")
  if args.html:
    options.write_page(args.html, result.to_html())
  return 0 if result.best is not None else options.NO


def command(args: argparse.Namespace, best: Candidate) -> str:
  """The command that compiles a candidate, as a line for the shell."""
  words = ["nnx-parallel", "compile", args.recipe, "--topology", args.topology]
  words += ["--mesh", options.format_sizes(dict(best.sizes)), "--microbatches", str(best.microbatches)]
  words += ["--remat", best.remat, "--zero", str(best.zero)]
  words += ["--layers", args.layers] if args.layers else []
  words += ["--offload"] if best.offload else []
  words += ["--pipeline", options.format_pipeline(best.pipeline)] if best.pipeline else []
  rules = {**args.rules, **best.changes}
  words += ["--rules", options.format_rules(rules)] if rules else []
  words += ["--batch", str(args.batch)] if args.batch else []
  return shlex.join(words)
