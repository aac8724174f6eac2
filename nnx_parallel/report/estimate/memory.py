"""The memory plan: bytes per device by category, from the plan and a trace, without a compiler."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.text import Shown, format_bytes, render
from nnx_parallel.core.types import LossFn, PyTree
from nnx_parallel.errors import ReportError
from nnx_parallel.layers.pipeline import Pipeline, Schedule
from nnx_parallel.layers.remat import Policy
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.chips import chip as chip_named
from nnx_parallel.report.estimate.propagate import Product, Sizes
from nnx_parallel.report.estimate.workload import Workload, per_device, trace_workload
from nnx_parallel.train.options import Gradients

CASES = 24
ERROR_BAND = (0.60, 1.51)
"""Smallest and largest compiled need over planned need in `benchmarks/results/report_figures.md`.

This is not a guarantee: all cases are one Llama-shaped model, 16 of them compiled for CPUs. There, compilers
needed 1.09 to 1.50 times the plan; for TPU and GPU with full remat 0.60 to 0.83 times, otherwise 1.09 to 1.46
times.
"""
BAND_TEXT = f"compilers needed {ERROR_BAND[0]:.2f} to {ERROR_BAND[1]:.2f} times the plan"


@dataclasses.dataclass(frozen=True)
class MemoryPlan(Shown):
  """The predicted memory of one step.

  Attributes:
    categories: bytes per device by category, at the peak of the step; their sum is `need_bytes`.
    largest: the largest leaves of the state in device memory: (name, bytes per device).
    host_bytes: the optimizer state in host memory, in bytes per device; `need_bytes` does not include it.
    schedule: the schedule of the pipeline, or None.
    saved_inputs: the number of chunk inputs that each stage of the pipeline saves for the backward pass.
    microbatches: the number of microbatches of the batch.
    remat: the remat policy: which activations the layers save for the backward pass.
    chip: the chip with whose memory the plan is compared, or None.
  """

  categories: Mapping[str, int]
  largest: tuple[tuple[str, int], ...]
  microbatches: int
  remat: Policy
  chip: Chip | None
  host_bytes: int = 0
  schedule: Schedule | None = None
  saved_inputs: int = 0

  @property
  def need_bytes(self) -> int:
    """The bytes that one device needs at the peak of a step."""
    return sum(self.categories.values())

  @property
  def headroom_bytes(self) -> int | None:
    """The usable memory of the chip that is left, in bytes per device; negative if the step does not fit."""
    return None if self.chip is None else self.chip.usable_bytes - self.need_bytes

  def to_json(self) -> str:
    """The plan as JSON."""
    body = dataclasses.asdict(self)
    return json.dumps(body | {"need_bytes": self.need_bytes}, indent=2)

  def __str__(self) -> str:
    whole = max(1, self.need_bytes)
    rows = [(n, format_bytes(b), f"{100 * b / whole:.0f} %") for n, b in self.categories.items() if b]
    rows.append(("total", format_bytes(whole), "100 %"))
    text = render("Planned memory per device, at the peak of a step", ("what", "bytes>", "share>"), rows)
    low, high = (format_bytes(self.need_bytes * edge) for edge in ERROR_BAND)
    text += f"In {CASES} test cases {BAND_TEXT}: here {low} to {high}.\n"
    if self.schedule is not None:
      kept = f"Each stage keeps the inputs of {self.saved_inputs} chunks; layers are recomputed."
      text += f"{self.schedule}. {kept}\n"
      text += "Not counted: buffers of microbatches between stages, and weights on their way to them.\n"
    if self.host_bytes:
      text += f"Host memory: {format_bytes(self.host_bytes)} per device.\n"
    if self.chip is not None and self.headroom_bytes is not None:
      word = "left on" if self.headroom_bytes >= 0 else "over the limit of"
      left = format_bytes(abs(self.headroom_bytes))
      text += f"{left} {word} {self.chip.name}{self.chip.usable_note}.\n"
    largest = [(name, format_bytes(size)) for name, size in self.largest]
    return text + render("Largest arrays of the state, per device", ("array", "bytes>"), largest)


def memory_plan(
  plan: Plan,
  loss: LossFn,
  batch: PyTree,
  *,
  microbatches: int = 1,
  remat: Policy = "as written",
  layers: str | None = None,
  gradients: Gradients | None = None,
  pipeline: str | Pipeline | None = None,
  chip: Chip | str | None = None,
) -> MemoryPlan:
  """Predicts the memory of a train step from an abstract trace of its loss.

  The bytes of the state are exact. The saved activations are read from JAX's linearization of the loss, and
  the size of each array is divided by the sizes of the mesh axes that shard it. A model estimates which
  arrays are in memory at the same time and which arrays the compiler fuses away, so the plan can be off by
  half. Compile the step with `compile_report` before you rely on it.

  Args:
    plan: the plan of the model and the optimizer, on any mesh.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    microbatches: the number of microbatches of the batch.
    remat: the remat policy, as in `train_step`.
    layers: dotted paths of the layers, with `*` for any part; as in `train_step`.
    gradients: the layout of the gradients, as in `train_step`; by default, the ZeRO stage of the plan
      decides.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`; as in `train_step`. The row "kept
      activations" then covers all microbatches in flight, and the row "parameters in compute dtype" covers
      the layers on their stages.
    chip: the chip with whose memory the plan is compared, such as `"v5e"`.

  Returns:
    A `MemoryPlan`; print it, or read its `categories`.

  Raises:
    ReportError: `microbatches` is not positive, the chip is unknown, the batch has no array or does not
      divide, or the pipeline has the order `"1f1b-split"`, which no estimate covers.
    TrainError: there is no such remat policy, no layer for it or for the pipeline, or the gradients cannot be
      scattered.
    SchemeError: the stages of the pipeline do not fit the mesh or the microbatches.

  Example:
    >>> import jax, jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(1024, 1024, use_bias=False, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.abstract_mesh(fsdp=256), nxp.fsdp(), optimizer=optax.adam(1e-3))
    >>> batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    >>> memory_plan(plan, lambda model, x: (model(x) ** 2).mean(), batch).categories["parameters"]
    16384
  """
  check_plan(plan, "memory_plan(plan, loss_fn, batch)")
  if microbatches < 1:
    raise ReportError(f"microbatches={microbatches} is not a positive number.", fix="microbatches=1.")
  work = trace_workload(
    plan, loss, batch, remat=remat, layers=layers, gradients=gradients, pipeline=pipeline,
    microbatches=microbatches,
  )  # fmt: skip
  sizes = axis_sizes(plan.mesh)
  near = (leaf for leaf in plan.leaves if not leaf.on_host)
  leaves = sorted(near, key=lambda leaf: -leaf.bytes_per_device)
  return MemoryPlan(
    categories={k: round(v) for k, v in memory_categories(work, sizes, microbatches).items()},
    largest=tuple((leaf.name, leaf.bytes_per_device) for leaf in leaves[:8]),
    microbatches=microbatches,
    remat=remat,
    chip=chip_named(chip) if chip is not None else None,
    host_bytes=round(per_device(work.on_host, sizes)),
    schedule=work.staged.schedule if work.staged is not None else None,
    saved_inputs=work.staged.saved_inputs if work.staged is not None else 0,
  )


def memory_categories(work: Workload, sizes: Sizes, microbatches: int = 1) -> dict[str, float]:
  """Bytes per device by category, for any sizes of the mesh axes.

  Three moments compete for the peak. At the end of the forward pass, all saved activations are alive with the
  largest activation (the logits), and the last weights are gathered for both passes. While a layer is
  differentiated, the saved inputs of all layers are alive with the layer's recomputed activations, its
  gathered weights, and the gradients so far. At the update, no activation is left, and state in host memory
  passes through the device.
  """
  under_way = 1.0
  if work.staged is not None:
    microbatches = 1  # the trace has all of them
    under_way = work.staged.saved_inputs / work.staged.schedule.ticks
  wide = per_device(work.gradients, sizes)
  accumulators = per_device(work.sums, sizes) if microbatches > 1 else 0.0
  gradients = wide - per_device(work.narrowed, sizes)
  kept = per_device(work.kept, sizes) / microbatches * under_way
  outside = per_device(work.kept_outside, sizes) / microbatches * under_way
  largest, is_logits = _largest(work, sizes)
  layer = per_device(work.layer, sizes) / microbatches
  moments: list[dict[str, float]] = [
    {
      # The gradients of one microbatch, in addition to the sum.
      "gradients": wide if microbatches > 1 else 0.0,
      "kept activations": kept + outside,
      "logits" if is_logits else "largest activation": largest / microbatches,
      "gathered parameters": _gathered_last(work, sizes),
    },
    {
      "gradients": gradients,
      "kept activations": kept,
      "activations of one layer": layer,
      # The weights in use, and the next weights, which are being gathered: a guess.
      "gathered parameters": 2 * _gathered(work, sizes),
    },
    {"gradients": gradients, "optimizer state in transfer": _in_passing(work, sizes)},
  ]
  state = {
    "parameters": per_device(work.parameters, sizes),
    "other model state": per_device(work.other, sizes),
    "optimizer": per_device(work.optimizer, sizes),
    "master weights": per_device(work.masters, sizes),
    "batch": per_device(work.batch, sizes),
    "summed gradients": accumulators,
    # Compilers cast scanned parameters once, before the loop, also where the trace casts each layer's.
    "parameters in compute dtype": max(per_device(work.kept_weights, sizes), per_device(work.casts, sizes)),
  }
  return state | max(moments, key=lambda moment: sum(moment.values()))


def _largest(work: Workload, sizes: Sizes) -> tuple[float, bool]:
  """Bytes of the largest activation, and whether it is the last product with parameters (logits)."""
  largest = max((part.per_device(sizes) for part in work.largest), default=0.0)
  last = _last_product(work)
  if last is None:
    return largest, False
  # The loss may compute in a wider type than the product.
  logits = last.out.per_device(sizes)
  return largest, logits <= largest <= 2 * logits


def _last_product(work: Workload) -> Product | None:
  """The last product with parameters outside loops: a head."""
  return next((p for p in reversed(work.products) if p.weighs and p.times == 1), None)


def _gathered_last(work: Workload, sizes: Sizes) -> float:
  """The head's weights, replicated over the batch axes: gathered once, kept until the backward pass."""
  last = _last_product(work)
  if last is None or not last.other.split.intersection(work.gather_axes):
    return 0.0
  return last.other.gathered(work.gather_axes).per_device(sizes)


def _in_passing(work: Workload, sizes: Sizes) -> float:
  """State on its way between host and device: as a guess, four times the largest kind of leaf."""
  parts = [part.per_device(sizes) for part in work.on_host]
  return min(sum(parts), 4 * max(parts, default=0.0))


def _gathered(work: Workload, sizes: Sizes) -> float:
  """A layer's parameters as they are multiplied: replicated over the batch axes, in the type of their use."""
  return sum(
    part.gathered(work.gather_axes).per_device(sizes)
    for part in work.layer_weights
    if part.split.intersection(work.gather_axes)
  )
