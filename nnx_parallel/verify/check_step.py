"""Compares one train step on two layouts, leaf by leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import axis_sizes, no_mesh
from nnx_parallel.core.nodes import Path, array_leaves, is_key, path_str, value_of
from nnx_parallel.core.text import Shown, text_table, with_article
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.plan import check_plan
from nnx_parallel.train.options import LossFn
from nnx_parallel.train.step import bind_keywords
from nnx_parallel.verify.check_gradients import LOSS_TOLERANCE, coarsest, subject_of
from nnx_parallel.verify.gradient_check import format_difference, format_mesh

_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
# Rounding flips the sign of small elements, and Adam makes full steps of them: updates may differ by this.
_FLIPPED = {"float64": 1e-4, "float32": 3e-2, "float16": 0.3, "bfloat16": 0.6}
_FLOOR = 0.01
_UNSEEN = 0.5  # with a larger tolerance, a gradient that is twice too large would pass
_ROWS = 12


@dataclasses.dataclass(frozen=True)
class StepDifference:
  """A metric or an array after one step on two layouts.

  Attributes:
    name: the name of the metric, or the dotted path; paths of optimizer state start with `optimizer/`.
    first: the value on the first layout; for an array, its norm.
    second: the same on the second layout.
    difference: for a metric, the difference relative to the first value. For a floating-point array, the norm
      of the difference, relative to the norm of the change that the step made plus a hundredth of the change
      of all arrays of that kind. For integers and random keys, the number of elements that differ.
    tolerance: the largest difference that counts as equal; it includes the rounding of stored values.
    note: why a larger difference is not an error, or why the check cannot decide; empty otherwise.
  """

  name: str
  first: float
  second: float
  difference: float
  tolerance: float
  note: str = ""

  def __bool__(self) -> bool:
    return self.difference <= self.tolerance or bool(self.note)


@dataclasses.dataclass(frozen=True)
class StepCheck(Shown):
  """The result of `check_step`. It prints as a table, and is true if both layouts computed the same.

  Attributes:
    meshes: the two meshes, as text.
    metrics: the metrics of the step.
    leaves: parameters, statistics and optimizer state after the step.
  """

  meshes: tuple[str, str]
  metrics: tuple[StepDifference, ...]
  leaves: tuple[StepDifference, ...]

  def __bool__(self) -> bool:
    return all(self.metrics) and all(self.leaves)

  def raise_if_wrong(self) -> None:
    """Raises an error if the layouts differ.

    Raises:
      TrainError: the layouts differ; the message is the printed table.
    """
    if not self:
      raise nxp.errors.TrainError(
        "one step on the two layouts gives different numbers.",
        details=str(self),
        fix="nxp.check_gradients(model, batch, loss_fn) on each layout shows the wrong one and its fix.",
      )

  def __str__(self) -> str:
    wrong = sorted((row for row in self.leaves if not row), key=lambda row: -row.difference)
    shown = [*self.metrics, *wrong[:_ROWS], *(row for row in self.leaves if row.note)]
    rows: list[tuple[str, ...]] = []
    for row in shown:
      numbers = f"{row.first:.5g}", f"{row.second:.5g}", format_difference(row.difference)
      rows.append((row.name, *numbers, row.note or ("same" if row else "different")))
    header = ("after one step", *self.meshes, "difference", "verdict")
    summary = f"{len(wrong)} of {len(self.leaves)} arrays differ"
    if not wrong:
      equal = [row for row in self.leaves if not row.note]
      tolerance = max((row.tolerance for row in equal), default=0.0)
      summary = f"{len(equal)} of {len(self.leaves)} arrays changed by the same, to {tolerance:.0e}"
    elif len(wrong) > _ROWS:
      summary += f"; {len(wrong) - _ROWS} are not shown"
    return f"{text_table(header, rows, right=(1, 2, 3), wrap=(4,))}\n{summary}"


@check_arguments(TrainError, "other", "loss_fn")
@no_mesh()
def check_step(
  plan: nxp.Plan, other: nxp.Plan | None, loss_fn: LossFn, batch: PyTree, **options: Any
) -> StepCheck:
  """Compares one train step on two layouts: its metrics, and each array after the step.

  It finds errors that a gradient check cannot find: in the value of the loss, batch statistics, metrics and
  optimizer arithmetic. It compares the changes of the step, so a small learning rate hides nothing. The
  memory must hold both models with their optimizers, and also the values that the first model had before the
  step.

  Args:
    plan: a plan with an optimizer; the function creates its model.
    other: another plan of the same module and optimizer, with the same initial values. None compares with one
      device.
    loss_fn: as for `train_step`.
    batch: one host batch.
    **options: arguments of `train_step`, for both layouts, and keyword arguments of the loss function. One
      device sums no gradients of replicas, so `reduction` then applies to the first layout only.

  Returns:
    A `StepCheck`, which is true if both layouts agree within the rounding of the dtypes.

  Raises:
    PlanError: a plan has no optimizer, or the plans are of different modules.
    TrainError: a step cannot use the loss or the batch.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.adam(1e-3))
    >>> loss_fn = lambda model, x: (model(x) ** 2).mean()
    >>> found = nxp.check_step(plan, None, loss_fn, np.ones((8, 8), "float32"))
    >>> bool(found), len(found.leaves)
    (True, 8)
  """
  check_plan(plan, "nxp.check_step(plan, None, loss_fn, batch)")
  second: Any = other
  if not isinstance(second, nxp.Plan | None):
    raise nxp.errors.PlanError(
      f"check_step compares two plans, but the second is {with_article(type(second).__name__)}.",
      fix="nxp.check_step(plan, None, loss_fn, batch) compares with one device.",
    )
  if other is None:
    names = dict.fromkeys(map(str, plan.mesh.axis_names), 1)
    alone = nxp.make_mesh(names, devices=jax.devices()[:1])
    other = nxp.plan(plan.init, alone, plan.rules, optimizer=plan.tx, wrt=plan.wrt)
    other = dataclasses.replace(other, zero=plan.zero)  # for options of the step that need a stage
  if plan.tx is None or other.tx is None:
    raise nxp.errors.PlanError(
      "a plan without an optimizer has no step to check.",
      fix="nxp.plan(init, mesh, rules, optimizer=optax.adamw(1e-3))",
    )
  loss_fn = bind_keywords(loss_fn, options)
  first = nxp.create_sharded_model(plan)
  second = nxp.reshard(first[0], other, optimizer=first[1])
  subject = subject_of(first[0], nxp.shard_batch(batch, plan), loss_fn, plan.wrt)
  with subject.places.active():
    dtype = coarsest(subject.trace, jax.default_backend())
  if options.get("reduction") is not None:
    dtype = max(dtype, jnp.dtype(options["reduction"]).name, key=lambda name: float(jnp.finfo(name).eps))
  step = nxp.train_step(loss_fn, **options)
  if other.mesh.size == 1:
    options.pop("reduction", None)
  again = nxp.train_step(loss_fn, **options)
  before = _values(first)
  one = step(first[0], first[1], nxp.shard_batch(batch, plan))
  two = again(second[0], second[1], nxp.shard_batch(batch, other))
  names = sorted(one, key="loss".__ne__)
  metrics = tuple(_metric(name, one[name], two[name], LOSS_TOLERANCE[dtype]) for name in names)
  meshes = format_mesh(axis_sizes(plan.mesh)), format_mesh(axis_sizes(other.mesh))
  leaves = _compare(plan, before, _values(first), _values(second), dtype)
  return StepCheck(meshes, metrics, tuple(leaves))


_Key = tuple[str, Path]
"""Root and path of an array."""
_Values = dict[_Key, jax.Array]


def _values(objects: tuple[nnx.Pytree, nnx.Pytree]) -> _Values:
  """Every array, without padding, by root and path."""
  found: _Values = {}
  for root, node in zip(("model", "optimizer"), objects, strict=True):
    for path, leaf in array_leaves(node).items():
      value = leaf[...] if hasattr(leaf, "get_value") else value_of(leaf)
      # The data of a key shares its buffer, which a step donates.
      found[root, path] = jnp.copy(jax.random.key_data(value)) if is_key(value.dtype) else value
  return found


@jax.jit
def _sizes(old: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """The norms of two results, of change and difference, and the largest magnitude; integers count as 1."""
  if jnp.issubdtype(a.dtype, jnp.inexact):
    wide = a.dtype if jnp.finfo(a.dtype).bits >= 32 else jnp.dtype("float32")
    old, a, b = (x.astype(wide) for x in (old, a, b))
    changed, off = a - old, a - b
  else:
    a, b, changed, off = (x.astype(jnp.float32) for x in (a, b, a != old, a != b))
  norms = [jnp.sqrt(jnp.sum(abs(x) ** 2)) for x in (a, b, changed, off)]
  return jnp.stack([*norms, jnp.max(abs(a), initial=0.0)])


def _compare(
  plan: nxp.Plan, before: _Values, first: _Values, second: _Values, dtype: str
) -> list[StepDifference]:
  sizes = {
    key: np.asarray(_sizes(before[key], a, jax.device_put(second[key], a.sharding))).tolist()
    for key, a in first.items()
  }
  rows = {(leaf.root, leaf.path): leaf for leaf in plan.leaves}
  trained = {(leaf.root, leaf.path) for leaf in plan.trainable().trained}

  def kind(key: _Key) -> Hashable:
    leaf = rows.get(key)
    inside = len(leaf.parameter) if leaf is not None and leaf.parameter is not None else 0
    return key[0], key[1][: len(key[1]) - inside] if inside else leaf is not None and leaf.kind

  totals: dict[Hashable, float] = {}
  for key, (_, _, change, *_) in sizes.items():
    totals[kind(key)] = math.hypot(totals.get(kind(key), 0.0), change)
  found: dict[_Key, StepDifference] = {}
  # The optimizer's first: it explains the model's.
  for key in sorted(sizes, key=lambda key: key[0] == "model"):
    a, b, change, off, largest = sizes[key]
    name = path_str(key[1]) if key[0] == "model" else f"optimizer/{path_str(key[1])}"
    if not jnp.issubdtype(first[key].dtype, jnp.inexact):
      found[key] = StepDifference(name, a, b, round(off**2), 0.0)
      continue
    scale = change + _FLOOR * totals[kind(key)]
    eps = float(jnp.finfo(first[key].dtype).eps)
    # Two nearly equal results on either side of a rounding boundary are stored one rounding step apart.
    allowed = _TOLERANCE[dtype] * scale
    allowed += math.sqrt(allowed * eps * a) + 2 * eps * largest
    relative, tolerance = (off / scale, allowed / scale) if scale else (float(off), 0.0)
    note = ""
    if relative <= tolerance and key in trained and (not change or tolerance >= _UNSEEN):
      note = f"not decided: no change above the rounding of {first[key].dtype}"
    elif relative > tolerance and key[0] == "model":
      # Adam makes full steps of gradients that are zero but for rounding; its moments show that. A step in
      # the opposite direction differs by 2.
      moments = [k for k, leaf in rows.items() if k[0] == "optimizer" and leaf.parameter == key[1]]
      zero = any(sizes[k][2] < _FLOOR * totals[kind(k)] for k in moments)
      if moments and all(found[k] for k in moments) and relative <= (2 if zero else _FLIPPED[dtype]):
        note = "rounding, which the optimizer magnifies: its own state agrees"
    found[key] = StepDifference(name, a, b, relative, tolerance, note)
  return [found[key] for key in first]


def _metric(name: str, a: AnyArray, b: AnyArray, tolerance: float) -> StepDifference:
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  size = float(np.linalg.norm(a))
  relative = float(np.linalg.norm(a - b)) / (size or 1.0)
  first, second = (float(x) if not x.ndim else float(np.linalg.norm(x)) for x in (a, b))
  return StepDifference(name, first, second, relative, tolerance)
