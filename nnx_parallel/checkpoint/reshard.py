"""Writes a step again in the layout of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx_parallel.checkpoint import encoding, paths
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.plan import ShardingPlan


def reshard(
  source: Checkpointer, destination: Checkpointer, plan: ShardingPlan, step: int | str | None = None
) -> int:
  """Restores a step into a plan's layout and saves it elsewhere, with everything else that it holds.

  Trees beside the model and the optimizer have no plan; they are copied through host memory.

  Args:
    source: verifies what it reads.
    destination: another directory.
    plan: of the model, and of the optimizer when the step has one.
    step: a number, `"latest"` (also None) or `"best"`.

  Returns:
    The step's number.

  Raises:
    CheckpointError: both are the same directory, or the step does not fit the plan.
  """
  if source.directory == destination.directory:
    raise CheckpointError(
      f"cannot reshard {source.directory} into itself.", fix="write to another directory."
    )
  record = source.metadata(step)
  restored = source.restore(plan, record.step)
  model, optimizer = restored if isinstance(restored, tuple) else (restored, None)
  extra: dict[str, object] = {name: encoding.read_json(value) for name, value in record.extra.items()}
  others = [name for name in record.items if name not in ("model", "optimizer")]
  extra |= {name: _nested(source.restore_extra(name, step=record.step, as_numpy=True)) for name in others}
  destination.save(record.step, model, optimizer, extra=extra, metrics=record.metrics, plan=plan)
  return record.step


def _nested(leaves: Mapping[str, object]) -> dict[Any, Any]:
  """A nested dict that has the same paths."""
  tree: dict[Any, Any] = {}
  for text, leaf in leaves.items():
    *parents, last = paths.split(text)
    branch = tree
    for part in parents:
      branch = branch.setdefault(part, {})
    branch[last] = leaf
  return tree
