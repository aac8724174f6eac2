"""The layouts that a search tries: sizes of mesh axes, and rules that split another dim of the model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.mesh import abstract_mesh
from nnx_parallel.errors import ReportError, SchemeError
from nnx_parallel.layers.layers import Remat, RematName
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.planning import plan as make_plan
from nnx_parallel.report.estimate.workload import Workload, finds_layers, trace_workload
from nnx_parallel.rules.ruleset import Rules, RuleSet

Sizes = dict[str, int]
Changes = Mapping[str, tuple[str, ...]]
SEQUENCE_NAMES = ("sequence", "length", "seq", "activation_length")
"""Logical names of the dim of activations that sequence parallelism splits."""
EXPERT_NAMES = ("expert", "experts")
"""Logical names of the dim that counts experts."""
LAYER_NAMES = ("layers", "layer")
"""Logical names of the dim that stacks layers."""


@dataclasses.dataclass(frozen=True)
class RuleVariant:
  """One set of rules, and what the step is made of under them, for any sizes of the axes.

  Attributes:
    changes: logical name -> axes, where they differ from the user's rules.
    axes: the axes that the model can use.
    idle: axes that the rules name and that split nothing of this model.
    workloads: remat policy -> the step; only as written where policies find no layer.
    limits: (size of a dim, axes that split it) -> where it is.
    needed: axes without which the changes change nothing.
    names: logical names of the dims of the parameters.
    schedule: that of a pipeline, which the workloads are the traces of; None without one.
    pipeline: the pipeline, likewise.
  """

  changes: Changes
  axes: tuple[str, ...]
  idle: tuple[str, ...]
  workloads: Mapping[RematName | Remat, Workload]
  limits: Mapping[tuple[int, tuple[str, ...]], str]
  needed: frozenset[str]
  names: frozenset[str]
  schedule: Schedule | None = None
  pipeline: Pipeline | None = None

  def meshes(self, devices: int) -> Iterator[Sizes]:
    """Every mesh of so many devices; a pipeline has the stages first, on the slowest links."""
    if self.schedule is None or self.pipeline is None:
      yield from factorisations(devices, self.axes or self.idle[:1])
      return
    axis, stages = self.pipeline.axis, self.schedule.stages
    others = tuple(name for name in self.axes if name != axis) or tuple(n for n in self.idle if n != axis)[:1]
    for sizes in factorisations(devices // stages, others) if others else ({},):
      yield {axis: stages, **sizes}

  @property
  def work(self) -> Workload:
    """The step under the first policy: for what does not depend on the policy."""
    return next(iter(self.workloads.values()))

  def refuse(self, sizes: Sizes, batch: Any) -> str:
    """Why the model cannot use a mesh of these sizes, or an empty string."""
    parts = math.prod(sizes.get(axis, 1) for axis in self.work.batch_axes)
    for x in jax.tree.leaves(batch):
      if x.shape and x.shape[0] % parts:
        return f"a batch of {x.shape[0]} does not divide over {'+'.join(self.work.batch_axes)}"
    for (size, axes), where in self.limits.items():
      if size % math.prod(sizes[axis] for axis in axes):
        return f"{where} of {size} does not divide over {'+'.join(axes)}"
    return ""


def mesh_text(sizes: Mapping[str, int], idle: Container[str] = ()) -> str:
  """Sizes of axes as arguments of `make_mesh`, without idle ones of size 1."""
  return ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1 or axis not in idle)


def rule_variants(
  init: Callable[[], Any],
  loss: Callable[[Any, Any], Any],
  rules: Rules,
  optimizer: Any,
  batch: Any,
  remats: Sequence[RematName | Remat],
  layers: str | None = None,
) -> list[RuleVariant]:
  """The user's rules first, then variants of them with sequences and experts split.

  A sequence rule is tried where the rules replicate one of `SEQUENCE_NAMES` and the loss constrains
  activations by that name: sequences are then split over an axis that splits parameters and not the batch. An
  expert axis is added where parameters have one of `EXPERT_NAMES` and the rules replicate it; it also splits
  the batch.
  """
  ruleset = RuleSet.of(rules)
  make = functools.partial(_space, init, loss, ruleset, optimizer, batch, layers)
  first = make(remats, {})
  remats = tuple(first.workloads)
  found = [first]
  expert = _expert_change(ruleset, first)
  if expert:
    found.append(make(remats, expert))
  for base, change in itertools.product(tuple(found), _sequence_changes(ruleset, first)):
    # One policy is enough to see whether the model uses the name.
    tried = make(remats[:1], {**base.changes, **change})
    if tried.work.constrained != base.work.constrained:
      found.append(make(remats, tried.changes))
  return found


def stage_variants(
  init: Callable[[], Any],
  loss: Callable[[Any, Any], Any],
  rules: Rules,
  optimizer: Any,
  batch: Any,
  first: RuleVariant,
  axis: str,
  devices: int,
  most: int,
  layers: str | None = None,
) -> list[RuleVariant]:
  """Pipelines over `axis`: every number of stages, with 2, 4 and 8 microbatches for each of them.

  The user's rules split the layers over the axis where the model stacks them: a dim of parameters that has
  one of `LAYER_NAMES`, and that the rules replicate. Schedules are GPipe and the circular one of two
  virtual stages.
  Layers run as they are under the first policy of `first`: a pipeline recomputes them anyhow.

  Raises:
    TrainError: the loss has no consecutive equal layers.
  """
  ruleset = RuleSet.of(rules)
  free = [n for n in LAYER_NAMES if n in first.names and (_whole(ruleset, n) or n not in ruleset.logical)]
  changes: Changes = dict.fromkeys(free, (axis,))
  examples = min((x.shape[0] for x in jax.tree.leaves(batch) if x.shape), default=1)
  remats = list(first.workloads)[:1]
  found: list[RuleVariant] = []
  for stages in (n for n in range(2, devices + 1) if devices % n == 0):
    for parts, virtual_stages in itertools.product((2, 4, 8), (1, 2)):
      count = stages * parts
      if count > most or examples % count:
        continue
      piped = Pipeline(axis, virtual_stages)
      try:
        one = _space(init, loss, ruleset, optimizer, batch, layers, remats, changes, piped, stages, count)
      except SchemeError:  # fewer layers than chunks
        continue
      # A stacked dim that does not divide cannot lie on its stages.
      if one.schedule is not None and not (changes and one.schedule.layers % stages):
        found.append(one)
  return found


def searched_axes(rules: Rules) -> tuple[str, ...]:
  """Mesh axes that rules name: those of the batch first, the others by appearance.

  Raises:
    ReportError: they name none.

  Example:
    >>> import nnx_parallel as nxp
    >>> searched_axes(nxp.LogicalRules(mlp="tensor", batch=("data", "fsdp"), embed="fsdp"))
    ('data', 'fsdp', 'tensor')
  """
  ruleset = RuleSet.of(rules)
  options = [*ruleset.logical.get("batch", ()), *itertools.chain(*ruleset.logical.values())]
  named = [axis for option in options for axis in option]
  named += list(ruleset.fallback.axes) if ruleset.fallback else []
  axes = tuple(dict.fromkeys(named))
  if not axes:
    raise ReportError(
      "the rules name no mesh axis, so there is nothing to search over.",
      details=f"rules {rules}",
      fix='LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor"), or fsdp().',
    )
  return axes


def factorisations(count: int, axes: Sequence[str]) -> Iterator[Sizes]:
  """Every way to write `count` as a product of one size per axis.

  Example:
    >>> [tuple(s.values()) for s in factorisations(4, ("data", "tensor"))]
    [(1, 4), (2, 2), (4, 1)]
  """
  if len(axes) == 1:
    yield {axes[0]: count}
    return
  for size in range(1, count + 1):
    if count % size == 0:
      for rest in factorisations(count // size, axes[1:]):
        yield {axes[0]: size, **rest}


def _space(
  init: Callable[[], Any],
  loss: Callable[[Any, Any], Any],
  ruleset: RuleSet,
  optimizer: Any,
  batch: Any,
  layers: str | None,
  remats: Sequence[RematName | Remat],
  changes: Changes,
  pipeline: Pipeline | None = None,
  stages: int = 1,
  microbatches: int = 1,
) -> RuleVariant:
  changed = ruleset.replace(changes) if changes else ruleset
  axes = searched_axes(changed)
  # Sizes of two keep every axis in the specs; the traces do not depend on them, but on the stages.
  mesh = abstract_mesh(dict.fromkeys(axes, 2) | ({pipeline.axis: stages} if pipeline is not None else {}))
  probe = make_plan(init, mesh, changed, optimizer=optimizer, uneven="replicate")
  written = pipeline is not None or {"as written", "none"}.issuperset(remats)
  if not written and not finds_layers(probe, loss, batch, layers):
    remats = ("as written",)
  workloads: dict[RematName | Remat, Workload] = {
    remat: trace_workload(
      probe, loss, batch, remat=remat, layers=layers, pipeline=pipeline, microbatches=microbatches
    )
    for remat in dict.fromkeys(remats)
  }
  work = next(iter(workloads.values()))
  limits = _limits(probe, work)
  used = {axis for _, dim in limits for axis in dim} | set(work.batch_axes)
  return RuleVariant(
    changes=changes,
    axes=tuple(axis for axis in axes if axis in used),
    idle=tuple(axis for axis in axes if axis not in used),
    workloads=workloads,
    limits=limits,
    needed=frozenset(axis for name, dim in changes.items() if name != "batch" for axis in dim),
    names=frozenset(name for leaf in probe.leaves for entry in leaf.names or () for name in axes_of(entry)),
    schedule=work.staged.schedule if work.staged is not None else None,
    pipeline=pipeline,
  )


def _limits(probe: Plan, work: Workload) -> dict[tuple[int, tuple[str, ...]], str]:
  """(dim size, axes that split it) -> the leaf and dim, or the activation, that it is of."""
  limits: dict[tuple[int, tuple[str, ...]], str] = {}
  for leaf in probe.leaves:
    if leaf.root == "model":
      for dim, entry in enumerate(leaf.spec):
        axes = axes_of(entry)
        if axes:
          limits.setdefault((leaf.shape[dim], axes), f"{leaf.name} dim {dim}")
  for size, axes in sorted(work.constrained):
    if not set(axes) & set(work.batch_axes):
      limits.setdefault((size, axes), "a dim of an activation")
  return limits


def _whole(ruleset: RuleSet, name: str) -> bool:
  return name in ruleset.logical and not any(ruleset.logical[name])


def _expert_change(ruleset: RuleSet, first: RuleVariant) -> Changes:
  """An axis for experts. It also splits the batch: each device holds other tokens."""
  for name in EXPERT_NAMES:
    if name in first.names and (_whole(ruleset, name) or name not in ruleset.logical):
      return {name: ("expert",), "batch": (*first.work.batch_axes, "expert")}
  return {}


def _sequence_changes(ruleset: RuleSet, first: RuleVariant) -> Iterator[Changes]:
  parameters = {axis for part in first.work.parameters for axis in part.split}
  others = sorted(parameters - set(first.work.batch_axes))
  for name in SEQUENCE_NAMES:
    if _whole(ruleset, name):
      yield from ({name: (axis,)} for axis in others)
