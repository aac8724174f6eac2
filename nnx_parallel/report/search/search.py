"""Ranks every mesh, and every way to run the step on it, by predicted memory and time.

Tried are all factorisations of the devices into the axes that the model can use, an axis for experts and
split sequences where the model has names for them, pipelines where asked for, microbatches, remat policies,
ZeRO stages, and optimizer state in the host's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import optax
from flax import nnx

from nnx_parallel.core.axes import axes_by_dim
from nnx_parallel.core.mesh import abstract_mesh
from nnx_parallel.core.text import format_bytes
from nnx_parallel.errors import NnxParallelError, ReportError
from nnx_parallel.layers.layers import MARK_LAYERS, Remat, RematName
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.planning import plan as make_plan
from nnx_parallel.report.compile_report import CompileReport, compile_report
from nnx_parallel.report.estimate.memory import ERROR_BAND, memory_categories
from nnx_parallel.report.estimate.roofline import StepTime, program_time, step_time
from nnx_parallel.report.estimate.workload import batch_structs, parameter_parts, with_offload, with_zero
from nnx_parallel.report.search.space import (
  RuleVariant,
  Sizes,
  mesh_text,
  rule_variants,
  searched_axes,
  stage_variants,
)
from nnx_parallel.report.tables import not_counted, results_text
from nnx_parallel.report.topology import Machine, missing_compiler, read_machine
from nnx_parallel.rules.ruleset import Rules, RuleSet
from nnx_parallel.train.step import train_step

SAME_TIME = 0.005
"""Relative difference of predicted times below which less memory decides."""
Fit = Literal["likely", "borderline", "no"]
_SAME_MEMORY = 0.005  # a ZeRO stage that saves less is dropped


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run the step.

  Attributes:
    sizes: mesh axis -> size.
    microbatches: parts that the batch is run in.
    remat: what layers keep; see `with_layers`.
    zero: ZeRO stage of the optimizer's state (1) and of the gradients too (2); see `plan`.
    offload: whether the optimizer's state is in host memory between steps.
    changes: logical name -> axes, where the rules differ from the user's: split sequences, experts.
    memory_bytes: predicted need of one device.
    time: predicted time of the step.
    fits: `"likely"` if the largest need that a compiler had for such a prediction fits too (`ERROR_BAND`, of
      one model's test cases), `"borderline"` if only the prediction does, else `"no"`.
    report: the compiler's figures, where this candidate was compiled.
    compiled: the time of the compiled program, by its own FLOPs and collectives; see `program_time`.
    pipeline: the pipeline over the layers, or None.
    schedule: that of the pipeline: its stages, ticks and bubble.
    idle: axes of size 1 that neither the model nor the rules need.
  """

  sizes: Mapping[str, int]
  microbatches: int
  remat: RematName | Remat
  zero: int
  offload: bool
  changes: Mapping[str, tuple[str, ...]]
  memory_bytes: int
  time: StepTime
  fits: Fit
  report: CompileReport | None = None
  compiled: StepTime | None = None
  pipeline: Pipeline | None = None
  schedule: Schedule | None = None
  idle: frozenset[str] = frozenset()

  @property
  def mesh_text(self) -> str:
    """The axes that the model or the rules need, as arguments of `make_mesh`."""
    return mesh_text(self.sizes, self.idle)

  @property
  def refused(self) -> str:
    """Why the compiled program must not run: wrong results, or too little memory; else an empty string."""
    if self.report is None:
      return ""
    if self.report.faults:
      return f"as compiled, {results_text(self.report.results)}"
    return "" if self.report.fits else f"the compiler needs {format_bytes(self.report.need_bytes)}"


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """Every candidate, ranked.

  Attributes:
    machine: what was searched for.
    fitting: candidates that fit by the memory plan: those that likely do, then borderline ones, each
      fastest first; times within `SAME_TIME` count as equal, and the smaller one comes first. Compiled ones
      come before the others.
    too_large: candidates that do not, smallest first.
    refused: reason -> number of mesh factorisations that it ruled out.
    best: the winner: the first of `fitting`, or with `compile_best` the fastest that compiled, fits
      and has no wrong result; None when there is none.
    notes: axes that split nothing, the notes of the winner's plan, compilers that are not installed,
      operations that were not counted.
    layers: dotted paths of the layers, where they were given.
    idle: axes of size 1 that the winner's code leaves out.
  """

  machine: Machine
  fitting: tuple[Candidate, ...]
  too_large: tuple[Candidate, ...]
  refused: Mapping[str, int]
  best: Candidate | None
  notes: tuple[str, ...] = ()
  layers: str | None = None
  idle: frozenset[str] = frozenset()

  def pareto(self) -> tuple[Candidate, ...]:
    """Candidates that no other one beats in both predicted memory and predicted time, fastest first.

    Times within `SAME_TIME` count as equal. What was refused as compiled is left out.
    """
    front: list[Candidate] = []
    for candidate in sorted((c for c in self.fitting if not c.refused), key=speed):
      if not front or candidate.memory_bytes < front[-1].memory_bytes:
        front.append(candidate)
    return tuple(front)

  def code(self) -> str:
    """The winner as code to paste.

    Raises:
      ReportError: nothing fits, or no compiled program that fits computes the right results.
    """
    if self.best is None and any(c.report is not None and c.report.faults for c in self.fitting):
      raise ReportError(
        f"no layout that was compiled for {self.machine.text} fits and computes the right results.",
        details="\n".join(self.notes),
        fix='constrain that value to one layout, nxp.constrain(x, "batch", ...), and search again; or'
        " compile more layouts: search(..., compile_best=8).",
      )
    if self.best is None:
      raise ReportError(f"no layout fits on {self.machine.text}.", fix="more devices, or a smaller batch.")
    from nnx_parallel.report.search.text import winner_code

    return winner_code(self.best, self.layers, self.idle)

  def to_json(self) -> str:
    """The winner, the Pareto front and the counts as JSON."""
    body = {
      "topology": self.machine.text,
      "fitting": len(self.fitting),
      "too_large": len(self.too_large),
      "refused": dict(self.refused),
      "best": _row(self.best) if self.best else None,
      "pareto": [_row(candidate) for candidate in self.pareto()],
      "compiled": [_row(candidate) for candidate in self.fitting if candidate.report is not None],
      "notes": list(self.notes),
    }
    return json.dumps(body, indent=2)

  def __str__(self) -> str:
    from nnx_parallel.report.search.text import search_text

    return search_text(self)

  def to_html(self) -> str:
    """One self-contained HTML page."""
    from nnx_parallel.report.html import search_page

    return search_page(self)

  def _repr_html_(self) -> str:
    from nnx_parallel.report.html import notebook_frame

    return notebook_frame(self.to_html())


@dataclasses.dataclass(frozen=True)
class SearchInputs:
  """The arguments of `search` that a compilation needs."""

  init: Callable[[], Any]
  loss: Callable[[Any, Any], Any]
  rules: Any
  optimizer: optax.GradientTransformation | None
  batch: Any
  machine: Machine
  layers: str | None = None


def search(
  init: Callable[[], nnx.Module],
  loss: Callable[[Any, Any], Any],
  topology: str,
  *,
  batch: Any,
  rules: Rules,
  optimizer: optax.GradientTransformation | None = None,
  remat: RematName | Remat | Sequence[RematName | Remat] = ("none", "dots", "full"),
  layers: str | None = None,
  zero: int | Sequence[int] = (0, 1, 2),
  offload: bool | Sequence[bool] = (False, True),
  max_microbatches: int = 64,
  pipeline: str | None = None,
  compile_best: int = 0,
) -> SearchResult:
  """Ranks every way to run a step on a machine, by a model of its memory and time.

  Args:
    init: builds the module.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    topology: the machine, e.g. `"tpu:v5p:4x4x8"`; its compiler is needed only by `compile_best`.
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    rules: as for `plan`; the axes that they name are the axes searched over. Where they replicate `sequence`
      or `expert` (see `search/space.py`), splitting it is tried too.
    optimizer: its state is counted.
    remat: the word or `Remat` of one, or those to try; see `with_layers`. Where the loss has no layers that
      they apply to, it is run as written, with a line in `notes`.
    layers: dotted paths of the layers, with `*` for any part; as in `train_step`.
    zero: the ZeRO stage, or those to try, where they split something further; see `plan`. Stage 3 is an
      `fsdp` axis of the rules.
    offload: whether the optimizer's state is in host memory; both are tried by default.
    max_microbatches: largest number of parts of the batch to try; powers of two.
    pipeline: also try pipelines over a mesh axis of this name, with all numbers of stages, as in
      `train_step(pipeline=...)`; each needs a trace of its own. Those of stacked layers have the layers split
      over it, where they are named `layers` and the rules replicate that name. Not tried together with split
      sequences or experts.
    compile_best: how many of the fastest to compile for simulated CPU devices, where this process has
      enough of them, borderline ones included; they are then ordered by what was compiled. The
      first of these that the machine's own compiler accepts wins, where that is installed; `notes` lists what
      was not. A layout that does not fit, or with a result that the compiler gets wrong (`report.faults`),
      comes behind the others and does not win.

  Returns:
    Every candidate, ranked; print it.

  Raises:
    ReportError: the topology, a policy or a stage is unknown, `max_microbatches` is not positive, or the
      rules name no axis.
    TrainError: `layers` matches no module, or a pipeline finds no consecutive equal layers.

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
  if max_microbatches < 1:
    raise ReportError(
      f"max_microbatches={max_microbatches} leaves nothing to try: a batch is run in one part at least.",
      fix="max_microbatches=1 for whole batches only.",
    )
  given: Any = (remat,) if isinstance(remat, str | Remat) or callable(remat) else remat
  unnamed = [known for known in given if callable(known.policy if isinstance(known, Remat) else known)]
  if unnamed:
    raise ReportError(
      f"remat={unnamed[0]!r} has no name to print.", fix='remat=("none", "full", nxp.Remat("full", every=2))'
    )
  remats: tuple[RematName | Remat, ...] = tuple(given)
  stages = (zero,) if isinstance(zero, int) else tuple(zero)
  places = (offload,) if isinstance(offload, bool) else tuple(offload)
  strange = [stage for stage in stages if stage not in (0, 1, 2)]
  if strange:
    raise ReportError(
      f"zero={strange[0]!r} is not a stage to search over.",
      fix="zero=(0, 1, 2); stage 3 is the rule fsdp(), and is searched as a mesh axis.",
    )
  if compile_best and optimizer is None:
    raise ReportError(
      "a train step cannot be compiled without an optimizer.",
      details=f"compile_best={compile_best}",
      fix="search(..., optimizer=optax.adamw(1e-3), compile_best=...).",
    )
  target, batch = read_machine(topology), batch_structs(batch)
  refused: dict[str, int] = {}
  found: list[Candidate] = []
  tried = rule_variants(init, loss, rules, optimizer, batch, remats, layers)
  if pipeline is not None:
    tried += stage_variants(
      init, loss, rules, optimizer, batch, tried[0], pipeline, target.devices, max_microbatches, layers
    )
  for variant in tried:
    for sizes in variant.meshes(target.devices):
      whole = {**dict.fromkeys(variant.idle, 1), **sizes}
      if any(whole[axis] == 1 for axis in variant.needed):
        continue  # the same as without the changes
      reason = variant.refuse(whole, batch)
      if reason:
        refused[reason] = refused.get(reason, 0) + 1
        continue
      found += _candidates(variant, whole, target, batch, stages, places, max_microbatches)
  fitting = sorted((c for c in found if c.fits != "no"), key=lambda c: (c.fits != "likely", speed(c)))
  too_large = sorted((c for c in found if c.fits == "no"), key=lambda c: c.memory_bytes)
  inputs = SearchInputs(init, loss, rules, optimizer, batch, target, layers)
  idle = _unneeded(inputs, tried[0].idle)
  fitting, too_large = ([dataclasses.replace(c, idle=idle) for c in some] for some in (fitting, too_large))
  best = fitting[0] if fitting else None
  notes = tuple(
    f"The axis {axis!r} splits nothing of this model{'' if axis in idle else ': 1'}."
    for axis in tried[0].idle
  )
  if set(remats) - set(tried[0].workloads):
    notes += (f"No remat policy was tried, since none finds a layer in the loss. Fix: {MARK_LAYERS}.",)
  missed = not_counted(tried[0].work.uncounted)
  notes += (missed.rstrip(),) if missed else ()
  if compile_best and optimizer is not None:
    chosen = sorted(fitting, key=speed)[:compile_best]
    fitting, best, more = compile_first(inputs, chosen, [c for c in fitting if c not in chosen])
    notes += more
  if best is not None:
    layout, idle = _planned(inputs, best)
    notes += tuple(f"note of the winner's plan: {note}" for note in layout.notes)
  return SearchResult(target, tuple(fitting), tuple(too_large), refused, best, notes, layers, idle)


def _unneeded(inputs: SearchInputs, axes: Sequence[str]) -> frozenset[str]:
  """Those of some axes which split nothing that the rules do not demand."""
  rules, found = RuleSet.of(inputs.rules), list[str]()
  for axis in axes:
    others = [other for other in searched_axes(rules) if other not in (*found, axis)]
    with contextlib.suppress(NnxParallelError):
      if others:
        make_plan(inputs.init, abstract_mesh(dict.fromkeys(others, 2)), rules, uneven="replicate")
        found.append(axis)
  return frozenset(found)


def _planned(inputs: SearchInputs, candidate: Candidate) -> tuple[Plan, frozenset[str]]:
  """The plan of a candidate, on the fewest axes that give the same layout, and the axes left out."""
  sizes = dict(candidate.sizes)
  full = _layout(inputs, candidate, sizes)
  ones = frozenset(axis for axis, size in sizes.items() if size == 1)
  for idle in dict.fromkeys((ones, *(frozenset({axis}) for axis in sorted(ones)), candidate.idle)):
    kept = {axis: size for axis, size in sizes.items() if axis not in idle}
    if not idle or not kept:
      continue
    try:
      fewer = _layout(inputs, candidate, kept)
    except NnxParallelError:
      continue
    if _splits(fewer, sizes) == _splits(full, sizes):
      return fewer, idle
  return full, frozenset()


def _splits(layout: Plan, sizes: Mapping[str, int]) -> list[Any]:
  """The axes of the batch and of each leaf's dims that split something."""
  found = (axes_by_dim(leaf.spec, len(leaf.shape)) for leaf in layout.leaves)
  specs = [(tuple(layout.batch_axes),), *found]
  return [[tuple(axis for axis in dim if sizes[axis] > 1) for dim in spec] for spec in specs]


def _layout(inputs: SearchInputs, candidate: Candidate, sizes: Mapping[str, int]) -> Plan:
  rules = RuleSet.of(inputs.rules)
  rules = rules.replace(candidate.changes) if candidate.changes else rules
  place: dict[str, Any] = {"optimizer_memory": "pinned_host"} if candidate.offload else {}
  return make_plan(
    inputs.init, abstract_mesh(dict(sizes)), rules, optimizer=inputs.optimizer, zero=candidate.zero, **place
  )


def _candidates(
  variant: RuleVariant,
  sizes: Sizes,
  target: Machine,
  batch: Any,
  stages: Sequence[int],
  offload: Sequence[bool],
  most: int,
) -> Iterator[Candidate]:
  parts = math.prod(sizes.get(axis, 1) for axis in variant.work.batch_axes)
  examples = min((x.shape[0] for x in jax.tree.leaves(batch) if x.shape), default=1)
  powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
  tried = powers if variant.schedule is None else [variant.schedule.microbatches]
  counts = [count for count in tried if examples % (parts * count) == 0]
  least: dict[tuple[RematName | Remat, bool, int], float] = {}
  for (remat, traced), stage, offloaded in itertools.product(
    variant.workloads.items(), sorted(stages), offload
  ):
    placed = with_zero(traced, sizes, stage)
    work = with_offload(placed) if offloaded else placed
    if placed.stage != stage or (offloaded and work is placed):
      continue  # nothing is left to split, or to move: the same as without
    for count in counts:
      memory = round(sum(memory_categories(work, sizes, count).values()))
      key = (remat, offloaded, count)
      if stage and memory > (1 - _SAME_MEMORY) * least.get(key, math.inf):
        continue
      least[key] = memory
      time = step_time(work, sizes, target.chip, microbatches=count, slice_size=target.slice_size)
      fits = _fit(memory, target.chip.usable_bytes)
      how = sizes, count, remat, stage, offloaded, variant.changes
      yield Candidate(*how, memory, time, fits, pipeline=variant.pipeline, schedule=variant.schedule)


def _fit(memory: int, usable: int) -> Fit:
  if memory > usable:
    return "no"
  return "likely" if memory * ERROR_BAND[1] <= usable else "borderline"


def compile_candidate(inputs: SearchInputs, candidate: Candidate, topology: str) -> Candidate:
  """The candidate with the report of its compiled step, and its time by that."""
  layout = _layout(inputs, candidate, candidate.sizes)
  step = train_step(
    inputs.loss,
    remat=candidate.remat,
    layers=inputs.layers,
    microbatches=candidate.microbatches,
    pipeline=candidate.pipeline,
  )
  report = compile_report(
    step, layout, batch=inputs.batch, topology=topology, chip=inputs.machine.chip, verify=True
  )
  batch_axes = set(layout.batch_axes)
  splitting = {axis for part in parameter_parts(layout) for axis in part.split}
  time = program_time(report, candidate.time, inputs.machine, batch_axes & splitting)
  return dataclasses.replace(candidate, report=report, compiled=time)


def compile_first(
  inputs: SearchInputs, chosen: Sequence[Candidate], others: Sequence[Candidate]
) -> tuple[list[Candidate], Candidate | None, tuple[str, ...]]:
  """Compiles candidates for simulated devices, orders them by that, and has the first checked.

  Where the compiler of the machine is installed, it decides whether a candidate fits and computes the right
  results. Where none of the chosen ones fits, the first of the others wins if it likely fits; but not where a
  compiled one computes wrong results, because the others may too.

  Returns:
    All candidates, the compiled ones first, of these the refused ones last; the winner; and notes for
    the reader.
  """
  notes: list[str] = []
  target, here = inputs.machine, len(jax.devices("cpu"))
  done = list(chosen)
  if target.devices <= here:
    text = f"cpu:{target.devices}"
    done = sorted(
      (compile_candidate(inputs, c, text) for c in done),
      key=lambda c: (bool(c.refused), c.compiled.seconds if c.compiled else math.inf),
    )
  elif target.chip.platform != "cpu":
    notes.append(
      f"Not compiled for simulated devices: {target.devices} are needed, and this process has {here}."
      f" Start it with JAX_NUM_CPU_DEVICES={target.devices} JAX_PLATFORMS=cpu."
    )
  best = next((c for c in done if not c.refused), None)
  if target.chip.platform != "cpu" and best is not None:
    missing = missing_compiler(target)
    if missing is None:
      best = _checked(inputs, done, notes)
      done.sort(key=lambda c: bool(c.refused))
    else:
      notes.append(f"Not compiled for {target.text}: {missing}")
  wrong = [(c, c.report.faults) for c in done if c.report is not None and c.report.faults]
  notes += [f"{c.mesh_text}, microbatches={c.microbatches} is refused: {faults[0]}." for c, faults in wrong]
  if best is None and not wrong and others and others[0].fits == "likely":
    best = others[0]
    notes.append(f"None of the {len(done)} compiled layouts fits; the winner was not compiled.")
  return [*done, *others], best, tuple(notes)


def _checked(inputs: SearchInputs, done: list[Candidate], notes: list[str]) -> Candidate | None:
  """The first candidate that the machine's own compiler accepts; those that it compiles are replaced."""
  for n, candidate in enumerate(done):
    if candidate.refused:
      continue
    done[n] = compile_candidate(inputs, candidate, inputs.machine.text)
    report = done[n].report
    if report is not None and not done[n].refused:
      notes.append(
        f"The winner was compiled for {inputs.machine.text}: it fits, {results_text(report.results)}."
      )
      return done[n]
  return None


def speed(candidate: Candidate) -> tuple[int, int, float]:
  """Orders by time; times within half a per cent count as equal, and memory decides."""
  step = round(math.log(max(candidate.time.seconds, 1e-12)) / math.log(1 + SAME_TIME))
  return step, candidate.memory_bytes, candidate.time.seconds


def _row(candidate: Candidate) -> dict[str, Any]:
  results = candidate.report.results if candidate.report else None
  return {
    "mesh": dict(candidate.sizes),
    "microbatches": candidate.microbatches,
    "remat": str(candidate.remat),
    "zero": candidate.zero,
    "offload": candidate.offload,
    "rules": {name: list(axes) for name, axes in candidate.changes.items()},
    "pipeline": dataclasses.asdict(candidate.pipeline) if candidate.pipeline is not None else None,
    "bubble": candidate.schedule.bubble if candidate.schedule is not None else None,
    "memory_bytes": candidate.memory_bytes,
    "fits": candidate.fits,
    "seconds": candidate.time.seconds,
    "mfu": candidate.time.mfu,
    "binds": candidate.time.binds,
    "compiled_bytes": candidate.report.need_bytes if candidate.report else None,
    "compiled_seconds": candidate.compiled.seconds if candidate.compiled else None,
    "refused": candidate.refused,
    "faults": [str(fault) for fault in results.faults] if results else None,
    "not_checked": dict(results.unknown) if results else None,
  }
