"""Finds a layout for a step on a machine: about a dozen meshes, with remat policies and microbatches.

The memory plan drops what cannot fit. The compiler of the machine compiles the best of the others, and its
counts rank them. Without a compiler, the bytes that the plan knows exactly do.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from nnx_parallel.core.axes import axes_in, count_shards
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.mesh import abstract_mesh, axis_sizes, no_mesh
from nnx_parallel.core.text import (
  Shown,
  format_bytes,
  hang,
  page_width,
)
from nnx_parallel.core.types import LossFn, PyTree
from nnx_parallel.errors import NnxParallelError, ReportError, SchemeError
from nnx_parallel.layers.layers import MARK_LAYERS, has_layers, with_marks
from nnx_parallel.layers.pipeline import Pipeline
from nnx_parallel.layers.remat import Remat, RematName
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.planning import plan as make_plan
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.compile_report import CompileReport, compile_report
from nnx_parallel.report.inputs import batch_structs, check_batch
from nnx_parallel.report.memory import MemoryPlan, Saved, count_memory, flat_loss, structs_of, trace_saved
from nnx_parallel.report.tables import Table, format_count, not_counted, render
from nnx_parallel.report.topology import Machine, missing_compiler, read_machine
from nnx_parallel.rules.ruleset import Rules, RuleSet
from nnx_parallel.train.step import train_step

Sizes = Mapping[str, int]
ROOM = 1.5
"""How many times the least memory a compiler is expected to need; a refusal raises it.

It needed 1.03 to 2.76 times as much in the cases of `benchmarks/results/report_figures.json`.
"""
INNER = 8
"""The most devices over which axes that do not split the batch, and pipeline stages, are tried."""


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run the step."""

  plan: Plan  # the layout
  # the least that one device needs, with the remat policy, the number of microbatches, and the schedule of
  # the pipeline
  memory: MemoryPlan
  pipeline: Pipeline | None = None  # the pipeline over the layers, or None
  report: CompileReport | None = None  # the compiler's figures, where this candidate was compiled

  @property
  def sizes(self) -> Sizes:
    """Mesh axis -> size."""
    return axis_sizes(self.plan.mesh)

  @property
  def mesh_text(self) -> str:
    """The mesh as arguments of `make_mesh`."""
    return ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())

  @property
  def refused(self) -> str:
    """Why the compiled program cannot run, or an empty string."""
    if self.report is None or self.report.fits:
      return ""
    return f"the compiler needs {format_bytes(self.report.need_bytes)}"


@dataclasses.dataclass(frozen=True)
class SearchResult(Shown):
  """All candidates, ranked. It prints the winner as code, the best candidate of each mesh, and notes.

  Attributes:
    machine: the target machine.
    fitting: the candidates that may fit: first those that a compiler accepted, the least work first; then
      those that were not compiled, the fewest exact bytes first; then those that a compiler refused.
    too_large: the candidates that cannot fit, smallest first.
    refused: a dict: reason -> number of meshes that it excluded.
    best: the winner: the first of `fitting`, or None if no candidate can run.
    notes: remarks, for example on axes that shard nothing, the notes of the winner's plan, candidates that
      were not compiled, and operations that were not counted.
    layers: dotted paths of the layers, if they were given.
  """

  machine: Machine
  fitting: tuple[Candidate, ...]
  too_large: tuple[Candidate, ...]
  refused: Mapping[str, int]
  best: Candidate | None
  notes: tuple[str, ...] = ()
  layers: str | None = None

  def code(self) -> str:
    """Returns the winner as code to paste, for `init`, `loss`, `rules` and `optimizer`.

    Raises:
      ReportError: nothing fits.
    """
    best = self.best
    if best is None:
      raise ReportError(f"no layout fits on {self.machine.text}.", fix="more devices, or a smaller batch.")
    layout = f", zero={best.plan.zero}" if best.plan.zero else ""
    layout += ', optimizer_memory="pinned_host"' if is_offloaded(best.plan) else ""
    step, remat = f"microbatches={best.memory.microbatches}", best.memory.remat
    if remat != "as written":
      step += f', remat="{remat}"' if isinstance(remat, str) else f", remat=nxp.{remat!r}"
      step += f', layers="{self.layers}"' if self.layers else ""
    if best.pipeline is not None:
      step += f", pipeline=nxp.{best.pipeline!r}"
    return (
      f"mesh = nxp.make_mesh({best.mesh_text})\n"
      f"plan = nxp.plan(init, mesh, rules, optimizer=optimizer{layout})\n"
      "model, state = nxp.create_sharded_model(plan)\n"
      f"step = nxp.train_step(loss, {step})\n"
    )

  def table(self) -> Table:
    """Returns the best candidate of each mesh; if nothing fits on a mesh, the smallest."""
    shown = _one_of_each_mesh(self.fitting or self.too_large)
    columns = ("mesh", "microbatches>", "remat", "exact>", "at least>")
    if any(c.report is not None for c in shown):
      columns += ("compiled>", "FLOPs>", "traffic>", "sent>")
    rows = [_cells(c)[: len(columns)] for c in shown]
    title = "Best layout of each mesh: bytes per device"
    if not self.fitting:
      title = "Nothing fits. The smallest layout of each mesh" if rows else "No layout can run; see the notes"
    return Table(title, columns, rows)

  def summary(self) -> str:
    """Returns one sentence that says how many layouts were tried, and how many may fit."""
    chip, tried = self.machine.chip, len(self.fitting) + len(self.too_large)
    return (
      f"{tried} layouts for {self.machine.devices} x {chip.name}, {format_bytes(chip.usable_bytes)} usable"
      f" each{chip.usable_note}: {len(self.fitting)} may fit, {len(self.too_large)} cannot."
    )

  def __str__(self) -> str:
    lines = [self.summary()]
    if self.best is not None:
      report = self.best.report
      how = "by exact bytes, not compiled" if report is None else f"compiled for {report.target}: it fits"
      lines += ["", f"The winner, {how}:", "", *(f"  {line}" for line in self.code().splitlines())]
    notes = [*self.notes]
    notes += [f"{count} meshes are left out: {why}" for why, count in [*self.refused.items()][:5]]
    lines += ["" for _ in notes[:1]] + [hang(f"note: {note}", page_width()) for note in notes]
    return "\n".join([*lines, "", render(*self.table())])

  def to_json(self) -> str:
    """Returns the winner, the best candidate of each mesh, the compiled candidates and the counts as JSON."""
    body = {
      "topology": self.machine.text,
      "fitting": len(self.fitting),
      "too_large": len(self.too_large),
      "refused": dict(self.refused),
      "best": _as_json(self.best) if self.best else None,
      "meshes": [_as_json(candidate) for candidate in _one_of_each_mesh(self.fitting)],
      "compiled": [_as_json(c) for c in self.fitting if c.report is not None],
      "notes": list(self.notes),
    }
    return json.dumps(body, indent=2)


@check_arguments(ReportError, max_microbatches=1)
@no_mesh()
def search(
  init: Callable[[], nnx.Module],
  loss: LossFn,
  topology: str,
  *,
  batch: PyTree,
  rules: Rules,
  optimizer: optax.GradientTransformation | None = None,
  remat: RematName | Remat | Sequence[RematName | Remat] = ("none", "dots", "full"),
  layers: str | None = None,
  zero: int = 0,
  optimizer_memory: str | None = None,
  max_microbatches: int = 64,
  pipeline: str | Pipeline | None = None,
  compile_best: int = 3,
) -> SearchResult:
  """Finds a layout of a train step that fits in the memory of a machine, with little work.

  It tries about a dozen meshes with the axes that the rules name, each with several remat policies and
  numbers of microbatches. Axes that do not shard the batch (`tensor`) get at most 8 devices. Among the axes
  that shard the batch (`data`, `fsdp`), one axis gets all remaining devices. Alternatively, the last of these
  axes gets 8 devices or a slice, and an axis before it gets the rest.

  Args:
    init: a function without arguments that builds the module.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    topology: the name of the machine, such as `"tpu:v5p:4x4x8"`.
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    rules: as for `plan`.
    optimizer: the Optax transformation.
    remat: a remat policy, or a list of policies to try; see `train_step`. If the loss has no layers to which
      they apply, it runs as it is written, and `notes` says so.
    layers: dotted paths of the layers, with `*` for any part; as in `train_step`.
    zero: the ZeRO stage; as in `plan`.
    optimizer_memory: where the optimizer's state is stored between steps; as in `plan`.
    max_microbatches: the largest number of microbatches to try; the search tries powers of two.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`, of which 2, 4 and 8 stages are tried too. The
      name of an axis means the order 1F1B, which saves the fewest activations. Stacked layers stay on their
      stages if the rules shard them over this axis.
    compile_best: the maximum number of layouts to compile, with the compiler of the machine; without it, for
      simulated CPU devices, if this process has enough of them. The meshes with the fewest exact bytes come
      first. Of each mesh, the layout with the least recomputation and the fewest microbatches that leaves
      room is compiled, and another one where that does not fit. Of the layouts that fit, the one with the
      least work wins: FLOPs, memory traffic and sent bytes, each at the published rate of the chip.

  Returns:
    A `SearchResult` with all candidates, ranked; print it.

  Raises:
    ReportError: the topology or a policy is unknown, `max_microbatches` is not positive, or the rules name
      no axis.
    TrainError: `layers` matches no module, or a pipeline finds no consecutive equal layers.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(4096, 4096, use_bias=False, rngs=nnx.Rngs(0))
    >>> batch = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    >>> rules = [nxp.LogicalRules(batch="fsdp"), nxp.fsdp()]
    >>> result = search(init, lambda m, x: (m(x) ** 2).mean(), "tpu:v5e:4x4", batch=batch, rules=rules)
    >>> result.best.mesh_text
    'fsdp=16'
  """
  check_arrays(ReportError, "batch", batch)
  machine, batch = read_machine(topology), batch_structs(batch)
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  named = searched_axes(rules)
  place: Any = {"optimizer": optimizer, "zero": zero, "optimizer_memory": optimizer_memory}
  probe = make_plan(init, abstract_mesh(dict.fromkeys(named, 2)), rules, uneven="replicate", **place)
  used = {axis for leaf in probe.leaves for axis in axes_in(leaf.spec)} | {*probe.batch_axes}
  used |= {stages.axis} if stages else set()
  idle = [axis for axis in named if axis not in used]
  notes = [f"The axis {axis!r} splits nothing of this model: its size is 1." for axis in idle]
  remats = _policies(remat)
  if not {"as written", "none"}.issuperset(remats):
    marked = flat_loss(probe, with_marks(loss, layers), batch)
    if not has_layers(jax.make_jaxpr(marked)(*structs_of(probe, batch))):
      notes.append(f"No remat policy was tried, since none finds a layer in the loss. Fix: {MARK_LAYERS}.")
      remats = ("as written",)
  task = _Task(loss, machine, batch, remats, layers, max_microbatches, stages)
  found: list[Candidate] = []
  refused: dict[str, int] = {}
  for sizes in meshes(machine, named, probe.batch_axes, idle, stages.axis if stages else None):
    try:
      layout = make_plan(init, abstract_mesh(sizes), rules, **place)
      check_batch(layout, batch)
    except NnxParallelError as error:
      refused[error.what] = refused.get(error.what, 0) + 1
      continue
    found += task.candidates(layout)
  usable = machine.chip.usable_bytes
  too_large = sorted((c for c in found if c.memory.need_bytes > usable), key=lambda c: c.memory.need_bytes)
  most = compile_best if optimizer is not None else 0
  if compile_best and optimizer is None:
    notes.append(
      "The layouts were not compiled, and are ranked by exact bytes: a step needs search(..., optimizer=)."
    )
  ranked, more = task.ranked([c for c in found if c.memory.need_bytes <= usable], most)
  best = next((c for c in ranked if not c.refused), None)
  if best is not None:
    notes += [f"of the winner's plan: {note}" for note in best.plan.notes]
    notes += [line] if best.report and (line := not_counted(best.report.cost.uncounted)) else []
  return SearchResult(machine, tuple(ranked), tuple(too_large), refused, best, (*notes, *more), layers)


def searched_axes(rules: Rules) -> tuple[str, ...]:
  """Mesh axes that rules name: first the axes of the batch, then other axes by appearance."""
  ruleset = RuleSet.of(rules)
  options = [*ruleset.logical.get("batch", ()), *itertools.chain(*ruleset.logical.values())]
  named = [axis for option in options for axis in option]
  named += list(ruleset.fallback.axes) if ruleset.fallback else []
  axes = tuple(dict.fromkeys(named))
  if not axes:
    raise ReportError(
      "the rules name no mesh axis, so there is nothing to search over.",
      details=f"rules {rules}",
      fix='nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor"), or nxp.fsdp().',
    )
  return axes


def meshes(
  machine: Machine,
  axes: Sequence[str],
  batch_axes: Sequence[str],
  idle: Sequence[str] = (),
  stage: str | None = None,
) -> list[Sizes]:
  """The meshes to try, or all if none is usual. `idle` axes get size 1; without and with pipeline stages."""

  def is_usual(sizes: Sizes) -> bool:
    inner = math.prod(size for axis, size in sizes.items() if axis not in (*batch_axes, stage))
    outer = [sizes[axis] for axis in batch_axes if sizes[axis] > 1]
    fits = inner <= min(INNER, machine.slice_size) and sizes.get(stage or "", 1) <= INNER
    return fits and len(outer) < 3 and (len(outer) < 2 or outer[-1] in (INNER, machine.slice_size // inner))

  # Neighbours in a pipeline send least, so the stages come first: they take the slowest links.
  ordered = [*dict.fromkeys([stage, *axes] if stage else axes)]
  found = factorisations(machine.devices, [axis for axis in ordered if axis not in idle] or ordered[:1])
  every: list[Sizes] = [{axis: sizes.get(axis, 1) for axis in ordered} for sizes in found]
  return [sizes for sizes in every if is_usual(sizes)] or every


def factorisations(count: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
  """Every way to write `count` as a product of one size per axis."""
  if len(axes) == 1:
    yield {axes[0]: count}
    return
  for size in (n for n in range(1, count + 1) if count % n == 0):
    for rest in factorisations(count // size, axes[1:]):
      yield {axes[0]: size, **rest}


def _policies(remat: Any) -> tuple[RematName | Remat, ...]:
  given: PyTree = (remat,) if isinstance(remat, str | Remat) or callable(remat) else remat
  for known in given:
    if callable(known.policy if isinstance(known, Remat) else known):
      raise ReportError(
        f"remat={known!r} has no name to print.", fix='remat=("none", "full", nxp.Remat("full", every=2))'
      )
  return tuple(dict.fromkeys(given))


@dataclasses.dataclass(frozen=True)
class _Task:
  """The parts of a search that do not depend on the mesh; its traces do not depend on axis sizes."""

  loss: LossFn
  machine: Machine
  batch: PyTree
  remats: tuple[RematName | Remat, ...]
  layers: str | None
  most: int
  pipeline: Pipeline | None
  traces: dict[Hashable, Saved] = dataclasses.field(default_factory=dict[Any, Saved])

  def candidates(self, plan: Plan) -> Iterator[Candidate]:
    """The layout with each policy and number of microbatches."""
    sizes, counts = axis_sizes(plan.mesh), [2**n for n in range(self.most.bit_length())]
    shards = count_shards(plan.batch_axes, sizes)
    examples = min((x.shape[0] for x in jax.tree.leaves(self.batch) if x.shape), default=1)
    stages = sizes.get(self.pipeline.axis, 1) if self.pipeline is not None else 1
    if stages > 1:
      counts = [stages * n for n in (2, 4, 8) if stages * n <= self.most]
    pipeline = self.pipeline if stages > 1 else None
    # A pipeline recomputes its layers, whatever the policy.
    for remat in self.remats if pipeline is None else self.remats[:1]:
      for count in (count for count in counts if examples % (shards * count) == 0):
        try:
          yield self._candidate(plan, remat, count, pipeline)
        except SchemeError:  # fewer layers than stages
          return

  def _candidate(
    self, plan: Plan, remat: RematName | Remat, count: int, pipeline: Pipeline | None
  ) -> Candidate:
    key = remat if pipeline is None else (axis_sizes(plan.mesh)[pipeline.axis], count)
    if key not in self.traces:
      options: Any = {"remat": remat, "layers": self.layers, "pipeline": pipeline}
      self.traces[key] = trace_saved(plan, self.loss, self.batch, microbatches=count, **options)
    return Candidate(plan, count_memory(plan, self.traces[key], self.batch, count, remat), pipeline)

  def ranked(self, fitting: list[Candidate], most: int) -> tuple[list[Candidate], list[str]]:
    """The candidates in the order of `SearchResult.fitting`, of which `most` are compiled, and notes."""
    text, note = self._compiler() if most and fitting else (None, "")
    room, usable = ROOM, self.machine.chip.usable_bytes

    def rank(c: Candidate) -> tuple[bool, int, int, int]:
      memory = c.memory
      order = self.remats.index(memory.remat)
      return memory.need_bytes * room > usable, memory.exact_bytes, order, memory.microbatches

    left, accepted, refused = sorted(fitting, key=rank), list[Candidate](), list[Candidate]()
    while text is not None and len(accepted) + len(refused) < most:
      known = {c.mesh_text for c in accepted}
      candidate = next((c for c in left if c.mesh_text not in known), None)
      if candidate is None:
        break
      left.remove(candidate)
      done = self._compiled(candidate, text)
      (refused if done.refused else accepted).append(done)
      if done.report is not None:
        room = max(room, done.report.need_bytes / candidate.memory.need_bytes)
        left.sort(key=rank)
    accepted.sort(key=self._work)
    notes = [note] if note else []
    notes += [
      f"{c.mesh_text}, microbatches={c.memory.microbatches} is refused: {c.refused}." for c in refused
    ]
    if refused and not accepted:
      # What would need as much more than its least as these did is no proposal.
      refused += [c for c in left if rank(c)[0]]
      left = [c for c in left if not rank(c)[0]]
      notes.append(f"None of the compiled layouts fits.{' The winner was not compiled.' * bool(left)}")
    return [*accepted, *left, *refused], notes

  def _compiled(self, candidate: Candidate, topology: str) -> Candidate:
    memory = candidate.memory
    options: Any = {"remat": memory.remat, "layers": self.layers, "microbatches": memory.microbatches}
    step = train_step(self.loss, pipeline=candidate.pipeline, **options)
    report = compile_report(step, candidate.plan, batch=self.batch, topology=topology, chip=self.machine.chip)
    return dataclasses.replace(candidate, report=report)

  def _work(self, candidate: Candidate) -> tuple[float, int]:
    """Orders compiled layouts by their work; of almost equal ones, the smaller one is first."""
    assert candidate.report is not None
    return float(f"{work_of(candidate.report, self.machine.chip):.3g}"), candidate.report.need_bytes

  def _compiler(self) -> tuple[str | None, str]:
    """The topology to compile for; None, and the reason, without a compiler."""
    machine, here = self.machine, len(jax.devices("cpu"))
    missing = missing_compiler(machine)
    if missing is None and (machine.chip.platform != "cpu" or machine.devices <= here):
      return machine.text, ""
    if machine.devices <= here:
      return f"cpu:{machine.devices}", ""
    return None, (
      f"The layouts were not compiled, and are ranked by exact bytes: {machine.devices} simulated devices are"
      f" needed, and this process has {here} (JAX_NUM_CPU_DEVICES={machine.devices} JAX_PLATFORMS=cpu)"
      + (f"; {missing.what} {missing.fix}" if missing is not None else ".")
    )


def is_offloaded(plan: Plan) -> bool:
  """Whether a plan keeps optimizer state in the host's memory."""
  return any(leaf.on_host for leaf in plan.leaves)


def work_of(report: CompileReport, chip: Chip) -> float:
  """Seconds at the chip's published rates, only to compare programs for it; unhidden sends come on top."""
  sent = {True: 0.0, False: 0.0}
  for c in report.collectives:
    rate = chip.link_bandwidth * chip.links if c.slices == 1 else chip.network_bandwidth
    sent[c.overlapped] += c.sent_bytes / rate
  arithmetic = sum(count / chip.peak(name) for name, count in report.cost.arithmetic.items())
  return max(arithmetic, report.cost.hbm_bytes / chip.hbm_bandwidth, sent[True]) + sent[False]


def _one_of_each_mesh(candidates: Sequence[Candidate]) -> list[Candidate]:
  first: dict[str, Candidate] = {}
  for candidate in candidates:
    first.setdefault(candidate.mesh_text, candidate)
  return list(first.values())


def _cells(candidate: Candidate) -> tuple[str, ...]:
  memory, report = candidate.memory, candidate.report
  bubble = "" if memory.schedule is None else f" (bubble {100 * memory.schedule.bubble_ratio:.0f} %)"
  known = [candidate.mesh_text + bubble, str(memory.microbatches), str(memory.remat)]
  known += [format_bytes(memory.exact_bytes), format_bytes(memory.need_bytes)]
  if report is None:
    return (*known, "", "", "", "")
  bytes_ = report.need_bytes, report.cost.hbm_bytes, report.sent().per_device
  need, traffic, sent = map(format_bytes, bytes_)
  return (*known, need, format_count(report.cost.flops), traffic, sent)


def _as_json(candidate: Candidate) -> dict[str, Any]:
  memory, report, pipeline = candidate.memory, candidate.report, candidate.pipeline
  found: dict[str, Any] = {
    "mesh": dict(candidate.sizes),
    "microbatches": memory.microbatches,
    "remat": str(memory.remat),
    "zero": candidate.plan.zero,
    "offload": is_offloaded(candidate.plan),
    "pipeline": dataclasses.asdict(pipeline) if pipeline is not None else None,
    "bubble": memory.schedule.bubble_ratio if memory.schedule is not None else None,
    "exact_bytes": memory.exact_bytes,
    "least_bytes": memory.need_bytes,
    "refused": candidate.refused,
  }
  if report is None:
    return found
  counts = {"flops": report.cost.flops, "hbm_bytes": report.cost.hbm_bytes}
  return found | counts | {"compiled_bytes": report.need_bytes, "sent_bytes": report.sent().per_device}
