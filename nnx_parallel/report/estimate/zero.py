"""What a ZeRO stage, and offload, change in a workload: where the optimizer's state and the gradients are.

Stage 3, which splits the parameters too, is an axis of the rules (`fsdp`), not a stage here.
Source: ZeRO, arXiv:1910.02054.
"""

from __future__ import annotations

import dataclasses

from nnx_parallel.core.axes import axes_of
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.report.estimate.workload import Leaf, Part, Sizes, Workload


def with_zero(work: Workload, sizes: Sizes, stage: int) -> Workload:
  """The same step with the optimizer's state split over the batch axes too, as `plan(..., zero=stage)` does.

  Args:
    work: a step of stage 0.
    sizes: mesh axis -> size in devices; an array is split only where one of its dims divides.
    stage: 0, 1 (state), or 2 (state and gradients).

  Returns:
    The workload for these sizes; `work` itself where the stage splits nothing further.
  """
  if not stage:
    return work
  optimizer = tuple(_spread(leaf, work.batch_axes, sizes) for leaf in work.optimizer_leaves)
  if all(part.split == leaf.part.split for part, leaf in zip(optimizer, work.optimizer_leaves, strict=True)):
    return work
  return dataclasses.replace(
    work,
    stage=stage,
    optimizer=optimizer,
    scattered=stage == 2,
    narrowed=() if stage == 2 else work.narrowed,
    trained=tuple(
      dataclasses.replace(t, further=_spread(t.leaf, work.batch_axes, sizes).split - t.leaf.part.split)
      for t in work.trained
    ),
  )


def with_offload(work: Workload) -> Workload:
  """The same step with the state of parameters in the host's memory, as `plan(optimizer_memory=...)` does.

  Args:
    work: a step, after `with_zero`: what a stage splits further is also less to fetch.

  Returns:
    The workload; `work` itself where there is no such state.
  """
  moved = dataclasses.replace(work, offload=True)
  return moved if len(moved.host_state()) > len(work.host_state()) else work


def _spread(leaf: Leaf, axes: tuple[str, ...], sizes: Sizes) -> Part:
  if not leaf.spreads:
    return leaf.part
  spec, _ = optimizer_layout.add_zero_axes(leaf.spec, leaf.shape, axes, sizes)
  split = {axis for entry in spec for axis in axes_of(entry)}
  return Part(leaf.part.bytes, frozenset(split))
