"""`nnx-parallel inspect`: what a directory of checkpoints holds; reads the manifests, not the arrays."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
from typing import TYPE_CHECKING

from nnx_parallel.cli import checkpoints

if TYPE_CHECKING:
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.manifest import Manifest
  from nnx_parallel.cli.main import Commands


def register(commands: Commands) -> None:
  """Adds the parser of this command."""
  parser = commands.add_parser(
    "inspect",
    help="list the steps of a checkpoint directory and what one of them holds",
    description="Lists the complete steps, then the trees, leaves, values and versions of one of them.",
  )
  checkpoints.add_directory(parser)
  checkpoints.add_step(parser, "show")
  parser.add_argument(
    "--leaves",
    metavar="PATTERN",
    help="leaves to list one by one: 'model/*.kernel' (all, equal layers folded)",
  )
  parser.add_argument("--json", action="store_true", help="the manifest as it is")
  parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
  """Prints the steps and one manifest."""
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.checkpoint.folders import folder_of
  from nnx_parallel.checkpoint.manifest import as_json

  checkpointer = Checkpointer(args.directory)
  record = checkpointer.metadata(args.step)
  if args.json:
    print(json.dumps(as_json(folder_of(checkpointer.directory, record.step)), indent=2))
    return 0
  print_steps(checkpointer)
  print(f"\nstep {record.step}")
  print_facts(record)
  print_leaves(record, args.leaves)
  return 0


def print_steps(checkpointer: Checkpointer) -> None:
  """One line for each complete step."""
  from nnx_parallel.errors import CheckpointError

  print(f"{checkpointer.directory}: {len(checkpointer.steps())} complete steps")
  for step in checkpointer.steps():
    try:
      record = checkpointer.metadata(step)
    except CheckpointError as error:
      print(f"  {step:>8}  {error.what}")
      continue
    when = datetime.datetime.fromtimestamp(record.time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    metrics = "  ".join(f"{name}={value:.6g}" for name, value in record.metrics.items())
    print(f"  {step:>8}  {when} UTC  {record.nbytes:>15,} bytes  {metrics}".rstrip())


def print_facts(record: Manifest) -> None:
  """What is known about the run."""
  versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
  print(f"  fingerprint  {record.fingerprint[:16]}\n  versions     {versions}")
  mesh = record.plan.get("mesh") if isinstance(record.plan, dict) else None
  if isinstance(mesh, dict):
    print(f"  mesh         {mesh['axes']} (when saved; a restore does not use it)")
  for name, value in record.extra.items():
    print(f"  {name:<12} {json.dumps(value)}")


def print_leaves(record: Manifest, pattern: str | None) -> None:
  """The trees and their leaves: those that the pattern names, or all, with equal layers in one row."""
  from nnx_parallel.core.text import format_bytes, number_pattern, print_text, text_table

  for item, tree in record.items.items():
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, leaf in tree.leaves.items():
      if pattern is None or fnmatch.fnmatchcase(f"{item}/{path}", pattern):
        array = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        name = path if pattern else number_pattern(path)
        groups.setdefault((name, array, leaf.kind), []).append((path, leaf.nbytes))
    rows: list[tuple[str, ...]] = []
    for (name, array, kind), found in groups.items():
      many, size = len(found) > 1, sum(nbytes for _, nbytes in found)
      rows.append(
        (name if many else found[0][0], str(len(found)) if many else "", kind, array, format_bytes(size))
      )
    size = sum(leaf.nbytes for leaf in tree.leaves.values())
    print(f"\n{item}: {len(tree.leaves)} arrays, {size:,} bytes")
    if rows:
      print_text(text_table(("leaf", "n", "type", "array", "bytes"), rows, right=(1, 4)))
    for path, value in tree.values.items():
      print(f"{path} = {json.dumps(value)}")
