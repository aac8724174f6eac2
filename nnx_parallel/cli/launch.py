"""`nnx-parallel launch`: starts the processes of a job on this machine, and restarts them if one fails."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from nnx_parallel.cli import options
from nnx_parallel.errors import RecipeError
from nnx_parallel.hosts.launch import Job, launch


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "launch",
    run,
    help="run a recipe or a script in several processes",
    description="Starts the processes of a job on this machine, shows their output, ends all when one fails,"
    " and starts them again. `train RECIPE ...`, or the name of a recipe of the package, trains; a file is"
    " run as a script, which calls nxp.init_distributed() first.",
  )
  add = parser.add_argument
  add("-n", "--processes", type=options.positive, metavar="N", help="how many processes to start (2)")
  add(
    "--devices-per-process",
    type=options.positive,
    metavar="N",
    help="simulate N CPU devices in each process; without it, each takes the GPU of its number",
  )
  add(
    "--cluster",
    action="store_true",
    help="one process, whose number and peers Slurm, Kubernetes or others say: a supervisor for each task",
  )
  add("--restarts", type=int, default=0, metavar="N", help="start all again N times at most (0)")
  add(
    "--pause",
    type=float,
    default=1.0,
    metavar="S",
    help="seconds before the first restart, doubled for each restart that trains no further (1)",
  )
  add(
    "--hang-after",
    type=float,
    metavar="S",
    help="a process that makes no step for S seconds, after its first, has failed; more than an evaluation"
    " or a save takes",
  )
  add("--grace", type=float, default=30.0, metavar="S", help="seconds to save after SIGTERM or Ctrl-C (30)")
  add("command", nargs=argparse.REMAINDER, metavar="-- train RECIPE|SCRIPT ...", help="and its arguments")


def run(args: argparse.Namespace) -> int:
  """Starts the job and returns its exit code."""
  words = args.command[1:] if args.command[:1] == ["--"] else args.command
  if not words:
    args.usage_error("no recipe and no script; for example -- text_lm --mesh data=4")
  if args.cluster and args.processes not in (None, 1):
    args.usage_error("--cluster starts one process; the scheduler starts a launcher for each")
  if args.restarts < 0 or min(args.pause, args.grace, args.hang_after or 0) < 0:
    args.usage_error("--restarts, --pause, --hang-after and --grace cannot be negative")
  command = command_of(words)
  again: list[str] = []
  if args.restarts and command[1:4] == ["-m", "nnx_parallel", "train"]:
    if "--checkpoint" not in " ".join(words):
      args.usage_error("--restarts continue from a checkpoint: add --checkpoint DIR --save-every N")
    again = resume(command)
  return launch(
    Job(
      command,
      again,
      processes=1 if args.cluster else args.processes or 2,
      devices_per_process=args.devices_per_process,
      cluster=args.cluster,
      restarts=args.restarts,
      pause=args.pause,
      hang_after=args.hang_after,
      grace=args.grace,
    ),
    write,
  )


def write(line: str) -> None:
  """Shows a line in one piece: several threads write."""
  sys.stdout.write(f"{line}\n")
  sys.stdout.flush()


def command_of(words: Sequence[str]) -> list[str]:
  """The command of each process: `train` or a recipe's name, a script's file, or another program."""
  first, *rest = words
  train = [sys.executable, "-m", "nnx_parallel", "train"]
  if first == "train" and rest:
    return [*train, *rest]
  file = Path(first)
  if file.suffix == ".py":
    if not file.is_file():
      raise RecipeError(f"there is no file {first}.", fix="the path of a script, or: train RECIPE.")
    return [sys.executable, first, *rest]
  return list(words) if shutil.which(first) else [*train, first, *rest]


def resume(command: Sequence[str]) -> list[str]:
  """The command of a later attempt: it resumes from the newest step, whatever the first attempt named."""
  kept = list(command)
  while (at := next((i for i, word in enumerate(kept) if re.match("--resume(=|$)", word)), None)) is not None:
    has_value = kept[at] == "--resume" and at + 1 < len(kept) and not kept[at + 1].startswith("-")
    del kept[at : at + 1 + has_value]
  return [*kept, "--resume"]
