"""Finds a layout for a step on a machine: a dozen meshes, remat policies and numbers of microbatches.

The memory plan rejects meshes that are too large, the step-time model ranks the others, and where a compiler
is available, the first layout that it accepts wins.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import optax
from flax import nnx

from nnx_parallel.core.axes import axes_in
from nnx_parallel.core.mesh import abstract_mesh, axis_sizes, no_mesh
from nnx_parallel.core.text import Shown, Table, format_bytes, hang, not_counted, page_width, render
from nnx_parallel.core.types import LossFn, PyTree
from nnx_parallel.errors import NnxParallelError, ReportError, SchemeError
from nnx_parallel.layers.layers import MARK_LAYERS
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layers.remat import Remat, RematName
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.planning import plan as make_plan
from nnx_parallel.report.compile_report import CompileReport, compile_report
from nnx_parallel.report.estimate.memory import BAND_TEXT, CASES, ERROR_BAND, memory_categories
from nnx_parallel.report.estimate.roofline import StepTime, step_time
from nnx_parallel.report.estimate.workload import (
  StepTrace,
  batch_structs,
  check_batch,
  finds_layers,
  trace_step,
  workload_of,
)
from nnx_parallel.report.topology import Machine, missing_compiler, read_machine
from nnx_parallel.rules.ruleset import Rules, RuleSet
from nnx_parallel.train.step import train_step

Fit = Literal["likely", "borderline", "no"]
Sizes = Mapping[str, int]
SAME_TIME = 0.005
"""Relative difference of predicted times below which less memory decides."""
INNER = 8
"""The most devices over which axes that do not split the batch, and pipeline stages, are tried."""


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run the step.

  Attributes:
    plan: the layout.
    microbatches: the number of microbatches of the batch.
    remat: the activations that layers save; see `train_step`.
    memory_bytes: the predicted need of one device.
    time: the predicted time of the step.
    fits: `"likely"` if the largest need that a compiler had for such a prediction fits too (`ERROR_BAND`,
      from test cases of one model), `"borderline"` if only the prediction fits, else `"no"`.
    pipeline: the pipeline over the layers, or None.
    schedule: the schedule of the pipeline: its stages, ticks and bubble.
    report: the compiler's figures, where this candidate was compiled.
  """

  plan: Plan
  microbatches: int
  remat: RematName | Remat
  memory_bytes: int
  time: StepTime
  fits: Fit
  pipeline: Pipeline | None = None
  schedule: Schedule | None = None
  report: CompileReport | None = None

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
    if self.report is None:
      return ""
    return "" if self.report.fits else f"the compiler needs {format_bytes(self.report.need_bytes)}"


@dataclasses.dataclass(frozen=True)
class SearchResult(Shown):
  """All candidates, ranked. It prints the winner as code, the best candidate of each mesh, and notes.

  Attributes:
    machine: the target machine.
    fitting: the candidates that fit according to the memory plan: first the likely candidates, then the
      borderline candidates, and in each group the fastest first. If two times are almost equal, the candidate
      that needs less memory comes first.
    too_large: the candidates that do not fit, smallest first.
    refused: a dict: reason -> number of meshes that it excluded.
    best: the winner: the first of `fitting` that no compiler rejected, or None.
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
    step = f"microbatches={best.microbatches}"
    if best.remat != "as written":
      step += f', remat="{best.remat}"' if isinstance(best.remat, str) else f", remat=nxp.{best.remat!r}"
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
    fastest = min((c.time.seconds for c in shown), default=1.0)
    compiled = any(c.report is not None for c in shown)
    columns = ("mesh", "microbatches>", "remat", "memory>", "fits", "time>", "bound by")
    columns += ("compiler needs>",) if compiled else ()
    rows = [(*_cells(c, fastest), *(_compiled(c) if compiled else ())) for c in shown]
    title = "Best layout of each mesh; times are relative to the fastest"
    if not self.fitting:
      title = "Nothing fits. The smallest layout of each mesh" if rows else "No layout can run; see the notes"
    return Table(title, columns, rows)

  def summary(self) -> str:
    """Returns one sentence that says how many layouts were tried, and how many fit."""
    chip, tried = self.machine.chip, len(self.fitting) + len(self.too_large)
    sure = sum(candidate.fits == "likely" for candidate in self.fitting)
    return (
      f"{tried} layouts for {self.machine.devices} x {chip.name}, {format_bytes(chip.usable_bytes)} usable"
      f" each{chip.usable_note}: {len(self.fitting)} fit by the memory plan, {sure} of them likely."
    )

  def __str__(self) -> str:
    lines = [self.summary()]
    if self.best is not None:
      report, how = self.best.report, ""
      if report is not None:
        how = f", compiled for {report.target}: it fits"
      elif self.best.fits == "borderline":
        how = ", a borderline fit; check it with search(..., compile_best=3)"
      lines += ["", f"The winner{how}:", "", *(f"  {line}" for line in self.code().splitlines()), ""]
    notes = [*self.notes]
    if self.best is None or any(c.fits == "borderline" for c in self.fitting):
      notes.append(f"In {CASES} test cases {BAND_TEXT}.")
    notes += [f"{count} meshes are left out: {why}" for why, count in [*self.refused.items()][:5]]
    lines += [hang(f"note: {note}", page_width()) for note in notes]
    return "\n".join([*lines, "", render(*self.table())])

  def to_json(self) -> str:
    """Returns the winner, the best candidate of each mesh, the compiled candidates and the counts as JSON."""
    fastest = min((c.time.seconds for c in self.fitting), default=1.0)
    body = {
      "topology": self.machine.text,
      "fitting": len(self.fitting),
      "too_large": len(self.too_large),
      "refused": dict(self.refused),
      "best": _as_json(self.best, fastest) if self.best else None,
      "meshes": [_as_json(candidate, fastest) for candidate in _one_of_each_mesh(self.fitting)],
      "compiled": [_as_json(c, fastest) for c in self.fitting if c.report is not None],
      "notes": list(self.notes),
    }
    return json.dumps(body, indent=2)


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
  """Finds a fast layout of a train step that fits in the memory of a machine.

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
    optimizer: the Optax transformation; its state, FLOPs and collectives are counted.
    remat: a remat policy, or a list of policies to try; see `train_step`. If the loss has no layers to which
      they apply, it runs as it is written, and `notes` says so.
    layers: dotted paths of the layers, with `*` for any part; as in `train_step`.
    zero: the ZeRO stage; as in `plan`.
    optimizer_memory: where the optimizer's state is stored between steps; as in `plan`.
    max_microbatches: the largest number of microbatches to try; the search tries powers of two.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`, of which 2, 4 and 8 stages are tried too. The
      name of an axis means the order 1F1B, which saves the fewest activations. Stacked layers stay on their
      stages if the rules shard them over this axis.
    compile_best: the maximum number of layouts to compile, in the order of their rank, with the compiler of
      the machine; without it, for simulated CPU devices, if this process has enough of them. The first layout
      that fits wins. Rejected layouts come last.

  Returns:
    A `SearchResult` with all candidates, ranked; print it.

  Raises:
    ReportError: the topology or a policy is unknown, `max_microbatches` is not positive, the rules name no
      axis, or the pipeline has the order `"1f1b-split"`, which no estimate covers.
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
  if max_microbatches < 1:
    raise ReportError(
      f"max_microbatches={max_microbatches} leaves nothing to try: a batch has at least one part.",
      fix="max_microbatches=1 for one microbatch only.",
    )
  machine, batch = read_machine(topology), batch_structs(batch)
  stages = Pipeline(pipeline, order="1f1b") if isinstance(pipeline, str) else pipeline
  named = searched_axes(rules)
  place: Any = {"optimizer": optimizer, "zero": zero, "optimizer_memory": optimizer_memory}
  probe = make_plan(init, abstract_mesh(dict.fromkeys(named, 2)), rules, uneven="replicate", **place)
  used = {axis for leaf in probe.leaves for axis in axes_in(leaf.spec)} | {*probe.batch_axes}
  used |= {stages.axis} if stages else set()
  idle = [axis for axis in named if axis not in used]
  notes = [f"The axis {axis!r} splits nothing of this model: its size is 1." for axis in idle]
  remats = _policies(remat)
  if not {"as written", "none"}.issuperset(remats) and not finds_layers(probe, loss, batch, layers):
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
  fitting = sorted((c for c in found if c.fits != "no"), key=lambda c: (c.fits != "likely", speed(c)))
  too_large = sorted((c for c in found if c.fits == "no"), key=lambda c: c.memory_bytes)
  if compile_best and optimizer is None:
    notes.append("The layouts were not compiled: a train step needs search(..., optimizer=).")
  tried, best, more = task.compiled(fitting, compile_best if optimizer is not None else 0)
  if best is not None:
    notes += [f"of the winner's plan: {note}" for note in best.plan.notes]
    missed = not_counted(best.time.uncounted)
    notes += [missed] if missed else []
  return SearchResult(machine, tuple(tried), tuple(too_large), refused, best, (*notes, *more), layers)


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
      fix='LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor"), or fsdp().',
    )
  return axes


def meshes(
  machine: Machine,
  axes: Sequence[str],
  batch_axes: Sequence[str],
  idle: Sequence[str] = (),
  stage: str | None = None,
) -> list[Sizes]:
  """The meshes to try; if no usual mesh fits, all meshes of the machine's devices.

  Axes that are `idle` get size 1; `stage`, the axis of pipeline stages, is also tried without a pipeline.
  """

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
  traces: dict[Hashable, StepTrace] = dataclasses.field(default_factory=dict[Any, StepTrace])

  def candidates(self, plan: Plan) -> Iterator[Candidate]:
    """The layout with each policy and number of microbatches."""
    sizes, counts = axis_sizes(plan.mesh), [2**n for n in range(self.most.bit_length())]
    shards = math.prod(sizes[axis] for axis in plan.batch_axes)
    examples = min((x.shape[0] for x in jax.tree.leaves(self.batch) if x.shape), default=1)
    stages = sizes.get(self.pipeline.axis, 1) if self.pipeline is not None else 1
    if stages > 1:
      counts = [stages * n for n in (2, 4, 8) if stages * n <= self.most]
    counts = [count for count in counts if examples % (shards * count) == 0]
    # A pipeline recomputes its layers, whatever the policy.
    for remat in self.remats if stages == 1 else self.remats[:1]:
      for some in [counts] if stages == 1 else [[count] for count in counts]:
        yield from self._with_trace(plan, remat, some, self.pipeline if stages > 1 else None)

  def _with_trace(
    self, plan: Plan, remat: RematName | Remat, counts: Sequence[int], pipeline: Pipeline | None
  ) -> Iterator[Candidate]:
    if not counts:
      return
    sizes, chip = axis_sizes(plan.mesh), self.machine.chip
    key = remat if pipeline is None else (sizes[pipeline.axis], *counts)
    if key not in self.traces:
      options: Any = {"remat": remat, "layers": self.layers, "pipeline": pipeline}
      try:
        self.traces[key] = trace_step(plan, self.loss, self.batch, microbatches=counts[0], **options)
      except SchemeError:  # fewer layers than stages
        return
    trace = self.traces[key]
    work = workload_of(plan, trace, self.batch, pipeline=pipeline)
    for count in counts:
      memory = round(sum(memory_categories(work, sizes, count).values()))
      time = step_time(work, sizes, chip, microbatches=count, slice_size=self.machine.slice_size)
      fits = _fit(memory, chip.usable_bytes)
      yield Candidate(plan, count, remat, memory, time, fits, pipeline, trace.schedule)

  def compiled(
    self, fitting: list[Candidate], most: int
  ) -> tuple[list[Candidate], Candidate | None, list[str]]:
    """Compiles the first `most` candidates until one is accepted.

    Returns all candidates, rejected candidates last; the winner; and notes.
    """
    text, note = self._compiler()
    if not most or not fitting or text is None:
      return fitting, next(iter(fitting), None), [note] if most and fitting else []
    refused: list[Candidate] = []
    for n, candidate in enumerate(fitting[:most]):
      done = compile_candidate(candidate, self.loss, self.batch, text, self.machine, self.layers)
      if not done.refused and done.report is not None:
        return [done, *fitting[n + 1 :], *refused], done, [*map(_why, refused)]
      refused.append(done)
    rest = fitting[most:]
    best = rest[0] if rest and rest[0].fits == "likely" else None
    more = [f"None of the {len(refused)} compiled layouts fits; the winner was not compiled."] if best else []
    return [*rest, *refused], best, [*map(_why, refused), *more]

  def _compiler(self) -> tuple[str | None, str]:
    """The topology to compile for; None, and the reason, without a compiler."""
    machine, here = self.machine, len(jax.devices("cpu"))
    missing = missing_compiler(machine)
    if missing is None and (machine.chip.platform != "cpu" or machine.devices <= here):
      return machine.text, ""
    if machine.devices <= here:
      return f"cpu:{machine.devices}", ""
    return None, (
      f"The layouts were not compiled: {machine.devices} simulated devices are needed, and this process has"
      f" {here} (JAX_NUM_CPU_DEVICES={machine.devices} JAX_PLATFORMS=cpu)"
      + (f"; {missing.what} {missing.fix}" if missing is not None else ".")
    )


def compile_candidate(
  candidate: Candidate,
  loss: LossFn,
  batch: PyTree,
  topology: str,
  machine: Machine,
  layers: str | None = None,
) -> Candidate:
  """The candidate with the report of its compiled step."""
  step = train_step(
    loss,
    remat=candidate.remat,
    layers=layers,
    microbatches=candidate.microbatches,
    pipeline=candidate.pipeline,
  )
  report = compile_report(step, candidate.plan, batch=batch, topology=topology, chip=machine.chip)
  return dataclasses.replace(candidate, report=report)


def is_offloaded(plan: Plan) -> bool:
  """Whether a plan keeps optimizer state in the host's memory."""
  return any(leaf.on_host for leaf in plan.leaves)


def speed(candidate: Candidate) -> tuple[int, int, float]:
  """Orders by time; times within half a per cent count as equal, and memory decides."""
  step = round(math.log(max(candidate.time.seconds, 1e-12)) / math.log(1 + SAME_TIME))
  return step, candidate.memory_bytes, candidate.time.seconds


def _fit(memory: int, usable: int) -> Fit:
  if memory > usable:
    return "no"
  return "likely" if memory * ERROR_BAND[1] <= usable else "borderline"


def _why(candidate: Candidate) -> str:
  return f"{candidate.mesh_text}, microbatches={candidate.microbatches} is refused: {candidate.refused}."


def _one_of_each_mesh(candidates: Sequence[Candidate]) -> list[Candidate]:
  first: dict[str, Candidate] = {}
  for candidate in candidates:
    first.setdefault(candidate.mesh_text, candidate)
  return list(first.values())


def _cells(candidate: Candidate, fastest: float) -> tuple[str, ...]:
  bubble = candidate.schedule.bubble if candidate.schedule is not None else None
  return (
    candidate.mesh_text + ("" if bubble is None else f" (bubble {100 * bubble:.0f} %)"),
    str(candidate.microbatches),
    str(candidate.remat),
    format_bytes(candidate.memory_bytes),
    candidate.fits,
    f"{candidate.time.seconds / fastest:.2f}",
    candidate.time.binds,
  )


def _compiled(candidate: Candidate) -> tuple[str]:
  return (format_bytes(candidate.report.need_bytes) if candidate.report is not None else "",)


def _as_json(candidate: Candidate, fastest: float) -> dict[str, Any]:
  report, pipeline, schedule = candidate.report, candidate.pipeline, candidate.schedule
  return {
    "mesh": dict(candidate.sizes),
    "microbatches": candidate.microbatches,
    "remat": str(candidate.remat),
    "zero": candidate.plan.zero,
    "offload": is_offloaded(candidate.plan),
    "pipeline": dataclasses.asdict(pipeline) if pipeline is not None else None,
    "bubble": schedule.bubble if schedule is not None else None,
    "memory_bytes": candidate.memory_bytes,
    "fits": candidate.fits,
    "time": candidate.time.seconds / fastest,
    "binds": candidate.time.binds,
    "compiled_bytes": report.need_bytes if report is not None else None,
    "refused": candidate.refused,
  }
