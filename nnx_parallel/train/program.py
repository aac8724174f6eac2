"""The compiled programs of a step, shared by live objects of one structure, and why each was compiled."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.attention.find import queries_over
from nnx_parallel.core.axes import axes_in, axes_of
from nnx_parallel.core.jaxprs import constants
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import Path, named_leaves
from nnx_parallel.core.shards import describe
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.layers.gather import Gather, gather_reads
from nnx_parallel.layers.layers import LayersUsed, with_options, with_stages
from nnx_parallel.layout.batch import position_axes
from nnx_parallel.layout.constrain import default_scope, scope_in_use
from nnx_parallel.layout.sharded_optimizer import Placement
from nnx_parallel.train.axes import shardings_outside, states_shardings, with_types
from nnx_parallel.train.binding import Binding
from nnx_parallel.train.gradients import StepLayout, batch_axes_of, check_divides, examples_over
from nnx_parallel.train.loss_call import call_loss, check_reads
from nnx_parallel.train.losses import Metrics, check_examples, means, pairs
from nnx_parallel.train.mend import mend
from nnx_parallel.train.options import StepOptions, is_scattered
from nnx_parallel.train.update import update

logger = logging.getLogger("nnx_parallel")

_SETTINGS = (
  "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision",
  "jax_debug_nans",
)  # fmt: skip
Signature = dict[str, str]
"""Label -> text of the type and layout."""


@dataclasses.dataclass(frozen=True)
class Compile:
  """One compilation of a step."""

  step: int  # the number of the call that needed it, counted from 0
  # what was new, one phrase for each item: an argument, its shape, dtype or layout, or a changed attribute
  reasons: tuple[str, ...]

  def __str__(self) -> str:
    return f"call {self.step}: {'; '.join(self.reasons)}"


class Programs:
  """The programs of a step for all live objects of one structure; it holds no arrays.

  A program is a jitted `run(arrays, raw arrays, batch)`. That of a train step is donated the arrays, which
  are its first results. `placements`: where the plans of the optimizers put arrays, by the key of the model.
  """

  def __init__(self, options: StepOptions, binding: Binding, placements: Mapping[Hashable, Placement | None]):
    self.options, self.trains = options, len(binding.names) > 1
    self.template = binding.template.blank()
    self._outside = shardings_outside(binding)
    self.places = self._outside.on_auto_axes()  # of the leaves, in the programs
    self._tries = self.places is not self._outside
    self.variable_shardings = binding.variable_shardings
    raw = self.template.raw
    self.argument_labels = [*binding.variable_labels, *(binding.labels[i] for i in raw)]
    self._placements = placements
    # How the last traced program reduces gradients between replicas, and computes the layers of the loss.
    self.reduction, self.layers, self._left = "", LayersUsed(), ""
    self.is_new = False  # whether a program was traced since the last `compare`
    self._programs: dict[Hashable, Any] = {}
    self._seen: list[Signature] = []

  def find(self, arrays: Sequence[AnyArray], raw: Sequence[AnyArray], batch: PyTree) -> Any:
    """The program for these arrays, and for batches with the layout of this batch."""
    # One program for each layout: jax compiles again for a new layout, but may not trace again.
    layouts = tuple([_layout_of(x) for x in jax.tree.leaves(batch)])
    found = self._programs.get(layouts)
    if found is None:
      found = self._jit(batch)
      try:
        traced = found.trace(arrays, raw, batch)
      except (TypeError, ValueError) as error:
        if not self._tries or not states_shardings(error):
          raise
        # The first program decides on which axes all of them compute.
        self.places = self._outside.as_stated(error)
        found = self._jit(batch)
        traced = found.trace(arrays, raw, batch)
      self._tries = False
      own = dict(zip(self.argument_labels, [*arrays, *raw], strict=True))
      check_reads(self.options.losses, constants(traced.jaxpr), own)
      self._programs[layouts] = found
    return found

  def _jit(self, batch: PyTree) -> Any:
    layout = self.find_layout(batch)
    run = self._train(layout) if self.trains else functools.partial(self._evaluate, layout.gather)
    program = self._add_types(self.mend(run), batch)
    options: dict[str, Any] = {"compiler_options": self.options.compiler_options}
    if self.trains:
      options |= {"donate_argnums": 0, "out_shardings": [*self.variable_shardings, None]}

    @functools.wraps(program)
    def traced(*args: PyTree) -> PyTree:
      self.is_new = True
      return program(*args)

    return jax.jit(traced, **options)

  def compare(self, arrays: Sequence[jax.Array], batch: PyTree) -> tuple[str, ...] | None:
    """What is new in the arguments of a call: empty for the first call, None if nothing is new."""
    # Donated arrays still have a type.
    self.is_new = False
    now = signature(self.argument_labels, arrays, batch)
    differences = [_difference(before, now) for before in self._seen]
    least = min(differences, key=len, default=[])
    if differences and not least:
      return None
    self._seen.append(now)
    return tuple(least)

  def _add_types(self, run: Callable[..., PyTree], batch: PyTree) -> Callable[..., PyTree]:
    """A program on the axes that were decided, with the types of the mesh for its arguments and results."""
    rows = PartitionSpec(batch_axes_of(batch))

    def specs(results: PyTree) -> PyTree:
      *arrays, metrics = results if self.trains else [results]
      is_output = self.options.is_output
      found = {name: rows if is_output(name, x) else PartitionSpec() for name, x in metrics.items()}
      if not self.trains:
        return found
      shardings = zip(arrays, self.variable_shardings, strict=True)
      return [*(PartitionSpec() if where is None else where.spec for _, where in shardings), found]

    return with_types(run, self._outside, self.places, specs)

  def _train(self, layout: StepLayout) -> Callable[[list[jax.Array], list[jax.Array], PyTree], list[PyTree]]:
    def train_step(arrays: list[jax.Array], raw: list[jax.Array], batch: PyTree) -> list[PyTree]:
      objects = self.template.build(self.template.join(arrays, raw))
      with default_scope(self.places.scope), queries_over(self._positions()):
        metrics, self.reduction, self.layers = update(self.options, objects[0], objects[1], batch, layout)
      self.layers.axes, self.layers.left = self.places.note, self._left
      after = self.template.arrays(objects)
      return [*(after[i] for i in self.template.variables), metrics]

    return train_step

  def _evaluate(
    self, gather: Gather | None, arrays: list[jax.Array], raw: list[jax.Array], batch: PyTree
  ) -> Metrics:
    check_examples(batch)
    loss_fn: Any = self.options.loss_fn
    options, used, parts = self.options.layers, LayersUsed(), self.options.microbatches

    def run(arrays: list[jax.Array], batch: PyTree) -> PyTree:
      (models,) = self.template.build(arrays)
      with options.marking(models, used):
        return self.options.terms(call_loss(loss_fn, models, batch), batch)

    evaluate = gather_reads(gather, with_options(run, options, used), self._paths)
    if options.pipeline is not None:
      check_divides(batch, parts)
      staged = gather_reads(gather, run, self._paths)
      evaluate = with_stages(staged, options, parts, lambda found: ({}, {*found.outputs.values()}), used)
    with default_scope(self.places.scope), queries_over(self._positions()):
      found = evaluate(self.template.join(arrays, raw), batch)
    self.layers, used.axes, used.left = used, self.places.note, self._left
    return pairs(found, batch, parts) if self.options.pairs else means(found, parts)

  def _paths(self, arrays: list[PyTree], batch: PyTree) -> list[Path | None]:
    """The path of each array of the arguments of an evaluation, inside the models."""
    named = zip(self.template.paths, arrays, strict=True)
    found: list[Path | None] = [path[1:] for path, x in named for _ in jax.tree.leaves(x)]
    return [*found, *(None for _ in jax.tree.leaves(batch))]

  def _positions(self) -> str | None:
    """The mesh axis that also splits queries in layers: from the rule for `seq`, and splitting no weight."""
    used = {axis for where in self.places.shardings if where for axis in axes_in(where.spec)}
    return next((axis for axis in self._over_positions() if axis not in used), None)

  def _over_positions(self) -> tuple[str, ...]:
    """The mesh axes larger than 1 that split positions between layers."""
    mesh, scope = self.places.mesh, self.places.scope
    if mesh is None or scope is None:
      return ()
    return tuple(axis for axis in position_axes(scope.ruleset, axis_sizes(mesh)) if mesh.shape[axis] > 1)

  def mend(self, run: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A program of these arrays with its wrong operations corrected."""
    split = any(where is not None and axes_in(where.spec) for where in self.places.shardings)
    return mend(run, self.places.mesh, picks=split)

  def find_layout(self, batch: PyTree) -> StepLayout:
    """The layout of each gradient, and what losses gather, for batches with the layout of this batch."""
    pairs = zip(self.template.paths, self._outside.shardings, strict=True)
    own = {path[1:]: sharding for path, sharding in pairs if path[0] == 0}
    split = {key: _scattered(placement, key, own) for key, placement in self._placements.items()}
    in_turn = isinstance(self.options.loss_fn, Mapping)
    scattered: dict[Path, NamedSharding] = {}
    for key, placement in self._placements.items():
      stage = 0 if placement is None else placement.zero
      further = bool(split[key]) if in_turn else any(split.values())
      if is_scattered(self.options.gradients, stage, further=further):
        scattered |= split[key]
    used = {axis for where in own.values() if where for axis in axes_in(where.spec)}
    inside = zip(self.template.paths, self.places.shardings, strict=True)
    leaves = {path[1:]: where for path, where in inside if path[0] == 0}
    arrays = [x for x in jax.tree.leaves(batch) if jax.numpy.ndim(x)]
    over = max(map(examples_over, arrays), key=len, default=())
    gather = Gather.of(leaves, over, self.places.mesh, self._over_positions())
    self._left = self._describe_left(arrays, leaves.values())
    if self._left:
      logger.warning("%s", self._left)
    axes = batch_axes_of(batch)
    return StepLayout(
      self.places.mesh, {**own, **scattered}, frozenset(scattered), frozenset(used), axes, gather
    )

  def _describe_left(self, batch: Iterable[AnyArray], leaves: Iterable[NamedSharding | None]) -> str:
    """What is left to XLA where models are split over a mesh that the batch is not on; or an empty text."""
    sizes = axis_sizes(self.places.mesh).values()
    left = sum(size > 1 for size in sizes) > 1 and not any(map(is_placed, batch))
    return _LEFT if left and any(where and axes_in(where.spec) for where in leaves) else ""


_LEFT = (
  "the step leaves the layout of the batch to XLA, which can make gradients wrong on several mesh axes: the"
  " models have no plan; put the batch on their mesh"
)


def is_placed(x: AnyArray) -> bool:
  """Whether an array lies on a mesh."""
  return isinstance(getattr(x, "sharding", None), NamedSharding)


def _layout_of(x: AnyArray) -> Hashable:
  """The layout that a program is compiled for, in addition to the type of an array."""
  where = None if isinstance(x, jax.Array) and not x.committed else getattr(x, "sharding", None)
  if not isinstance(where, NamedSharding):
    return where
  dims = [*map(axes_of, where.spec)]
  while dims and not dims[-1]:  # P("data") and P("data", None) are one layout
    dims.pop()
  return where.mesh, tuple(dims), where.memory_kind


def inside(key: Hashable) -> Path:
  """The start of a model's paths: its key, where there are several."""
  return () if key is None else (key,)


def _scattered(
  placement: Placement | None, key: Hashable, own: Mapping[Path, NamedSharding | None]
) -> dict[Path, NamedSharding]:
  """The gradients of a model that its optimizer's plan can scatter, and their layout."""
  gradients = {} if placement is None else placement.gradients
  paths = {(*inside(key), *path): where for path, where in gradients.items()}
  return {path: where for path, where in paths.items() if (mine := own.get(path)) and mine.mesh == where.mesh}


def signature(labels: Sequence[str], arrays: Sequence[jax.Array], batch: PyTree) -> Signature:
  """Type and layout of every argument, by label, and other state that a compilation depends on."""
  found = {label: describe(array) for label, array in zip(labels, arrays, strict=True)}
  scope = scope_in_use()
  found["rules in scope"] = str(scope and scope.rules)
  found["active mesh"] = str(dict(jax.sharding.get_abstract_mesh().shape))
  found |= {name: str(getattr(jax.config, name)) for name in _SETTINGS}
  found["structure of the batch"] = str(jax.tree.structure(batch))
  return found | {name: describe(leaf) for name, leaf in named_leaves(batch)}


def _difference(before: Signature, now: Signature) -> list[str]:
  return [
    f"{label}: {before.get(label, 'absent')} -> {now.get(label, 'absent')}"
    for label in dict.fromkeys([*before, *now])
    if before.get(label) != now.get(label)
  ]
