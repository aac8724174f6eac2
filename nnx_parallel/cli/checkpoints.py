"""What the commands on checkpoints share: a step, a weight map, and the plan of a recipe on a mesh."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Generator
from typing import TYPE_CHECKING

from nnx_parallel.cli import options

if TYPE_CHECKING:
  from nnx_parallel.interop.weights import WeightMap
  from nnx_parallel.layout.plan import ShardingPlan


def add_directory(parser: argparse.ArgumentParser) -> None:
  """Adds the argument DIR."""
  parser.add_argument("directory", metavar="DIR", help="where the steps are")


def add_step(parser: argparse.ArgumentParser, to_do: str, default: str = "the newest") -> None:
  """Adds `--step`; `to_do` says what happens to that step."""
  parser.add_argument("--step", type=int, metavar="N", help=f"the step to {to_do} (default: {default})")


def add_target(parser: argparse.ArgumentParser, *, optimizer: bool = True) -> None:
  """Adds RECIPE and the options of its layout, which `load_plan` reads; of the optimizer's too, if wanted."""
  options.add_recipe(parser)
  options.add_mesh(parser)
  options.add_rules(parser)
  if optimizer:
    options.add_optimizer(parser)
  else:
    parser.set_defaults(zero=0, offload=False)


def add_weight_map(parser: argparse.ArgumentParser, skipped: str) -> None:
  """Adds `--weight-map` and `--skip`; `skipped` says what becomes of the leaves left out."""
  parser.add_argument("--weight-map", metavar="FILE", help="a Python file with WEIGHT_MAP = WeightMap(...)")
  parser.add_argument("--skip", action="append", default=[], metavar="PATTERN", help=f"leaves to {skipped}")


def load_plan(args: argparse.Namespace) -> ShardingPlan:
  """Plans the recipe on real or simulated devices; comes before jax's first use.

  Raises:
    NnxParallelError: no such recipe, or a mesh or rules that do not fit.
  """
  from nnx_parallel.loop.job import plan_recipe
  from nnx_parallel.loop.loader import load_recipe

  recipe = load_recipe(args.recipe, needs=("init",))
  sizes = options.mesh_sizes(recipe, args.mesh, args.rules)
  options.start_devices(sizes, args.devices)
  mesh, rules = options.real_mesh(sizes, args.devices), options.changed_rules(recipe, args.rules)
  return plan_recipe(recipe, mesh, rules, **options.optimizer_options(args))


@contextlib.contextmanager
def skip_as_option() -> Generator[None]:
  """Errors that speak of Python's `skip=[...]` speak of `--skip` instead."""
  from nnx_parallel.errors import CheckpointError

  try:
    yield
  except CheckpointError as error:
    what, details, fix = map(_as_option, (error.what, error.details, error.fix))
    raise CheckpointError(what, details=details, fix=fix) from error


def _as_option(text: str) -> str:
  def option(found: re.Match[str]) -> str:
    names = re.findall(r"'([^']*)'", found[1]) or ["PATTERN"]
    return shlex.join(word for name in names for word in ("--skip", name))

  return re.sub(r"skip=(\[.*?\])", option, text)


def load_weight_map(args: argparse.Namespace) -> WeightMap | None:
  """The weight map of `--weight-map`.

  Raises:
    CheckpointError: a file that cannot be read, or defines no `WEIGHT_MAP`.
  """
  from nnx_parallel.interop import weights

  return weights.load_weight_map(args.weight_map) if args.weight_map else None
