"""`nnx-parallel annotate`: a patch with the shardings that a recipe's model needs on Explicit axes."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from nnx_parallel.cli import options
from nnx_parallel.cli.compile import abstract_batch
from nnx_parallel.errors import RecipeError


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "annotate",
    run,
    *("recipe", "--mesh", "--rules", "--batch"),
    help="write a patch that makes a recipe's model run on Explicit axes",
    description="Prints a patch (a unified diff) for the recipe's file. The patch adds the out_sharding="
    " arguments and the jax.sharding.reshard calls that the model and the loss need on Explicit axes (the"
    " axes of jax.make_mesh) without jax.sharding.auto_axes. The command does not change the file; apply the"
    " patch with git apply or patch -p1. The exit code is 3 if a place could not be annotated; standard error"
    " names this place.",
  )
  parser.add_argument(
    "--module",
    action="append",
    default=[],
    metavar="FILE",
    help="also change this file, which the recipe imports; may be repeated",
  )
  parser.add_argument("--output", type=Path, metavar="FILE", help="write the patch to this file")


def run(args: argparse.Namespace) -> int:
  """Prints the patch; the exit code is 3 if the patch is not complete."""
  import nnx_parallel as nxp
  from nnx_parallel.loop.loader import load_recipe

  recipe = load_recipe(args.recipe, needs=("init", "loss", "batches"))
  sizes = options.mesh_sizes(recipe, args.mesh, args.rules)
  place, _, entry = args.recipe.rpartition(":")
  found = nxp.interop.annotate(
    recipe.source,
    nxp.abstract_mesh(sizes),
    options.changed_rules(recipe, args.rules),
    abstract_batch(recipe, args.batch),
    init=entry if place.endswith(".py") else "init",
    modules=args.module,
  )
  if args.output is not None and any(args.output.resolve() == Path(name).resolve() for name in found.texts):
    raise RecipeError(f"--output {args.output} is a file that the patch changes.", fix="--output model.patch")
  if args.output is None:
    print(found.patch, end="")
  else:
    try:
      args.output.write_text(found.patch)
    except OSError as error:
      raise RecipeError(
        f"cannot write the patch {args.output}.", details=str(error), fix="--output model.patch"
      ) from error
  if not found.patch and not found.missing:
    print(f"{recipe.name} runs on Explicit axes as it is", file=sys.stderr)
  texts = [f"not annotated: {text}" for text in found.missing] + [f"note: {text}" for text in found.notes]
  for text in texts:
    print(re.sub(r"modules=\['(.*)'\]", r"--module \1", text), file=sys.stderr)
  return options.NO if found.missing else 0
