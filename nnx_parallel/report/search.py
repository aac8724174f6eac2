"""Which layout is best: every mesh, with microbatches, remat and ZeRO stages, ranked by the model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from nnx_parallel.errors import ReportError
from nnx_parallel.layout.mesh import abstract_mesh
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.layout.plan import plan as make_plan
from nnx_parallel.layout.rules import RuleSet
from nnx_parallel.report.compile_report import CompileReport, compile_report
from nnx_parallel.report.memory import memory_categories
from nnx_parallel.report.remat import Remat, with_remat
from nnx_parallel.report.roofline import StepTime, step_time
from nnx_parallel.report.topology import Machine, machine
from nnx_parallel.report.workload import Workload, trace_workload
from nnx_parallel.report.zero import with_zero

Sizes = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run the step.

  Attributes:
    sizes: mesh axis -> size.
    microbatches: parts that the batch is run in.
    remat: what layers keep; see `with_remat`.
    zero: ZeRO stage of the optimizer's state (1) and of the gradients too (2); see `plan`.
    memory_bytes: predicted need of one device.
    time: predicted time of the step.
    report: the compiler's figures, where this candidate was compiled.
  """

  sizes: Mapping[str, int]
  microbatches: int
  remat: Remat
  zero: int
  memory_bytes: int
  time: StepTime
  report: CompileReport | None = None

  @property
  def mesh_text(self) -> str:
    """The axes that split something, as arguments of `make_mesh`."""
    return ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """Every candidate, ranked.

  Attributes:
    machine: what was searched for.
    fitting: candidates that fit by the model, fastest first.
    too_large: candidates that do not, smallest first.
    refused: reason -> number of mesh factorisations that it ruled out.
    best: the winner: the fastest that fits, and that compiled where `compile_best` asked for it; None
      when nothing fits.
  """

  machine: Machine
  fitting: tuple[Candidate, ...]
  too_large: tuple[Candidate, ...]
  refused: Mapping[str, int]
  best: Candidate | None

  def pareto(self) -> tuple[Candidate, ...]:
    """Candidates that no other one beats in both memory and time, fastest first."""
    front: list[Candidate] = []
    for candidate in self.fitting:
      if not front or candidate.memory_bytes < front[-1].memory_bytes:
        front.append(candidate)
    return tuple(front)

  def code(self) -> str:
    """The winner as code to paste.

    Raises:
      ReportError: nothing fits.
    """
    if self.best is None:
      raise ReportError(f"no layout fits on {self.machine.text}.", fix="more devices, or a smaller batch.")
    loss = "loss" if self.best.remat == "as written" else f'nxp.with_remat(loss, "{self.best.remat}")'
    stage = f", zero={self.best.zero}" if self.best.zero else ""
    gradients = ', gradients="scattered"' if self.best.zero == 2 else ""
    return (
      f"mesh = nxp.make_mesh({self.best.mesh_text})\n"
      f"plan = nxp.plan(init, mesh, rules, optimizer=optimizer{stage})\n"
      "model, state = nxp.create_sharded_model(plan)\n"
      f"step = nxp.train_step({loss}, microbatches={self.best.microbatches}{gradients})\n"
    )

  def to_json(self) -> str:
    """The winner, the Pareto front and the counts as JSON."""
    body = {
      "topology": self.machine.text,
      "fitting": len(self.fitting),
      "too_large": len(self.too_large),
      "refused": dict(self.refused),
      "best": _row(self.best) if self.best else None,
      "pareto": [_row(candidate) for candidate in self.pareto()],
    }
    return json.dumps(body, indent=2)

  def __str__(self) -> str:
    from nnx_parallel.report.search_text import search_text

    return search_text(self)


def search(
  init: Callable[[], nnx.Module],
  loss: Callable[[Any, Any], Any],
  topology: str,
  *,
  batch: Any,
  rules: Any,
  optimizer: optax.GradientTransformation | None = None,
  remats: Sequence[Remat] = ("none", "dots", "full"),
  zero: Sequence[int] = (0, 1, 2),
  max_microbatches: int = 64,
  compile_best: int = 0,
) -> SearchResult:
  """Ranks every mesh that the rules can use, with microbatches, remat and ZeRO stages, for a machine.

  Args:
    init: builds the module.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    topology: the machine, e.g. `"tpu:v5p:4x4x8"`; its compiler is needed only by `compile_best`.
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    rules: as for `plan`; the axes that they name are the axes searched over.
    optimizer: its state is counted.
    remats: policies to try; see `with_remat`.
    zero: ZeRO stages to try where they split something further; see `plan`. Stage 3 is an `fsdp` axis
      of the rules.
    max_microbatches: largest number of parts of the batch to try; powers of two.
    compile_best: how many of the fastest to compile for the machine; the fastest of these that the
      compiler accepts wins.

  Returns:
    Every candidate, ranked; print it.

  Raises:
    ReportError: the topology, a policy or a stage is unknown, or the rules name no axis.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import nnx_parallel as nxp
    >>> init = lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0))
    >>> batch = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    >>> rules = [nxp.LogicalRules(batch="fsdp"), nxp.fsdp()]
    >>> result = search(init, lambda m, x: (m(x) ** 2).mean(), "tpu:v5e:4x4", batch=batch, rules=rules)
    >>> result.best.mesh_text
    'fsdp=16'
  """
  strange = [stage for stage in zero if stage not in (0, 1, 2)]
  if strange:
    raise ReportError(
      f"zero={strange[0]!r} is not a stage to search over.",
      fix="zero=(0, 1, 2); stage 3 is the rule fsdp(), and is searched as a mesh axis.",
    )
  target = machine(topology)
  axes = searched_axes(rules)
  # Sizes of two keep every axis in the specs; the traces do not depend on them.
  probe = make_plan(
    init, abstract_mesh(dict.fromkeys(axes, 2)), rules, optimizer=optimizer, uneven="replicate"
  )
  works: dict[Remat, Workload] = {
    remat: trace_workload(probe, loss, batch, remat=remat) for remat in dict.fromkeys(remats)
  }
  limits = _limits(probe)
  refused: dict[str, int] = {}
  found: list[Candidate] = []
  for sizes in factorisations(target.devices, axes):
    reason = _refuse(sizes, limits, batch, next(iter(works.values())))
    if reason:
      refused[reason] = refused.get(reason, 0) + 1
      continue
    found += _candidates(works, sizes, target, batch, zero, max_microbatches)
  usable = target.chip.usable_bytes
  fitting = sorted((c for c in found if c.memory_bytes <= usable), key=_rank)
  too_large = sorted((c for c in found if c.memory_bytes > usable), key=lambda c: c.memory_bytes)
  best = fitting[0] if fitting else None
  if compile_best:
    if optimizer is None:
      raise ReportError(
        "a train step cannot be compiled without an optimizer.",
        details=f"compile_best={compile_best}",
        fix="search(..., optimizer=optax.adamw(1e-3), compile_best=...).",
      )
    fitting, best = _compile(fitting, compile_best, init, loss, batch, rules, optimizer, topology)
  return SearchResult(target, tuple(fitting), tuple(too_large), refused, best)


def searched_axes(rules: Any) -> tuple[str, ...]:
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


def _limits(probe: ShardingPlan) -> dict[tuple[int, tuple[str, ...]], str]:
  """(dim size, axes that split it) -> the leaf and dim that say so."""
  limits: dict[tuple[int, tuple[str, ...]], str] = {}
  for leaf in probe.leaves:
    if leaf.root == "model":
      for dim, entry in enumerate(leaf.spec):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if axes:
          limits.setdefault((leaf.shape[dim], axes), f"{leaf.name} dim {dim}")
  return limits


def _refuse(
  sizes: Sizes, limits: Mapping[tuple[int, tuple[str, ...]], str], batch: Any, work: Workload
) -> str:
  parts = math.prod(sizes.get(axis, 1) for axis in work.batch_axes)
  for x in jax.tree.leaves(batch):
    if x.shape and x.shape[0] % parts:
      return f"a batch of {x.shape[0]} does not divide over {'+'.join(work.batch_axes)}"
  for (size, axes), where in limits.items():
    if size % math.prod(sizes[axis] for axis in axes):
      return f"{where} of {size} does not divide over {'+'.join(axes)}"
  return ""


def _candidates(
  works: Mapping[Remat, Workload],
  sizes: Sizes,
  target: Machine,
  batch: Any,
  stages: Sequence[int],
  most: int,
) -> Iterator[Candidate]:
  parts = math.prod(sizes.get(axis, 1) for axis in next(iter(works.values())).batch_axes)
  examples = min((x.shape[0] for x in jax.tree.leaves(batch) if x.shape), default=1)
  counts = [2**n for n in range(most.bit_length()) if 2**n <= most and examples % (parts * 2**n) == 0]
  for (remat, traced), stage in itertools.product(works.items(), stages):
    work = with_zero(traced, sizes, stage)
    if work.stage != stage:
      continue  # nothing is left to split: the same as stage 0
    for count in counts:
      memory = round(sum(memory_categories(work, sizes, count).values()))
      time = step_time(work, sizes, target.chip, microbatches=count, slice_size=target.slice_size)
      yield Candidate(sizes, count, remat, stage, memory, time)


def _compile(
  fitting: Sequence[Candidate],
  count: int,
  init: Callable[[], nnx.Module],
  loss: Callable[[Any, Any], Any],
  batch: Any,
  rules: Any,
  optimizer: optax.GradientTransformation | None,
  topology: str,
) -> tuple[list[Candidate], Candidate | None]:
  from nnx_parallel.train.step import train_step

  done: list[Candidate] = []
  for candidate in fitting[:count]:
    mesh = abstract_mesh(dict(candidate.sizes))
    layout = make_plan(init, mesh, rules, optimizer=optimizer, zero=candidate.zero)
    step = train_step(
      with_remat(loss, candidate.remat),
      microbatches=candidate.microbatches,
      gradients="scattered" if candidate.zero == 2 else "whole",
    )
    report = compile_report(step, layout, batch=batch, topology=topology)
    done.append(dataclasses.replace(candidate, report=report))
  best = next((c for c in done if c.report and c.report.fits), None)
  return [*done, *fitting[count:]], best


def _rank(candidate: Candidate) -> tuple[float, int]:
  return candidate.time.seconds, candidate.memory_bytes


def _row(candidate: Candidate) -> dict[str, Any]:
  return {
    "mesh": dict(candidate.sizes),
    "microbatches": candidate.microbatches,
    "remat": candidate.remat,
    "zero": candidate.zero,
    "memory_bytes": candidate.memory_bytes,
    "seconds": candidate.time.seconds,
    "mfu": candidate.time.mfu,
    "binds": candidate.time.binds,
    "compiled_bytes": candidate.report.need_bytes if candidate.report else None,
  }
