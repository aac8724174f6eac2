"""`nnx-parallel compile`: what a recipe's step needs and sends, from the compiler of its machine."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import nnx_parallel as nxp
from nnx_parallel.cli import options

if TYPE_CHECKING:
  from nnx_parallel.loop.loader import Recipe


def register(commands: options.Commands) -> None:
  """Adds this command."""
  parser = options.add_command(
    commands,
    "compile",
    run,
    *options.STEP,
    *options.LAYERS,
    "--batch",
    "--chip",
    "--html",
    "--json",
    help="compile a recipe's step for a machine that is not here",
    description="Compiles the train step with the real compiler of a machine, on any CPU, and reports"
    " memory per device, FLOPs and collectives. Exit code 3: it does not fit.",
  )
  parser.add_argument(
    "--topology",
    metavar="NAME",
    help="tpu:v5e:4x4, tpu:v5p:4x4x4*2 (two slices), gpu:h100:2x8 (hosts x GPUs), cpu:8;"
    " default: simulated CPU devices, as many as the mesh has",
  )


def run(args: argparse.Namespace) -> int:
  """Compiles and prints; exit code 3: the step does not fit."""
  from nnx_parallel.core.text import print_text
  from nnx_parallel.report.topology import read_machine

  recipe = nxp.recipes.load_recipe(args.recipe)
  sizes = options.mesh_sizes(recipe, args.mesh, args.rules, args.pipeline)
  if args.topology:
    sizes = fill(sizes, read_machine(args.topology).devices, asked=args.mesh is not None)
  topology = args.topology or f"cpu:{math.prod(sizes.values())}"
  start_compiler(sizes, topology, args.devices)
  plan = options.make_plan(args, recipe, nxp.abstract_mesh(sizes))
  parts = recipe.parts(args.microbatches)
  loss: Any = recipe.loss
  step = nxp.train_step(loss, microbatches=parts, **options.step_options(args))
  batch = abstract_batch(recipe, args.batch)
  report = nxp.compile_report(step, plan, batch=batch, topology=topology, chip=args.chip)
  print(report.to_json()) if args.json else print_text(str(report))
  if args.html:
    options.write_page(args.html, report.to_html())
  return options.NO if report.fits is False else 0


def fill(sizes: options.Sizes, devices: int, *, asked: bool) -> options.Sizes:
  """The mesh for a machine: -1 takes the rest; a recipe's own mesh grows along its largest axis."""
  filled = dict(sizes)
  if not asked and math.prod(sizes.values()) != devices and -1 not in sizes.values():
    filled[max(sizes, key=lambda axis: sizes[axis])] = -1
  known = math.prod(size for size in filled.values() if size > 0)
  return {axis: devices // known if size == -1 else size for axis, size in filled.items()}


def start_compiler(sizes: options.Sizes, topology: str, devices: int | None) -> None:
  """Keeps jax on the CPU: with simulated devices for `cpu:N`, else only to trace for another machine."""
  import jax

  if topology.startswith("cpu:"):
    options.start_devices(sizes, devices)
  else:
    jax.config.update("jax_platforms", "cpu")


def abstract_batch(recipe: Recipe, examples: int | None) -> Any:
  """Shapes and dtypes of the recipe's first batch, with another number of examples where given."""
  import jax
  import numpy as np

  batches: Any = recipe.batches
  first = next(iter(batches(0, split="train")))

  def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    x = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    shape = tuple(x.shape)
    return jax.ShapeDtypeStruct((examples or shape[0], *shape[1:]) if shape else shape, x.dtype)

  return jax.tree.map(abstract, first)
