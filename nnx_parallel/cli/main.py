"""Entry point of `nnx-parallel`; finds the commands and turns errors into messages.

Nothing here imports jax: help and usage errors come at once, and a command can still choose its devices.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nnx_parallel.errors import NnxParallelError

if TYPE_CHECKING:
  Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]

ORDER = ("plan", "compile", "search", "train", "new", "demo")
NOT_COMMANDS = ("__init__", "checkpoints", "main", "options")

OK, FAILED, INTERRUPTED = 0, 1, 130  # argparse ends with 2; options.NO is 3


class Command(Protocol):
  """What a file of this folder defines."""

  def register(self, commands: Commands) -> None:
    """Adds its parser, with `set_defaults(run=run)`."""
    ...


def command_names() -> list[str]:
  """The commands there are: one for each file, those that a newcomer needs first.

  Example:
    >>> command_names()[0]
    'plan'
  """
  files = {f.stem for f in Path(__file__).parent.glob("*.py")} - set(NOT_COMMANDS)
  names = {f.removesuffix("_") for f in files}
  return [n for n in ORDER if n in names] + sorted(names - set(ORDER))


def load_command(name: str) -> Command:
  """Imports one command; `import` and other keywords live in a file with an underscore after."""
  folder = Path(__file__).parent
  stem = name if (folder / f"{name}.py").is_file() else f"{name}_"
  return importlib.import_module(f"nnx_parallel.cli.{stem}")  # pyright: ignore[reportReturnType]


def package_version() -> str:
  """The installed version; a checkout that is not installed has none."""
  try:
    return version("nnx-parallel")
  except PackageNotFoundError:
    return "(not installed)"


def make_parser() -> argparse.ArgumentParser:
  """The parser with every command registered."""
  parser = argparse.ArgumentParser(
    prog="nnx-parallel",
    description="Parallelism for Flax NNX: any module, any mesh, one plan.",
    epilog="Start here: nnx-parallel plan text_lm --mesh data=2,fsdp=2,tensor=2\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 the answer is no (does not fit, differs, damaged).",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
  commands = parser.add_subparsers(metavar="COMMAND", required=True)
  for name in command_names():
    load_command(name).register(commands)
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command.

  Args:
    argv: the arguments; by default those of the process.

  Returns:
    0 when it worked; 1 for an error, whose message is on standard error; 2 for wrong usage; 3 when the answer
    is no: something does not fit, differs or is damaged; 130 when interrupted.
  """
  parser = make_parser()
  if not (sys.argv[1:] if argv is None else argv):
    parser.print_help()
    return OK
  args = parser.parse_args(argv)
  try:
    return args.run(args)
  except NnxParallelError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return FAILED
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED
  except BrokenPipeError:
    # The reader (`| head`) has seen enough; without this Python complains once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


if __name__ == "__main__":
  sys.exit(main())
