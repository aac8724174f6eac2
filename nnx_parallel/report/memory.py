"""The memory plan: bytes per device by category, from the plan and a trace, without a compiler."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from nnx_parallel.errors import ReportError
from nnx_parallel.layout.mesh import axis_sizes
from nnx_parallel.layout.plan import ShardingPlan
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.chips import chip as chip_named
from nnx_parallel.report.remat import Remat
from nnx_parallel.report.units import format_bytes
from nnx_parallel.report.workload import Part, Sizes, Workload, per_device, trace_workload

ERROR_BAND = (0.5, 1.45)
"""Compiled need over planned need, over the cases of `benchmarks/results/report_figures.md`."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
  """Predicted memory of one step.

  Attributes:
    categories: bytes per device by what they hold; their sum is `need_bytes`.
    largest: the largest leaves of the state: (name, bytes per device).
    microbatches: parts that the batch is run in.
    remat: what layers keep for the backward pass.
    chip: whose memory it is compared with, or None.
  """

  categories: Mapping[str, int]
  largest: tuple[tuple[str, int], ...]
  microbatches: int
  remat: Remat
  chip: Chip | None

  @property
  def need_bytes(self) -> int:
    """Bytes per device."""
    return sum(self.categories.values())

  @property
  def headroom_bytes(self) -> int | None:
    """Usable memory of the chip that is left, in bytes per device; negative when it does not fit."""
    return None if self.chip is None else self.chip.usable_bytes - self.need_bytes

  def to_json(self) -> str:
    """The plan as JSON."""
    body = dataclasses.asdict(self)
    return json.dumps(body | {"need_bytes": self.need_bytes}, indent=2)

  def __str__(self) -> str:
    from nnx_parallel.report.tables import render

    whole = max(1, self.need_bytes)
    rows = [(n, format_bytes(b), f"{100 * b / whole:.0f} %") for n, b in self.categories.items() if b]
    rows.append(("all", format_bytes(whole), "100 %"))
    text = render("Planned memory per device", ("what", "bytes>", "share>"), rows)
    low, high = (format_bytes(self.need_bytes * edge) for edge in ERROR_BAND)
    text += f"Compilers have needed between {low} and {high} where this plan said the same.\n"
    if self.chip is not None and self.headroom_bytes is not None:
      word = "left" if self.headroom_bytes >= 0 else "too much"
      text += f"{format_bytes(abs(self.headroom_bytes))} {word} on {self.chip.name}.\n"
    return text + render(
      "Largest leaves", ("leaf", "bytes>"), [(n, format_bytes(b)) for n, b in self.largest]
    )


def memory_plan(
  plan: ShardingPlan,
  loss: Callable[[Any, Any], Any],
  batch: Any,
  *,
  microbatches: int = 1,
  remat: Remat = "as written",
  chip: Chip | str | None = None,
) -> MemoryPlan:
  """Predicts the memory of a train step from an abstract trace of its loss.

  The state is exact. What the loss keeps is read from JAX's own linearisation and divided by the mesh axes
  that reach each array. Which arrays are alive together, and what the compiler fuses away, is a
  model: see `ERROR_BAND`, and compile with `compile_report` before relying on the last half.

  Args:
    plan: the layout, on any mesh.
    loss: `loss(model, batch)` -> scalar, or (scalar, metrics).
    batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch.
    microbatches: parts that the batch is run in.
    remat: what layers keep; see `with_remat`.
    chip: to compare with.

  Returns:
    The plan; print it, or read its `categories`.

  Raises:
    ReportError: `microbatches` is not positive, or the chip is not in the table.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from flax import nnx
    >>> import nnx_parallel as nxp
    >>> init = lambda: nnx.Linear(1024, 1024, use_bias=False, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.abstract_mesh(fsdp=256), nxp.fsdp(), optimizer=optax.adam(1e-3))
    >>> batch = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    >>> memory_plan(plan, lambda model, x: (model(x) ** 2).mean(), batch).categories["parameters"]
    16384
  """
  if microbatches < 1:
    raise ReportError(f"microbatches={microbatches} is not a positive number.", fix="microbatches=1.")
  work = trace_workload(plan, loss, batch, remat=remat)
  leaves = sorted(plan.leaves, key=lambda leaf: -leaf.bytes_per_device)
  return MemoryPlan(
    categories={k: round(v) for k, v in memory_categories(work, axis_sizes(plan.mesh), microbatches).items()},
    largest=tuple((leaf.name, leaf.bytes_per_device) for leaf in leaves[:8]),
    microbatches=microbatches,
    remat=remat,
    chip=chip_named(chip) if chip is not None else None,
  )


def memory_categories(work: Workload, sizes: Sizes, microbatches: int = 1) -> dict[str, float]:
  """Bytes per device by category, for any sizes of the mesh axes.

  Two moments compete for the peak. At the end of the forward pass, everything kept is alive with the largest
  activation (the logits) and its gradient. While a layer is differentiated, the kept inputs of all
  layers are alive with what that layer recomputes, its gathered weights, and the gradients so far.
  """
  gradients = per_device(work.gradients, sizes)
  inside = per_device(work.kept, sizes) / microbatches
  outside = per_device(work.kept_outside, sizes) / microbatches
  largest = max((p.per_device(sizes) for p in work.largest), default=0.0) / microbatches
  layer = per_device(work.layer, sizes) / microbatches
  weights = per_device(work.kept_weights, sizes)
  gathered = 2 * _gathered(work, sizes)
  head = outside + largest
  body = layer + gathered + (gradients if microbatches == 1 else 0.0)
  at_head = head > body
  return {
    "parameters": per_device(work.parameters, sizes),
    "other model state": per_device(work.other, sizes),
    "optimizer": per_device(work.optimizer, sizes),
    "batch": per_device(work.batch, sizes),
    "gradients": gradients * (2 if microbatches > 1 else 0 if at_head else 1),
    "kept activations": inside + (outside if at_head else 0.0),
    "cast parameters": weights,
    "largest activation" if at_head else "one layer": largest if at_head else layer,
    "gathered parameters": 0.0 if at_head else gathered,
  }


def _gathered(work: Workload, sizes: Sizes) -> float:
  """One layer's parameters as they are multiplied: whole along the batch axes, in the compute type."""
  batch = frozenset(work.batch_axes)
  return sum(
    Part(part.bytes, part.split - batch).per_device(sizes) * work.compute_bytes / 4
    for part in work.layer_weights
    if part.split & batch
  )
