"""Entry point of `nnx-parallel`: parses the command line and prints errors as messages.

Nothing here imports jax: help and usage errors come at once, and a command can still choose its devices.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from nnx_parallel.cli import checkpoints, compile, launch, new, plan, search, train
from nnx_parallel.errors import NnxParallelError

OK, FAILED, INTERRUPTED, CUT_SHORT = 0, 1, 130, 141  # argparse ends with 2; options.NO is 3


class _Parser(argparse.ArgumentParser):
  """Proposes the nearest command or option (Python 3.14 has `suggest_on_error=`, for commands)."""

  def error(self, message: str) -> NoReturn:
    words = re.findall(r"'([\w-]+)'", message)
    near = difflib.get_close_matches(words[0], words[1:], 1) if "invalid choice" in message else []
    if strange := re.match(r"unrecognized arguments: (?:.* )?(--[\w-]+)", message):
      commands = [a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)]  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportUnknownMemberType]
      usages = "".join(p.format_usage() for parsers in commands for p in parsers.values())
      near = difflib.get_close_matches(strange[1], re.findall(r"--[\w-]+", usages), 1)
    super().error(message + (f". Fix: did you mean {near[0]}?" if near else ""))


def make_parser() -> argparse.ArgumentParser:
  """The parser of all commands, with the commands for newcomers first."""
  parser = _Parser(
    prog="nnx-parallel",
    description="Parallelism for Flax NNX: any module, any mesh, one plan.",
    epilog="Start here: nnx-parallel plan text_lm --mesh data=2,fsdp=2,tensor=2\n"
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 the answer is no (does not fit, differs, damaged),\n"
    "75 stopped by SIGTERM and saved, 130 Ctrl-C, 141 the program that reads the output ended.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  try:
    number = version("nnx-parallel")
  except PackageNotFoundError:
    number = "(not installed)"
  parser.add_argument("--version", action="version", version=f"%(prog)s {number}")
  commands = parser.add_subparsers(metavar="COMMAND", required=True)
  for module in (plan, compile, search, train, launch, new, checkpoints):
    module.register(commands)
  return parser


def _with_options(text: str) -> str:
  """An error with Python's `skip=[...]` as `--skip`."""

  def option(found: re.Match[str]) -> str:
    names = re.findall(r"'([^']*)'", found[1]) or ["PATTERN"]
    return shlex.join(word for name in names for word in ("--skip", name))

  return re.sub(r"\bskip=(\[.*?\])", option, text)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command, with the arguments of the process by default; returns the exit code."""
  parser = make_parser()
  if not (sys.argv[1:] if argv is None else argv):
    parser.print_help()
    return OK
  args = parser.parse_args(argv)
  code = CUT_SHORT  # until the answer is known; the code that a shell shows for SIGPIPE
  try:
    code = args.run(args)
    sys.stdout.flush()
    return code
  except NnxParallelError as error:
    print(f"{type(error).__name__}: {_with_options(str(error))}", file=sys.stderr)
    return FAILED
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED
  except BrokenPipeError:
    # The reader (`| head`) has read enough. Without this Python reports the closed pipe once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
  sys.exit(main())
