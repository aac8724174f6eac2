"""Where gradients lie until the update: with their parameters, or with the optimizer state (ZeRO-2)."""

from __future__ import annotations

from typing import Literal

from nnx_parallel.errors import TrainError

Gradients = Literal["whole", "scattered"]


def is_scattered(gradients: Gradients | None, stage: int, *, further: bool) -> bool:
  """Whether gradients take the layout of their optimizer state as soon as they exist.

  Args:
    gradients: what `train_step` was told; None: as the plan says.
    stage: the plan's ZeRO stage.
    further: whether some optimizer state is split more than its parameter.

  Returns:
    False also where a stage finds nothing to split: both layouts are then the same.

  Raises:
    TrainError: they are to be scattered, and no stage says over what.

  Example:
    >>> is_scattered(None, 2, further=True), is_scattered("whole", 2, further=True)
    (True, False)
  """
  if gradients == "scattered" and not further and not stage:
    raise TrainError(
      'gradients="scattered" scatters nothing: no optimizer state is split more than its parameter.',
      details="the plan of the optimizer has zero=0",
      fix="nxp.plan(..., zero=2), which a train step follows when gradients= is left out.",
    )
  wanted = stage == 2 if gradients is None else gradients == "scattered"
  return wanted and further
