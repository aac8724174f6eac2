"""`nnx-parallel new`: writes a recipe to start from."""

from __future__ import annotations

import argparse
import importlib.resources
import re
import shlex
from pathlib import Path

from nnx_parallel.cli import options
from nnx_parallel.errors import RecipeError


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "new",
    run,
    help="write a recipe to start from",
    description="Copies a recipe of the package into a new file, which every command takes.",
  )
  parser.add_argument("file", metavar="FILE", type=Path, help="the file to write: mine.py")
  parser.add_argument("--like", default="starter", metavar="NAME", help="starter (default), text_lm, digits")


def run(args: argparse.Namespace) -> int:
  """Writes the file, and prints the commands to try next."""
  from nnx_parallel.loop.loader import embedded_recipes

  file: Path = args.file
  if args.like not in embedded_recipes():
    raise RecipeError(f"no recipe named {args.like!r}.", fix=f"--like {' or '.join(embedded_recipes())}.")
  if file.suffix != ".py":
    raise RecipeError(f"a recipe is a Python file, and {file} is not.", fix=f"nnx-parallel new {file}.py")
  source = importlib.resources.files("nnx_parallel.recipes").joinpath(f"{args.like}.py").read_text("utf-8")
  word = shlex.quote(str(file))
  # The commands in its docstring are for the new file.
  source = re.sub(rf"(nnx-parallel \w+ +){args.like}\b", lambda found: found[1] + word, source)
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as new:
      new.write(source)
  except OSError as error:
    raise RecipeError(f"cannot write {file}: {error.strerror}.", fix="another FILE.") from error
  print(f"{file} is a copy of {args.like}; next:\n  nnx-parallel plan {word}\n  nnx-parallel train {word}")
  return 0
