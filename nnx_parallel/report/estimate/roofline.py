"""A step-time model: the largest of the times of arithmetic, memory and links, plus what cannot overlap.

Per device and step, with `m` microbatches:

- compute: matrix FLOPs (forward, twice that for backward, and recomputation) over the chip's peak times the
  chip's `efficiency`;
- memory: operands and results of the products, parameters once per pass and microbatch, and the optimizer's
  reads and writes, over the HBM bandwidth; attention's scores count as if they were written out;
- links, for each mesh axis: ring traffic over the bandwidth of the slowest link that the axis crosses, plus
  `LATENCY` per hop. Gathers and reductions of parameters overlap with compute; sums of activations over a
  tensor axis and exchanges between experts do not, because the next product needs them;
- a pipeline: the compute of its ticks, bubbles and recomputation included, and one microbatch sent to the
  next stage in each tick, which the next tick waits for;
- host: state in host memory is read and written once per step, at the update, where nothing overlaps with it:
  `2 * bytes / host_bandwidth`. This is an upper bound: it assumes one direction at a time.

`seconds = max(compute, memory, overlapped links) + waiting links and host + exposed`, where `exposed` is
`EXPOSED` of the link time that should hide behind a longer term: the first gather and the last sum do not.

Sequence parallelism (activations split over the tensor axis between the products) sends as much as tensor
parallelism: each all-reduce becomes a gather and a scatter of half its bytes. It saves memory.

Error: on 32 published runs of MaxText and TorchTitan, all of them bound by compute, the predicted MFU is 0.84
to 1.19 times the measured MFU, which is no better than one constant for each chip
(`benchmarks/results/step_time.md`). Links and memory are unvalidated. `StepTime.uncounted` lists the
operations of the trace that the model does not count.

Sources: Williams, Waterman and Patterson, "Roofline", CACM 2009; "How to Scale Your Model"
(jax-ml.github.io/scaling-book), chapters 3 and 5; sequence parallel,
arXiv:2205.05198; chip figures as in `chips`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import Shown, Table, not_counted, render
from nnx_parallel.core.types import LossFn, PyTree
from nnx_parallel.layers.pipeline import Pipeline
from nnx_parallel.layers.remat import Policy
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.chips import chip as chip_named
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.estimate.propagate import Product, Sharded, Sizes
from nnx_parallel.report.estimate.workload import StagedWork, Workload, per_device, trace_workload
from nnx_parallel.train.options import Gradients

EXPOSED = 0.1
"""Share of overlapped link time that is not hidden: a guess."""
LATENCY = 1e-6
"""Seconds per hop of a ring: a guess."""


@dataclasses.dataclass(frozen=True)
class StepTime(Shown):
  """The predicted time of one step. Use it to compare layouts, not to predict how long a run takes.

  It prints the shares of the step and no seconds, because compared with published runs, the model is no
  better than a single constant for each chip.

  Attributes:
    compute: the seconds of arithmetic.
    memory: the seconds of HBM traffic.
    overlapped: by mesh axis, the seconds of communication that overlaps with compute.
    waiting: by mesh axis, the seconds of communication for which compute waits; `host` is the link to host
      memory.
    arithmetic: the matrix FLOPs per device, recomputation included, by dtype and precision; see `Chip.peak`.
    model_flops: the matrix FLOPs per device without recomputation.
    peak: the device's peak FLOP per second in the arithmetic of most `model_flops`.
    uncounted: operation -> number of runs, for operations that the model does not count.
  """

  compute: float
  memory: float
  overlapped: Mapping[str, float]
  waiting: Mapping[str, float]
  arithmetic: Mapping[str, float]
  model_flops: float
  peak: float
  uncounted: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

  @property
  def flops(self) -> float:
    """The matrix FLOPs per device, recomputation included."""
    return sum(self.arithmetic.values())

  @property
  def seconds(self) -> float:
    """The predicted seconds of the complete step."""
    return max(self.terms().values()) + sum(self.waiting.values()) + self.exposed

  @property
  def exposed(self) -> float:
    """The seconds of communication that computation does not hide."""
    longest = max(self.terms().values())
    return EXPOSED * sum(seconds for seconds in self.overlapped.values() if seconds < longest)

  @property
  def binds(self) -> str:
    """The term that sets the time (`compute`, `memory`, or the axis that is waited for)."""
    terms = self.terms()
    terms |= {f"{axis} (waiting)": seconds for axis, seconds in self.waiting.items()}
    return max(terms, key=lambda name: terms[name])

  @property
  def mfu(self) -> float:
    """The model FLOP utilisation (`model_flops` divided by the peak FLOPs in the time of the step)."""
    return self.model_flops / (self.peak * self.seconds) if self.seconds else 0.0

  def table(self) -> Table:
    """Returns the shares of the step, and the term that sets its time, as a table."""
    shares = {name: count / (self.flops or 1) for name, count in self.arithmetic.items()}
    mix = ", ".join(f"{100 * share:.0f} % {name}" for name, share in shares.items())
    rows = [(name, share_of(self, seconds), "") for name, seconds in self.terms().items()]
    rows[0] = ("compute", share_of(self, self.compute), mix)
    rows += [(name, share_of(self, seconds), "waited for") for name, seconds in self.waiting.items()]
    rows.append(("exposed communication", share_of(self, self.exposed), ""))
    rows.append(("step", "100 %", f"bound by {self.binds}"))
    return Table("Predicted step", ("what", "share>", ""), rows, not_counted(self.uncounted))

  def __str__(self) -> str:
    return render(*self.table())

  def terms(self) -> dict[str, float]:
    """Returns the seconds of each overlapping term."""
    return {"compute": self.compute, "memory": self.memory, **self.overlapped}


def share_of(time: StepTime, seconds: float) -> str:
  """A part of a step's time, in percent."""
  return f"{100 * seconds / time.seconds if time.seconds else 0:.0f} %"


def predict_time(
  plan: Plan,
  loss: LossFn,
  batch: PyTree,
  *,
  chip: Chip | str,
  microbatches: int = 1,
  remat: Policy = "as written",
  layers: str | None = None,
  gradients: Gradients | None = None,
  pipeline: str | Pipeline | None = None,
  slice_size: int | None = None,
) -> StepTime:
  """Predicts the time of a train step, and the term that sets it, from an abstract trace of its loss.

  Args:
    plan: the plan of the model and the optimizer, on any mesh. The first axes of the mesh count as the
      outermost.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    chip: a `Chip`, or the name of one, such as `"v5p"`.
    microbatches: the number of microbatches of the batch.
    remat: the remat policy, as in `train_step`.
    layers: dotted paths of the layers, with `*` for any part; as in `train_step`.
    gradients: the layout of the gradients, as in `train_step`; by default, the ZeRO stage of the plan
      decides.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`; as in `train_step`.
    slice_size: the number of devices that fast links connect; by default `Chip.domain`, or all devices.

  Returns:
    A `StepTime`, which you can print. The docstring of the module says what the model leaves out.

  Raises:
    ReportError: the chip is unknown, the batch has no array or does not divide, or the pipeline has the
      order `"1f1b-split"`, which no estimate covers.
    TrainError: there is no such remat policy, no layer for it, or the gradients cannot be scattered.

  Example:
    >>> import jax, jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8192, 8192, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.abstract_mesh(fsdp=256), nxp.fsdp(), optimizer=optax.adam(1e-3))
    >>> batch = jax.ShapeDtypeStruct((1 << 22, 8192), jnp.bfloat16)
    >>> time = predict_time(plan, lambda model, x: (model(x) ** 2).mean(), batch, chip="v5p")
    >>> time.binds
    'compute'
  """
  check_plan(plan, "predict_time(plan, loss_fn, batch, chip=...)")
  work = trace_workload(
    plan, loss, batch, remat=remat, layers=layers, gradients=gradients, pipeline=pipeline,
    microbatches=microbatches,
  )  # fmt: skip
  return step_time(
    work, axis_sizes(plan.mesh), chip_named(chip), microbatches=microbatches, slice_size=slice_size
  )


def step_time(
  work: Workload, sizes: Sizes, chip: Chip, *, microbatches: int = 1, slice_size: int | None = None
) -> StepTime:
  """Predicts the time of a train step of `work`; the other arguments as in `Links` and `predict_time`."""
  if work.staged is not None:
    microbatches = 1  # the trace has all of them
  products = work.products if work.staged is None else work.staged.useful
  useful = _flops((*products, *products, *products), sizes)
  flops = _flops((*work.products, *work.products, *work.products, *work.recomputed, *work.update), sizes)
  links = Links(sizes, chip, slice_size)
  _send_parameters(work, links, microbatches)
  _send_activations(work, links, microbatches)
  _send_update(work, links)
  if work.staged is not None:
    _send_between_stages(work.staged, links)
  if work.on_host:
    links.waiting["host"] = 2 * per_device(work.on_host, sizes) / chip.host_bandwidth
  return StepTime(
    compute=arithmetic_seconds(flops, chip),
    memory=_traffic(work, sizes, microbatches) / chip.hbm_bandwidth,
    overlapped=links.overlapped,
    waiting=links.waiting,
    arithmetic=flops,
    model_flops=sum(useful.values()),
    peak=_main_peak(useful, chip),
    uncounted=work.uncounted,
  )


def compiled_time(report: CompileReport) -> StepTime | None:
  """The time of a compiled program by the same model, from its FLOPs, traffic and collectives.

  None without figures for the devices. FLOPs include recomputation, so `mfu` counts it.
  """
  chip, cost = report.chip, report.cost
  if chip is None:
    return None
  links = Links(report.axes, chip)
  for c in report.collectives:
    links.add(c.axes, c.sent_bytes, c.times, hidden=c.overlapped)
  return StepTime(
    compute=arithmetic_seconds(cost.arithmetic, chip),
    memory=cost.hbm_bytes / chip.hbm_bandwidth,
    overlapped=links.overlapped,
    waiting=links.waiting,
    arithmetic=cost.arithmetic,
    model_flops=cost.flops,
    peak=_main_peak(cost.arithmetic, chip),
    uncounted=cost.uncounted,
  )


class Links:
  """The seconds of collectives on the links of a machine, by axes joined with `+`.

  Compute overlaps with some, and waits for others. Fast links join `slice_size` devices: by default the
  chip's domain, or all devices.
  """

  def __init__(self, sizes: Sizes, chip: Chip, slice_size: int | None = None):
    self.sizes, self._chip = sizes, chip
    # The minor axes of a mesh are neighbours: an axis is fast if it and all minor axes fit into a slice.
    self._fast, span = dict[str, bool](), 1
    for axis, size in reversed(tuple(sizes.items())):
      span *= size
      self._fast[axis] = span <= (slice_size or chip.domain or math.prod(sizes.values()))
    self.overlapped: dict[str, float] = {}
    self.waiting: dict[str, float] = {}

  def add(self, axes: Sequence[str], sent: float, runs: float, *, hidden: bool) -> None:
    """Adds `runs` collectives over `axes` in which each device sends `sent` bytes in all."""
    chip, on_links = self._chip, all(self._fast[axis] for axis in axes)
    bandwidth = chip.link_bandwidth * chip.links if on_links else chip.network_bandwidth
    devices = math.prod(self.sizes[axis] for axis in axes)
    # A switch (NVLink) takes one hop to every device; a torus and a network of hosts take more hops.
    per_run = LATENCY * (1 if on_links and chip.platform == "gpu" else math.log2(devices))
    seconds, name = self.overlapped if hidden else self.waiting, "+".join(axes)
    seconds[name] = seconds.get(name, 0.0) + sent / bandwidth + runs * per_run

  def ring(self, axes: Collection[str], part: Sharded, runs: float, *, passes: float, hidden: bool) -> None:
    """Adds `runs` collectives in which `part` goes `passes` times around the ring over axes larger than 1."""
    over = tuple(axis for axis, size in self.sizes.items() if axis in axes and size > 1)
    if over:
      n = math.prod(self.sizes[axis] for axis in over)
      self.add(over, passes * part.per_device(self.sizes) * (n - 1) / n, runs, hidden=hidden)


def _flops(products: Sequence[Product], sizes: Sizes) -> dict[str, float]:
  """FLOPs per device by arithmetic."""
  found: dict[str, float] = {}
  for p in products:
    share = p.flops * p.times / math.prod(sizes.get(a, 1) for a in p.split)
    found[p.arithmetic] = found.get(p.arithmetic, 0.0) + share
  return found


def arithmetic_seconds(flops: Mapping[str, float], chip: Chip) -> float:
  """Seconds of FLOPs by arithmetic."""
  return sum(count / (chip.peak(name) * chip.efficiency) for name, count in flops.items())


def _main_peak(flops: Mapping[str, float], chip: Chip) -> float:
  return chip.peak(max(flops, key=lambda name: flops[name], default="bfloat16"))


def _traffic(work: Workload, sizes: Sizes, microbatches: int) -> float:
  activations = sum(
    p.times * (p.data.per_device(sizes) + p.out.per_device(sizes))
    for p in (*work.products, *work.products, *work.products, *work.recomputed, *work.update)
  )
  if work.staged is None:
    used = sum(part.gathered(work.gather_axes).per_device(sizes) for part in work.used) * microbatches
  else:  # each stage reads its own layers, in each tick
    weighed = (p for p in work.products if p.weighs)
    used = sum(p.times * p.other.gathered(work.gather_axes).per_device(sizes) for p in weighed)
  weights = used * (4 if work.recomputed else 3)
  state = per_device((*work.parameters, *work.optimizer, *work.masters, *work.on_host), sizes)
  return activations + weights + 2 * state + 2 * per_device(work.gradients, sizes)


def _send_parameters(work: Workload, links: Links, microbatches: int) -> None:
  """Gathers of parameters before each pass, scatters of gradients after, sums over replicas at the end."""
  passes = 3 * (microbatches if work.staged is None else work.staged.rounds)
  for part in work.used:
    gathered = part.split & frozenset(work.gather_axes)
    links.ring(gathered, part.gathered(gathered), passes, passes=passes, hidden=True)
  for t in work.trained:
    once, split = t.summed if microbatches > 1 else t.read, t.stored.split
    total, runs = _rounds(work.stage if t.further else 0, microbatches, t.stored.bytes, t.read, once)
    links.ring(frozenset(work.token_axes) - split, Sharded(total, split), runs, passes=1, hidden=True)


def _send_update(work: Workload, links: Links) -> None:
  """The traffic of the optimizer's products: partial sums, gathered operands, exchanged matrices."""
  for part in work.exchanged:
    links.ring(part.split, part, 2, passes=2, hidden=False)
  for p in work.update:
    links.ring(p.summed, p.out, p.times, passes=2 * p.times, hidden=False)
    for move in p.gathers:
      links.ring(move.axes, move.part, move.times, passes=move.times, hidden=False)


def _send_between_stages(staged: StagedWork, links: Links) -> None:
  """Activations to the next stage in each tick, and their gradients back; weights and gradients once."""
  for hop in staged.hops:
    links.add([*hop.axes], 2 * hop.times * hop.part.per_device(links.sizes), 2 * hop.times, hidden=False)
  for move in staged.reordered:
    links.ring(move.axes, move.part, move.times, passes=move.times, hidden=True)
  axes = frozenset(axis for hop in staged.hops for axis in hop.axes)
  for part in staged.copied:
    links.ring(axes, part, 1, passes=2, hidden=True)


def _rounds(stage: int, microbatches: int, stored: int, read: int, once: int) -> tuple[int, int]:
  """Bytes of parameters that go around the ring for their gradients and update, and in how many collectives.

  An all-reduce goes around twice, a reduce-scatter and an all-gather once each. Stage 0: an all-reduce. Stage
  1: a reduce-scatter of the gradient and an all-gather of the updated parameter. Stage 2: a reduce-scatter in
  each microbatch, and the all-gather. TPU programs do this; CPU programs write each reduce-scatter as an
  all-reduce and a slice. `stored` is of the parameters, `read` of the gradients of one microbatch, `once` of
  the gradients that are sent once for all microbatches.
  """
  return {
    0: (2 * once, 1),
    1: (once + stored, 2),
    2: (microbatches * read + stored, microbatches + 1),
  }[stage]


def _send_activations(work: Workload, links: Links, microbatches: int) -> None:
  """Sums of partial products, forward and again when recomputed, of gradients of shared inputs; exchanges."""
  batch, inputs = frozenset(work.batch_axes), set[int]()
  sums = [(p.summed, p.out, p.times) for p in (*work.products, *work.recomputed)]
  for p in work.products:
    if p.source not in inputs:
      inputs.add(p.source)
      sums.append((p.spread, p.data, p.times))
  for axes, part, times in sums:
    links.ring(axes - batch, part, times * microbatches, passes=2 * times, hidden=False)
  for move in work.moves:
    # Each device keeps its own part, and sends it back in the backward pass.
    runs = 2 * move.times
    links.ring(move.axes, move.part, runs * microbatches, passes=runs, hidden=False)
