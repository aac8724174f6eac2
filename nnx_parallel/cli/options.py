"""Options that commands share: the recipe, its mesh, and the devices to simulate."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx_parallel.errors import MeshError, ReportError, ShardingError

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from nnx_parallel.loop.loader import Recipe

Sizes = dict[str, int]
Rules = dict[str, tuple[str, ...]]
NO = 3  # the exit code of a command whose answer is no: does not fit, differs, damaged
EXAMPLE = "--mesh data=2,fsdp=2,tensor=2"
AS_WRITTEN = "as written"
REMATS = (AS_WRITTEN, "none", "dots", "full")  # those of train/remat.py, which takes a second to import


def add_recipe(parser: argparse.ArgumentParser) -> None:
  """Adds the argument RECIPE."""
  parser.add_argument(
    "recipe",
    metavar="RECIPE",
    help="an embedded recipe (text_lm, digits), a file (mine.py), or a module (package.mine:)",
  )


def add_mesh(parser: argparse.ArgumentParser) -> None:
  """Adds `--mesh` and `--devices`."""
  parser.add_argument(
    "--mesh",
    metavar="AXIS=N,...",
    help="devices along each axis; -1 is what is left (default: the recipe's own mesh)",
  )
  parser.add_argument(
    "--devices",
    type=int,
    metavar="N",
    help="simulate N CPU devices (default, without an accelerator: as many as the mesh has)",
  )


def add_optimizer(parser: argparse.ArgumentParser) -> None:
  """Adds `--zero` and `--offload`, which say where optimizer state and gradients lie."""
  parser.add_argument(
    "--zero",
    type=int,
    choices=(0, 1, 2),
    default=0,
    help="1 splits the optimizer state over the axes of the batch too (ZeRO-1), 2 also the gradients",
  )
  parser.add_argument(
    "--offload", action="store_true", help="keep the optimizer state in host memory between steps"
  )


def optimizer_options(args: argparse.Namespace) -> dict[str, Any]:
  """What `add_optimizer` added, as arguments of `nxp.plan`."""
  return {"zero": args.zero, "optimizer_memory": "pinned_host" if args.offload else None}


def add_way(parser: argparse.ArgumentParser) -> None:
  """Adds `--microbatches`, `--remat` and `--rules`: how a step is run, as `search` prints it."""
  parser.add_argument("--microbatches", type=positive, metavar="N", help="parts that the batch is run in")
  parser.add_argument(
    "--remat", default=AS_WRITTEN, choices=REMATS, help="what layers keep; as the recipe says when not given"
  )
  add_rules(parser)


def add_rules(parser: argparse.ArgumentParser) -> None:
  """Adds `--rules`, which `changed_rules` obeys."""
  parser.add_argument(
    "--rules",
    type=parse_rules,
    default={},
    metavar="NAME=AXIS+...,...",
    help="logical names over other axes than the recipe's rules say: sequence=tensor",
  )


def parse_rules(text: str) -> Rules:
  """Reads `expert=expert,batch=data+expert` as name -> axes, for argparse.

  Example:
    >>> parse_rules("sequence=tensor,batch=data+fsdp")
    {'sequence': ('tensor',), 'batch': ('data', 'fsdp')}
  """
  rules: Rules = {}
  for part in text.split(","):
    name, _, axes = part.strip().partition("=")
    if not name.isidentifier() or name in rules or not all(a.isidentifier() for a in axes.split("+")):
      raise argparse.ArgumentTypeError(f"cannot read {part.strip()!r}; for example sequence=tensor")
    rules[name] = tuple(axes.split("+"))
  return rules


def changed_rules(recipe: Recipe, changes: Rules) -> Any:
  """The recipe's rules with the changes of `--rules`.

  Raises:
    ShardingError: a name that looks like a misspelt one, or an axis twice. Other new names are added.
  """
  from nnx_parallel.loop.job import rules_of
  from nnx_parallel.rules.ruleset import RuleSet

  rules = rules_of(recipe)
  if not changes:
    return rules
  known = RuleSet.of(rules)
  for name in changes:
    near = difflib.get_close_matches(name, list(known.logical), n=1, cutoff=0.8)
    if name not in known.logical and near:
      raise ShardingError(
        f"--rules names {name!r}, which the rules of {recipe.name} do not have.",
        fix=f"did you mean {near[0]}?",
      )
  return known.replace(changes)


def format_rules(changes: Mapping[str, tuple[str, ...]]) -> str:
  """Changes of rules as `--rules` takes them.

  Example:
    >>> format_rules({"sequence": ("tensor",)})
    'sequence=tensor'
  """
  return ",".join(f"{name}={'+'.join(axes)}" for name, axes in changes.items())


def positive(text: str) -> int:
  """A whole number from 1 up, for argparse."""
  number = int(text)
  if number < 1:
    raise argparse.ArgumentTypeError(f"{text} is less than 1")
  return number


def add_page(parser: argparse.ArgumentParser) -> None:
  """Adds `--html`, which `write_page` obeys."""
  parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")


def write_page(file: Path, page: str) -> None:
  """Writes a page and the folders above it, and says so on standard error.

  Raises:
    ReportError: the file cannot be written.
  """
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page)
    print(f"page written to {file}", file=sys.stderr)
  except OSError as error:
    raise ReportError(
      f"cannot write the page {file}.", details=error.strerror or str(error), fix="--html page.html"
    ) from error


def parse_mesh(text: str) -> Sizes:
  """Reads `data=2,fsdp=-1` as axis -> devices along it.

  Raises:
    MeshError: not of that form, an axis twice, or more than one -1.

  Example:
    >>> parse_mesh("data=2,fsdp=-1")
    {'data': 2, 'fsdp': -1}
  """
  sizes: Sizes = {}
  for part in text.split(","):
    axis, _, size = part.strip().partition("=")
    if not axis.isidentifier() or not _is_size(size):
      raise MeshError(
        f"cannot read {part.strip()!r} in --mesh {text}.",
        details="an axis is a word, its size a number of devices, or -1 for what is left",
        fix=EXAMPLE,
      )
    if axis in sizes:
      raise MeshError(f"the axis {axis!r} is twice in --mesh {text}.", fix=EXAMPLE)
    sizes[axis] = int(size)
  if list(sizes.values()).count(-1) > 1:
    raise MeshError(f"more than one -1 in --mesh {text}.", fix="--mesh data=-1,tensor=2")
  return sizes


def _is_size(text: str) -> bool:
  return text == "-1" or (text.isascii() and text.isdigit() and int(text) > 0)


def mesh_sizes(recipe: Recipe, text: str | None, rules: Mapping[str, tuple[str, ...]] | None = None) -> Sizes:
  """The mesh that a command works on, as axis -> devices along it.

  The recipe's `mesh()` names the axes that its rules know: those that `--mesh` leaves out have size 1,
  and an axis that the rules do not know is an error, because nothing would be split along it.

  Args:
    recipe: its own mesh is the default.
    text: the value of `--mesh`.
    rules: the value of `--rules`; axes that it names are known too.

  Raises:
    MeshError: as `parse_mesh`; an axis that the recipe does not know; no mesh at all.
  """
  known = recipe.mesh() if recipe.mesh is not None else {}
  if text is None:
    if not known:
      raise MeshError(f"no mesh: the recipe {recipe.name} has no mesh().", fix=EXAMPLE)
    return dict(known)
  asked = parse_mesh(text)
  named = {axis for axes in (rules or {}).values() for axis in axes}
  strange = [axis for axis in asked if known and axis not in known and axis not in named]
  if strange:
    near = difflib.get_close_matches(strange[0], known, n=1)
    raise MeshError(
      f"the recipe {recipe.name} knows no mesh axis {strange[0]!r}.",
      details=f"its mesh() has {', '.join(known)}; along another axis nothing would be split",
      fix=f"did you mean {near[0]}?" if near else f"axes out of {', '.join(known)}.",
    )
  return {**dict.fromkeys(known, 1), **asked}


def start_devices(sizes: Sizes, devices: int | None) -> None:
  """Makes the CPU look like as many devices as the mesh needs; must come before jax's first use.

  An accelerator, if there is one, is used all the same, unless `devices` asks for simulated ones. A
  count in the environment (`JAX_NUM_CPU_DEVICES`, `XLA_FLAGS`) is left as it is.

  Args:
    sizes: the mesh.
    devices: the value of `--devices`.

  Raises:
    MeshError: the mesh needs another number of devices than `--devices` says.
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
  # A collective holds one thread of XLA's pool for each simulated device that waits, and the pool is as
  # large as XLA takes the machine to be: on two cores, eight devices can starve each other.
  os.environ.setdefault("NPROC", str(4 * max(devices or needed, os.cpu_count() or 1)))
  if _count_is_set():
    return
  try:
    jax.config.update("jax_num_cpu_devices", devices or needed)
  except RuntimeError:
    return  # jax has started: it has the devices that it has, and building the mesh says if they do


def real_mesh(sizes: Sizes, devices: int | None) -> Mesh:
  """The mesh on devices of this machine; with `devices`, on the first so many.

  Raises:
    MeshError: they are not as many as the mesh needs.
  """
  import jax

  import nnx_parallel as nxp

  return nxp.make_mesh(sizes, devices=jax.devices()[:devices])


def _count_is_set() -> bool:
  return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or bool(
    os.environ.get("JAX_NUM_CPU_DEVICES")
  )


def format_sizes(sizes: Sizes) -> str:
  """The sizes as `--mesh` takes them.

  Example:
    >>> format_sizes({"data": 2, "tensor": 4})
    'data=2,tensor=4'
  """
  return ",".join(f"{axis}={size}" for axis, size in sizes.items())
