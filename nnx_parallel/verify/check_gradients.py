"""Checks, on the layout in question, that the gradients of a loss are its derivatives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.core.mesh import axis_sizes, own_mesh
from nnx_parallel.core.text import few, number_pattern, with_article
from nnx_parallel.core.types import AnyArray, Model, Program, PyTree, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.gather import Gather
from nnx_parallel.train.axes import shardings_of_loss
from nnx_parallel.train.binding import Binding
from nnx_parallel.train.gradients import StepLayout, batch_axes_of
from nnx_parallel.train.losses import check_examples
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.watch import objects_in
from nnx_parallel.verify.gradient_check import GradientCheck, GradientComparison
from nnx_parallel.verify.subject import Subject

# benchmarks/results/check_gradients.json: how right gradients round.
_TOLERANCE = {"float64": 1e-7, "float32": 3e-3, "float16": 3e-2, "bfloat16": 0.15}
# A gradient below this part of the total norm may be zero but for rounding (of a bias before a norm).
_FLOOR = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}
LOSS_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
DIRECTIONS = range(1, 2**16)
"""How many directions a check may have: a seed has 2**16 numbers."""


@check_arguments(TrainError, "model", "loss_fn", directions=DIRECTIONS)
def check_gradients(
  model: Model,
  batch: PyTree,
  loss_fn: LossFn,
  *,
  wrt: nnx.filterlib.Filter = nnx.Param,
  seed: int = 0,
  directions: int | None = None,
  **constants: Hashable,
) -> GradientCheck:
  """Checks the gradients of a loss, compiled for the layout of a live model, against forward mode.

  For some layouts the program that XLA partitions is silently wrong: for example, the loss is right, but the
  gradient of a leaf is half the correct value. This function works on the mesh and at full size. It draws
  random directions of +1 and -1, and compares the product of the gradient with each direction with the
  derivative of the loss along it in forward mode, for each group of equal layers, and where the two differ,
  for each leaf of the group. That is a forward derivative, about twice a loss, for each group and direction.
  The model does not change, and is not copied.

  The gradient is that of a `jax.jit` of your own, without `train_step`. Forward mode gathers the parameters
  where the loss reads them (`nxp.parallel.gather_on_read`), so that the layout cannot make it wrong too. To
  check the program of a step, call `step.check_gradients`.

  It can miss an error that is, by chance, nearly orthogonal to the directions, or that only a few of many
  equal layers have, in bfloat16. Gradients below 1e-4 (in bfloat16 2e-2) of the total norm are measured
  against that, since they may be zero except for rounding. Rules of `jax.custom_jvp` are not checked, and
  neither are rules of `jax.custom_vjp` whose function rounds.

  Args:
    model: a live module; or a tuple or dict of modules, which is passed to the loss function as it is.
    batch: one placed batch.
    loss_fn: as for `train_step`.
    wrt: a filter for the Variables to differentiate.
    seed: the seed of the directions.
    directions: the number of directions; by default 2, or 4 if the loss computes in less than float32.
    **constants: keyword arguments of the loss function, as in a call of a step.

  Returns:
    A `GradientCheck`, which is true if nothing is wrong.

  Raises:
    TrainError: a step cannot use the loss, the batch or the module.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
    >>> model = nxp.create_sharded_model(plan)
    >>> batch = nxp.shard_batch(jnp.ones((16, 8)), plan)
    >>> bool(nxp.check_gradients(model, batch, lambda model, x: (model(x) ** 2).mean()))
    True
  """
  if not all(isinstance(item, nnx.Pytree) for item in objects_in(model)):
    raise TrainError(
      f"check_gradients needs live models, and got {with_article(type(model).__name__)}.",
      fix="nxp.check_gradients(model, batch, loss_fn), in this order, with nxp.create_sharded_model(plan).",
    )
  loss: Any = StepOptions(loss_fn).with_constants(constants).loss_fn
  check_arrays(TrainError, "batch", batch)
  return check_subject(subject_of(model, batch, loss, wrt), seed, directions)


def subject_of(model: Model, batch: PyTree, loss_fn: LossFn, wrt: nnx.filterlib.Filter) -> Subject:
  """A loss to check that `jax.grad` differentiates in a separate jit."""
  if isinstance(loss_fn, Mapping):
    raise TrainError(
      "a check takes one loss function.", fix="step.check_gradients(models, optimizers, batch), for several."
    )
  binding, options = Binding({"model": model}), StepOptions(loss_fn)
  with own_mesh(binding.mesh):
    places = shardings_of_loss(binding, loss_fn, batch, options)
    batch = places.place(batch)
    pairs = zip(binding.template.paths, places.shardings, strict=True)
    reference = Gather.of({path[1:]: where for path, where in pairs}, batch_axes_of(batch), places.mesh)
    return Subject(
      options, loss_fn, binding, batch, {None: wrt}, StepLayout(places.mesh, {}), places, reference
    )


class Looks:
  """Compares the derivatives of a subject, for any set of its leaves."""

  def __init__(self, subject: Subject, seed: int = 0, directions: int | None = None):
    self.subject = subject
    self.arrays = subject.arrays
    self.dtype = coarsest(subject.trace, jax.default_backend())
    count = directions or (2 if jnp.finfo(self.dtype).bits >= 32 else 4)
    self.seeds = [np.uint32((seed * 2**16 + n) % 2**32) for n in range(count)]
    self.tolerance = _TOLERANCE[self.dtype]
    loss, rows = subject.reverse(self.arrays, subject.batch, np.array(self.seeds))
    self.loss, rows = float(loss), np.asarray(rows, np.float64)
    self.norms, self.products = rows[0], rows[1:]
    self.total = math.hypot(*self.norms[np.isfinite(self.norms)]) or abs(self.loss) or 1.0
    self.floor = _FLOOR[self.dtype] * self.total
    self.loss_forward, self.cannot = math.nan, ""
    try:
      subject.forward.trace(self.arrays, subject.batch, self.seeds[0], np.zeros_like(self.norms, np.float32))
    except (TypeError, ValueError, NotImplementedError) as error:
      # The reverse program was traced before, so this is about forward mode.
      self.cannot = str(error).split("\n")[0]

  def _weigh(self, chosen: list[int]) -> tuple[np.ndarray, float]:
    """The factor of each leaf's direction, by which the chosen gradients weigh the same, and their norm."""
    sizes = np.maximum(self.norms, self.floor)[chosen]
    # Powers of two, which every floating dtype multiplies without rounding; at most 1, for float16.
    factors = np.zeros_like(self.norms, np.float32)
    factors[chosen] = 2.0 ** -np.round(np.log2(sizes / sizes.min()))
    return factors, math.hypot(*(factors[chosen] * sizes))

  def look(self, name: str, which: list[int]) -> GradientComparison:
    """Compares the derivatives along directions in the chosen leaves."""
    factors, size = self._weigh(which)
    runs = [self.subject.forward(self.arrays, self.subject.batch, seed, factors) for seed in self.seeds]
    self.loss_forward = float(runs[0][0])
    forward, reverse = np.array([float(slope) for _, slope in runs]), self.products @ factors
    difference = math.sqrt(np.mean((reverse - forward) ** 2)) / size
    labels = tuple(self.subject.leaves[n][0] for n in which)
    one = factors[which[0]] if len(which) == 1 else size
    slopes = [tuple((x / one).tolist()) for x in (reverse, forward)]
    found = GradientComparison(name, labels, slopes[0], slopes[1], difference, "right")
    if difference <= self.tolerance:
      return found
    verdict, why, factor = "wrong", "", found.factor if len(which) == 1 else None
    if difference < 1 and all(0 < self.norms[n] < self.floor for n in which):
      verdict, why = "not decided", "perhaps zero but for rounding"
    elif not any(found.reverse):
      why = "the gradient is 0, and the derivative is not"
    elif factor is not None:
      why = f"{factor:.3g} times the derivative"
    return dataclasses.replace(found, verdict=verdict, why=why)


def check_subject(subject: Subject, seed: int = 0, directions: int | None = None) -> GradientCheck:
  """Compares each group of equal layers, then its leaves if the derivatives differ; see `check_gradients`."""
  with subject.places.active():
    check_examples(subject.batch)
    looks = Looks(subject, seed, directions)
    leaves = subject.leaves
    lost = [
      GradientComparison(name, (name,), (float(norm),), (math.nan,), math.inf, "wrong", "not finite")
      for (name, _, _), norm in zip(leaves, looks.norms, strict=True)
      if not math.isfinite(norm)
    ]
    found = lost or _look(looks)  # where some are lost, the others tell nothing
  wrong = {look.leaves for look in found if not look}
  losses, verdict = {"with the gradient": looks.loss}, "not decided"
  if not math.isnan(looks.loss_forward):
    losses["by forward mode"] = looks.loss_forward
    allowed = LOSS_TOLERANCE[looks.dtype] * max(abs(looks.loss_forward), looks.total)
    verdict = "right" if abs(looks.loss - looks.loss_forward) <= allowed else "wrong"
  fix = ""
  if lost:
    fix = 'jax.config.update("jax_debug_nans", True), to see which operation gives the first NaN.'
  elif verdict == "wrong" or not all(found):
    fix = _fix(subject)
  mesh, why = subject.places.mesh, looks.cannot
  return GradientCheck(
    comparisons=tuple(found),
    losses=losses,
    loss_verdict=verdict,
    tolerance=looks.tolerance,
    dtype=looks.dtype,
    layouts={name: where.spec for name, where, _ in leaves if where is not None and (name,) in wrong},
    mesh={axis: size for axis, size in axis_sizes(mesh).items() if size > 1},
    batch=batch_axes_of(subject.batch),
    not_checked=(f"the gradients: forward mode cannot compute this loss: {why}",) if why else (),
    notes=() if lost or why else tuple(_notes(looks, found)),
    fix=fix,
  )


def _look(looks: Looks) -> list[GradientComparison]:
  leaves = looks.subject.leaves
  if looks.cannot:
    names, nan = tuple(name for name, *_ in leaves), (math.nan,)
    return [GradientComparison("all", names, nan, nan, math.nan, "not decided", "no forward mode")]
  found: list[GradientComparison] = []
  for name, group in _groups(leaves):
    found.append(looks.look(name, group))
    if not found[-1] and len(group) > 1:
      found += [looks.look(leaves[n][0], [n]) for n in group]
  return found


def _notes(looks: Looks, found: Sequence[GradientComparison]) -> list[str]:
  """The remarks that a table does not contain."""
  notes: list[str] = []
  if words := [name for name, rounds in looks.subject.rules.items() if rounds]:
    notes.append(f"{few(words)}: rounds, so that its reverse rule is taken at its word")
  silent = [leaf[0] for leaf, norm in zip(looks.subject.leaves, looks.norms, strict=True) if norm == 0]
  if silent and all(found):
    notes.append(f"{few(silent)}: no gradient, by either mode: the loss does not depend on it, or stops it")
  return notes


def _fix(subject: Subject) -> str:
  """How to get right gradients, by the likely cause."""
  rules = f"the rule of {few(list(subject.rules))} is" if subject.rules else "a rule for the backward pass is"
  unless = f"{rules} not the derivative, perhaps on purpose"
  mesh = subject.places.mesh
  if mesh is None or mesh.size == 1:
    return f"{unless}."
  other = f"Unless {unless}."
  if len(subject.binding.names) > 1:
    return f"another layout; nxp.check_step(plan, other, loss_fn, batch) compares a step on two. {other}"
  return (
    "nxp.train_step, or nxp.parallel.gather_on_read(loss_fn, model) in a step of your own (beside"
    f" nxp.verify.with_correct_convolutions for grouped ones). {other}"
  )


def _groups(leaves: Sequence[tuple[str, NamedSharding | None, AnyArray]]) -> list[tuple[str, list[int]]]:
  """The positions of corresponding leaves of equal layers, with a name for them."""
  found: dict[tuple[Any, ...], list[int]] = {}
  for n, (name, where, array) in enumerate(leaves):
    found.setdefault((number_pattern(name), where, array.shape, array.dtype), []).append(n)
  return [(key[0] if len(group) > 1 else leaves[group[0]][0], group) for key, group in found.items()]


def coarsest(jaxpr: Program, platform: str) -> str:
  """The coarsest floating dtype in which a program computes on a platform, by name.

  By default TPUs multiply float32 matrices in bfloat16, and GPUs in TF32, which has the bits of float16.
  """
  eqns = list(equations(jaxpr))
  dtypes = {var.aval.dtype for eqn in eqns for var in eqn.outvars if hasattr(var.aval, "dtype")}
  floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
  found = str(max(floats, key=lambda dtype: float(jnp.finfo(dtype).eps), default=jnp.dtype("float32")))
  found = {"complex64": "float32", "complex128": "float64"}.get(found, found)
  found = found if found in _TOLERANCE else "bfloat16"
  products = [eqn for eqn in eqns if eqn.primitive.name in ("dot_general", "conv_general_dilated")]
  if found == "float32" and any(_is_fast(eqn.params["precision"]) for eqn in products):
    return {"tpu": "bfloat16", "gpu": "float16", "cuda": "float16"}.get(platform, found)
  return found


def _is_fast(precision: Value) -> bool:
  return precision is None or (isinstance(precision, tuple) and jax.lax.Precision.DEFAULT in precision)
