"""The commands on saved steps: inspect, verify, diff, reshard, import and export."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import nnx_parallel as nxp
from nnx_parallel.cli import options
from nnx_parallel.errors import CheckpointError

if TYPE_CHECKING:
  from nnx_parallel.checkpoint.manifest import Manifest
  from nnx_parallel.interop.dry_run import DryRun
  from nnx_parallel.interop.weights import WeightMap


def register(commands: options.Commands) -> None:
  """Adds these commands."""
  options.add_command(
    commands,
    "diff",
    run_diff,
    "directory",
    *options.LAYOUT,
    *("--step", "--json"),
    help="compare a checkpoint with a recipe on a mesh",
    description="Compares a step with the recipe's model and optimizer, leaf by leaf: missing,"
    " extra, renamed, reshaped, of another dtype. Reads no array. Exit code 3: it does not fit.",
  )
  export = options.add_command(
    commands,
    "export",
    run_export,
    *("directory", "out", "recipe", "--mesh", "--devices", "--rules", "--step"),
    *("--weight-map", "--skip", "--dry-run"),
    help="write the model of a checkpoint as safetensors",
    description="Restores and verifies the model, and writes it as safetensors into a new folder, with an"
    " index when there are several files. The config.json of a --weight-map FOLDER is copied into it.",
  )
  export.set_defaults(zero=0, offload=False)
  _register_others(commands)


def _register_others(commands: options.Commands) -> None:
  options.add_command(
    commands,
    "import",
    run_import,
    *("path", "out", *options.LAYOUT, "--weight-map", "--skip", "--dry-run"),
    help="turn safetensors into a checkpoint",
    description="Reads safetensors straight into the recipe's layout and saves them as step 0, with a fresh"
    " optimizer if the recipe has an optimizer. Leaves that are skipped are initialised. Exit code 3:"
    " an array has no use, or a leaf no source (--dry-run).",
  )
  inspect = options.add_command(
    commands,
    "inspect",
    run_inspect,
    "directory",
    "--step",
    help="list the steps of a checkpoint directory and the contents of a step",
    description="Lists the complete steps, then the trees, leaves, values and versions of a step.",
  )
  inspect.add_argument(
    "--leaves",
    metavar="PATTERN",
    help="leaves to list one by one: 'model/*.kernel' (all, equal layers folded)",
  )
  inspect.add_argument("--json", action="store_true", help="the manifest as JSON")
  options.add_command(
    commands,
    "reshard",
    run_reshard,
    *("directory", "out", *options.LAYOUT, "--step"),
    help="rewrite a checkpoint for another layout",
    description="Writes a step again, cut as the recipe is laid out on the mesh, into another directory."
    " Any layout restores from any checkpoint; this only makes many restores of one layout faster.",
  )
  options.add_command(
    commands,
    "verify",
    run_verify,
    *("directory", "--step", "--json"),
    help="check every value and file of a checkpoint directory",
    description="Reads every array, whose chunks hold checksums, and compares every file with its size."
    " Exit code 3: something is damaged.",
  )


def run_diff(args: argparse.Namespace) -> int:
  """Prints the comparison."""
  plan = _plan(args)
  diff = nxp.Checkpointer(args.directory).diff(plan, args.step)
  print(diff.to_json() if args.json else diff)
  return 0 if diff.fits else options.NO


def run_export(args: argparse.Namespace) -> int:
  """Restores a model, and writes the files."""
  from nnx_parallel.interop.huggingface import CONFIG
  from nnx_parallel.interop.safetensors import dry_run_export, export_safetensors

  plan = _plan(args)
  weight_map = _weight_map(args.weight_map)
  if args.dry_run:
    return _show(dry_run_export(plan, weight_map, skip=args.skip))
  model = nxp.Checkpointer(args.directory).restore(plan, args.step, optimizer="drop")
  names = export_safetensors(args.out, model, weight_map, skip=args.skip)
  if args.weight_map and Path(args.weight_map).is_dir():
    shutil.copy(Path(args.weight_map) / CONFIG, args.out)
  print(f"{len(names)} arrays -> {args.out}")
  return 0


def run_import(args: argparse.Namespace) -> int:
  """Reads the files, and saves step 0."""
  from nnx_parallel.interop.safetensors import dry_run_import, import_safetensors

  plan = _plan(args)
  weight_map = _weight_map(args.weight_map, args.path)
  if args.dry_run:
    return _show(dry_run_import(args.path, plan, weight_map, skip=args.skip))
  with nxp.Checkpointer(args.out) as checkpointer:
    if steps := checkpointer.steps():
      raise CheckpointError(
        f"cannot import into {args.out}: it holds the checkpoints of a run.",
        details=f"steps {', '.join(map(str, steps))}",
        fix="choose an empty directory for OUT.",
      )
    made = import_safetensors(args.path, plan, weight_map, skip=args.skip)
    model, optimizer = made if isinstance(made, tuple) else (made, None)
    checkpointer.save(0, model, optimizer, plan=plan)
    print(f"step 0: {checkpointer.metadata(0).nbytes:,} bytes -> {args.out}")
  return 0


def run_inspect(args: argparse.Namespace) -> int:
  """Prints the steps and one manifest."""
  checkpointer = nxp.Checkpointer(args.directory)
  record = checkpointer.metadata(args.step)
  if args.json:
    print(json.dumps(record.as_json(), indent=2))
    return 0
  _print_steps(checkpointer)
  versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
  print(f"\nstep {record.step}\n  versions     {versions}")
  mesh = record.plan.get("mesh") if isinstance(record.plan, dict) else None
  if isinstance(mesh, dict):
    print(f"  mesh         {mesh['axes']} (when saved; a restore does not use it)")
  for name, value in record.extra.items():
    print(f"  {name:<12} {json.dumps(value)}")
  _print_leaves(record, args.leaves)
  return 0


def _print_steps(checkpointer: nxp.Checkpointer) -> None:
  """Prints one line for each complete step."""
  steps = checkpointer.steps()
  print(f"{checkpointer.directory}: {len(steps)} complete steps")
  for step in steps:
    try:
      record = checkpointer.metadata(step)
    except CheckpointError as error:
      print(f"  {step:>8}  {error.what}")
      continue
    when = datetime.datetime.fromtimestamp(record.time, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    metrics = "  ".join(f"{name}={value:.6g}" for name, value in record.metrics.items())
    print(f"  {step:>8}  {when} UTC  {record.nbytes:>15,} bytes  {metrics}".rstrip())


def _print_leaves(record: Manifest, pattern: str | None) -> None:
  """Prints the leaves that match a pattern, or all leaves, with equal layers in one row."""
  from nnx_parallel.core.text import format_array, format_bytes, number_pattern, print_text, text_table

  for item, tree in record.items.items():
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, leaf in tree.leaves.items():
      if pattern is None or fnmatch.fnmatchcase(f"{item}/{path}", pattern):
        row = (path if pattern else number_pattern(path), leaf.kind, format_array(leaf.dtype, leaf.shape))
        groups.setdefault(row, []).append((path, leaf.nbytes))
    rows: list[tuple[str, ...]] = []
    for (name, kind, array), found in groups.items():
      size = format_bytes(sum(nbytes for _, nbytes in found))
      many = len(found) > 1
      rows.append((name if many else found[0][0], str(len(found)) if many else "", kind, array, size))
    print(f"\n{item}: {len(tree.leaves)} arrays, {tree.nbytes:,} bytes")
    if rows:
      print_text(text_table(("leaf", "n", "type", "array", "bytes"), rows, right=(1, 4)))
    for path, value in tree.values.items():
      print(f"{path} = {json.dumps(value)}")


def run_reshard(args: argparse.Namespace) -> int:
  """Restores a step, and saves everything that it holds."""
  plan = _plan(args)
  source = nxp.Checkpointer(args.directory)
  if source.directory == nxp.Checkpointer(args.out).directory:
    raise CheckpointError(f"cannot reshard {source.directory} into itself.", fix="write to another folder.")
  record = source.metadata(args.step)
  restored = source.restore(plan, record.step)
  model, optimizer = restored if isinstance(restored, tuple) else (restored, None)
  extra = {name: source.restore_extra(name, step=record.step) for name in record.extra}
  for name in [name for name in record.items if name not in ("model", "optimizer")]:  # these have no plan
    extra[name] = source.restore_extra(name, step=record.step, as_numpy=True)
  with nxp.Checkpointer(args.out) as destination:
    destination.save(record.step, model, optimizer, extra=extra, metrics=record.metrics, plan=plan)
    written = destination.metadata(record.step)
  print(f"step {record.step}: {written.nbytes:,} bytes in {len(written.files)} files -> {args.out}")
  return 0


def run_verify(args: argparse.Namespace) -> int:
  """Checks the steps, one line for each step."""
  from nnx_parallel.checkpoint.damage import VanishedError
  from nnx_parallel.checkpoint.storage import Storage

  checkpointer = nxp.Checkpointer(args.directory)
  found = sorted([*checkpointer.steps(), *Storage(checkpointer.directory).unrecognised_steps()])
  steps = found if args.step is None else [args.step]
  if not steps:
    checkpointer.metadata()  # raises: there is no step
  checked, vanished = dict[int, list[str]](), list[int]()
  for step in steps:
    try:
      checked[step] = [*checkpointer.verify(step).values()]
    except VanishedError:
      if args.step is not None:
        raise
      vanished.append(step)
      if not args.json:
        print(f"step {step}: removed or replaced during the check")
      continue
    if not args.json:
      print("\n  ".join([f"step {step}: {'damaged' if checked[step] else 'good'}", *checked[step]]))
  damaged = sum(map(bool, checked.values()))
  if args.json:
    print(json.dumps({"steps": checked, "vanished": vanished}, indent=2))
  else:
    print(f"{len(checked) - damaged} good, {damaged} damaged")
  return options.NO if damaged else 0


def _plan(args: argparse.Namespace) -> nxp.Plan:
  """Plans the recipe on real or simulated devices; comes before jax's first use."""
  recipe = nxp.recipes.load_recipe(args.recipe, needs=("init",))
  return options.make_plan(args, recipe, options.mesh_on_devices(args, recipe))


def _weight_map(place: str | None, imported: str | None = None) -> WeightMap | None:
  """That of a Python file, or of a folder's `config.json`; by default of the folder that is imported."""
  from nnx_parallel.interop.huggingface import CONFIG, weight_map_of
  from nnx_parallel.interop.weights import load_weight_map

  if place is None:
    return weight_map_of(imported) if imported and (Path(imported) / CONFIG).is_file() else None
  return weight_map_of(place) if Path(place).is_dir() else load_weight_map(place)


def _show(found: DryRun) -> int:
  from nnx_parallel.core.text import print_text

  print_text(str(found))
  return 0 if found.complete else options.NO
