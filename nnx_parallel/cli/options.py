"""Common to all commands: their arguments, the recipe on its mesh, and the devices to simulate."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import nnx_parallel as nxp
from nnx_parallel.errors import MeshError, ReportError, SchemeError, ShardingError

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from nnx_parallel.loop.loader import Recipe

Commands = Any
"""The subcommands of a parser; argparse has no public name for their class."""
Sizes = dict[str, int]
Rules = dict[str, tuple[str, ...]]
NO = 3  # the exit code of a command whose answer is no: does not fit, differs, damaged
EXAMPLE = "--mesh data=2,fsdp=2,tensor=2"
AS_WRITTEN = "as written"
# Those of layers/layers.py, which takes a second to import.
REMATS = (AS_WRITTEN, "none", "dots", "full", "offload")
ATTENTIONS = ("blockwise", "fused", "ring", "ulysses")
SCANS: dict[str, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}


def positive(text: str) -> int:
  """A positive integer, for argparse."""
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text} is less than 1")
  return number


def attention(text: str) -> str | int:
  """A word, or the length of the blocks, for argparse."""
  return text if text in ATTENTIONS else positive(text)


def pipeline(text: str) -> nxp.Pipeline:
  """AXIS[:VIRTUAL_STAGES][:ORDER], for argparse."""
  from nnx_parallel.layers.pipeline import Order

  axis, *rest = text.split(":")
  order = cast(Order | None, rest.pop()) if rest and not rest[-1].isdecimal() else None
  try:
    return nxp.Pipeline(axis, *map(positive, rest), order=order)
  except (SchemeError, TypeError, ValueError) as error:
    known = ", ".join(get_args(Order))
    raise argparse.ArgumentTypeError(
      f"{text!r} is not AXIS[:VIRTUAL_STAGES][:ORDER]; orders: {known}"
    ) from error


def parse_rules(text: str) -> Rules:
  """Reads `expert=expert,batch=data+expert` as name -> axes, for argparse."""
  rules: Rules = {}
  for part in text.split(","):
    name, _, axes = part.strip().partition("=")
    if not name.isidentifier() or name in rules or not all(a.isidentifier() for a in axes.split("+")):
      raise argparse.ArgumentTypeError(f"cannot read {part.strip()!r}; for example sequence=tensor")
    rules[name] = tuple(axes.split("+"))
  return rules


_ARGUMENTS: dict[str, dict[str, Any]] = {
  "recipe": {"metavar": "RECIPE", "help": "an embedded recipe (text_lm, digits), or a file (mine.py)"},
  "directory": {"metavar": "DIR", "help": "the directory of the steps"},
  "path": {"metavar": "PATH", "help": "a .safetensors file, its index, or their folder"},
  "out": {"metavar": "OUT", "help": "the folder to write to; nothing is overwritten"},
  "--mesh": {"metavar": "AXIS=N,...", "help": "devices along each axis; -1 takes the rest (the recipe's"
    " mesh)"},
  "--devices": {"metavar": "N", "type": int, "help": "simulate N CPU devices (as many as the mesh has,"
    " without an accelerator)"},
  "--rules": {"metavar": "NAME=AXIS+...,...", "type": parse_rules, "default": {}, "help": "mesh axes of"
    " logical names, in place of the mesh axes in the recipe's rules: sequence=tensor"},
  "--zero": {"type": int, "choices": (0, 1, 2), "default": 0, "help": "1 splits the optimizer state over the"
    " axes of the batch too (ZeRO-1), 2 also the gradients"},
  "--offload": {"action": "store_true", "help": "keep the optimizer state in host memory between steps"},
  "--microbatches": {"metavar": "N", "type": positive, "help": "parts that the batch is run in"},
  "--remat": {"choices": REMATS, "default": AS_WRITTEN, "help": "activations that layers save for the"
    " backward pass (default: as the recipe does)"},
  "--layers": {"metavar": "PATTERN", "help": "dotted paths of the layers, as in 'decoder.blocks.*' (default:"
    " the repeated parts of the model)"},
  "--scan-layers": {"choices": tuple(SCANS), "default": "auto", "help": "one scan of consecutive equal layers"
    " (default: of 4 or more that --remat recomputes)"},
  "--attention": {"metavar": "|".join((*ATTENTIONS, "N")), "type": attention, "help": "compute attention by"
    " blocks of queries and keys (of N), a kernel, or over the axis of positions"},
  "--loss-chunks": {"metavar": "N", "type": positive, "help": "compute the head and the loss in N parts of"
    " the vocabulary (default: in one)"},
  "--pipeline": {"metavar": "AXIS[:VIRTUAL_STAGES][:ORDER]", "type": pipeline, "help": "run the layers as a"
    " pipeline over this mesh axis; --microbatches is a multiple of its size"},
  "--batch": {"metavar": "N", "type": positive, "help": "examples in the global batch"},
  "--chip": {"metavar": "NAME", "help": "compare the memory needed with the memory of this chip: v5e, h100"},
  "--html": {"metavar": "FILE", "type": Path, "help": "also write a page"},
  "--json": {"action": "store_true", "help": "one JSON object instead of tables"},
  "--step": {"metavar": "N", "type": int, "help": "the step (default: the newest; for verify: all)"},
  "--skip": {"metavar": "PATTERN", "action": "append", "default": [], "help": "leaves of the model to leave"
    " out (import: to initialise); may be repeated"},
  "--weight-map": {"metavar": "PATH", "help": "a Python file with WEIGHT_MAP = WeightMap(...), or the folder"
    " of a model on Hugging Face, whose config.json tells its family (default: import looks for one in PATH;"
    " without one, names are paths)"},
  "--dry-run": {"action": "store_true", "help": "list what would happen to each array, and do nothing"},
}  # fmt: skip
LAYOUT = ("recipe", "--mesh", "--devices", "--rules", "--zero", "--offload")
STEP = (*LAYOUT, "--microbatches", "--remat", "--layers")
LAYERS = ("--scan-layers", "--attention", "--loss-chunks", "--pipeline")


def step_options(args: argparse.Namespace) -> dict[str, Any]:
  """The options of `train_step` for layers."""
  names = ("remat", "layers", "attention", "loss_chunks", "pipeline")
  return {name: getattr(args, name) for name in names} | {"scan_layers": SCANS[args.scan_layers]}


def add_command(
  commands: Commands,
  name: str,
  run: Callable[[argparse.Namespace], int],
  *arguments: str,
  help: str,
  description: str,
) -> argparse.ArgumentParser:
  """Adds a command that has these of the shared arguments."""
  parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
  for argument in arguments:
    parser.add_argument(argument, **_ARGUMENTS[argument])
  parser.set_defaults(run=run, usage_error=parser.error)
  return parser


def make_plan(args: argparse.Namespace, recipe: Recipe, mesh: Any) -> nxp.Plan:
  """The plan of a recipe with `--rules`, `--zero` and `--offload`."""
  memory = "pinned_host" if args.offload else None
  return nxp.recipes.plan_recipe(
    recipe, mesh, change_rules(recipe, args.rules), zero=args.zero, optimizer_memory=memory
  )


def mesh_on_devices(args: argparse.Namespace, recipe: Recipe, *, join: bool = False) -> Mesh:
  """The mesh on devices, of all processes with `join`; must come before jax's first use."""
  sizes = mesh_sizes(recipe, args.mesh, args.rules, getattr(args, "pipeline", None))
  start_devices(sizes, args.devices)
  if join:
    nxp.init_distributed()
  return real_mesh(sizes, args.devices)


def change_rules(recipe: Recipe, changes: Rules) -> Any:
  """The recipe's rules with the changes of `--rules`."""
  from nnx_parallel.loop.recipe import rules_of

  rules = rules_of(recipe)
  if not changes:
    return rules
  known = nxp.RuleSet.of(rules)
  for name in changes:
    near = difflib.get_close_matches(name, list(known.logical), n=1, cutoff=0.8)
    if name not in known.logical and near:
      raise ShardingError(
        f"--rules names {name!r}, which the rules of {recipe.name} do not have.",
        fix=f"did you mean {near[0]}?",
      )
  return known.replace(changes)


def format_rules(changes: Mapping[str, tuple[str, ...]]) -> str:
  """Changes of rules as `--rules` takes them."""
  return ",".join(f"{name}={'+'.join(axes)}" for name, axes in changes.items())


def format_sizes(sizes: Mapping[str, int]) -> str:
  """Sizes of mesh axes as `--mesh` takes them."""
  return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def write_page(file: Path, page: str) -> None:
  """Writes a page and the folders above it, and names the file on standard error."""
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page)
    print(f"page written to {file}", file=sys.stderr)
  except OSError as error:
    raise ReportError(
      f"cannot write the page {file}.", details=error.strerror or str(error), fix="--html page.html"
    ) from error


def parse_mesh(text: str) -> Sizes:
  """Reads `data=2,fsdp=-1` as axis -> devices along it."""
  sizes: Sizes = {}
  for part in text.split(","):
    axis, _, size = part.strip().partition("=")
    is_size = (size == "-1" and -1 not in sizes.values()) or re.fullmatch("[1-9][0-9]*", size)
    if not axis.isidentifier() or axis in sizes or not is_size:
      raise MeshError(
        f"cannot read {part.strip()!r} in --mesh {text}.",
        details="an axis is a name, once, its size a number of devices; one -1 takes the rest",
        fix=EXAMPLE,
      )
    sizes[axis] = int(size)
  return sizes


def mesh_sizes(
  recipe: Recipe,
  text: str | None,
  rules: Mapping[str, tuple[str, ...]] | None = None,
  pipeline: nxp.Pipeline | None = None,
) -> Sizes:
  """Axis -> devices. Axes of the recipe's `mesh()` that `--mesh` leaves out have size 1.

  Another axis, which neither `--rules` nor `--pipeline` names, is an error: nothing would be split.
  """
  known = recipe.mesh() if recipe.mesh is not None else {}
  if text is None:
    if not known:
      raise MeshError(f"no mesh: the recipe {recipe.name} has no mesh().", fix=EXAMPLE)
    return dict(known)
  asked = parse_mesh(text)
  named = {pipeline.axis if pipeline else None, *(axis for axes in (rules or {}).values() for axis in axes)}
  strange = [axis for axis in asked if known and axis not in known and axis not in named]
  if strange:
    near = difflib.get_close_matches(strange[0], known, n=1)
    raise MeshError(
      f"the recipe {recipe.name} has no mesh axis {strange[0]!r}.",
      details=f"its mesh() has {', '.join(known)}; along another axis nothing would be split",
      fix=f"did you mean {near[0]}?"
      if near
      else f"axes of its mesh(): --mesh {next(iter(known))}={max(math.prod(asked.values()), -1)}",
    )
  return {**dict.fromkeys(known, 1), **asked}


def start_devices(sizes: Sizes, devices: int | None) -> None:
  """Simulates as many CPU devices as the mesh needs, before jax's first use, unless there is an accelerator.

  With `devices`, also then. A count in the environment stays.
  """
  import jax

  needed = math.prod(s for s in sizes.values() if s > 0)
  if devices is not None:
    if (devices % needed if -1 in sizes.values() else devices != needed) or devices < 1:
      raise MeshError(
        f"the mesh does not fill {devices} devices.",
        details=f"mesh {', '.join(f'{a}={s}' for a, s in sizes.items())} takes {needed}",
        fix=f"--devices {needed}, or another --mesh.",
      )
    jax.config.update("jax_platforms", "cpu")
  # A collective holds one thread of XLA's pool for each simulated device that waits, and XLA sizes the pool
  # by the machine: on two cores, eight devices can starve each other.
  os.environ.setdefault("NPROC", str(4 * max(devices or needed, os.cpu_count() or 1)))
  flags = os.environ.get("XLA_FLAGS", "")
  if os.environ.get("JAX_NUM_CPU_DEVICES") or "xla_force_host_platform_device_count" in flags:
    return
  try:
    jax.config.update("jax_num_cpu_devices", devices or needed)
  except RuntimeError:
    return  # jax has started with the devices that it has; building the mesh shows whether they are enough


def real_mesh(sizes: Sizes, devices: int | None) -> Mesh:
  """The mesh on devices of this machine; with `devices`, on the first so many."""
  import jax

  here = jax.devices()[:devices]
  if -1 not in sizes.values() and (needed := math.prod(sizes.values())) != len(here):
    raise MeshError(
      f"the mesh takes {needed} devices, and there are {len(here)}.",
      details=f"mesh {', '.join(f'{a}={s}' for a, s in sizes.items())}",
      fix=f"--mesh with sizes that multiply to {len(here)}, or -1 for one of them; or --devices {needed}.",
    )
  return nxp.make_mesh(sizes, devices=here)
