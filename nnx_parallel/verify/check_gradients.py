"""Checks, on the layout in question, that the gradients of a loss are its derivatives."""

from __future__ import annotations

import dataclasses
import functools
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
from nnx_parallel.core.mesh import own_mesh
from nnx_parallel.core.text import few, number_pattern, with_article
from nnx_parallel.core.types import AnyArray, Model, Program, PyTree, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.known_faults import Fault, possible_faults
from nnx_parallel.layout.leaf import Decision, LeafPlan
from nnx_parallel.rules.ruleset import RuleSet
from nnx_parallel.train.axes import places_of_loss
from nnx_parallel.train.binding import Binding
from nnx_parallel.train.gradients import Layout, batch_axes_of
from nnx_parallel.train.losses import check_examples
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.watch import objects_in
from nnx_parallel.verify.gradient_check import GradientCheck, GradientComparison, Verdict
from nnx_parallel.verify.relayout import Relayout, cheapest, relayouts
from nnx_parallel.verify.subject import Subject, inner, power_of_two

# Beyond this a closer look follows. benchmarks/results/check_gradients.md: how right gradients round.
_TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
# Single leaves round more coarsely; and a closer look decides.
_CLOSER = {"float64": 1e-7, "float32": 3e-3, "float16": 3e-2, "bfloat16": 0.15}
_FLOOR = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}
LOSS_TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
_COARSE = 0.5  # a tolerance beyond this sees no gradient that is twice too large
_LEAVES = 16
DIRECTIONS = range(1, 2**15)
"""How many directions a check may have: the numbers of twice as many are the seeds of one check."""
_BY_DEVICE = "by each device on its own"


@check_arguments(TrainError, "model", "loss_fn", directions=DIRECTIONS, tries=0)
def check_gradients(
  model: Model,
  batch: PyTree,
  loss_fn: LossFn,
  *,
  wrt: nnx.filterlib.Filter = nnx.Param,
  seed: int = 0,
  directions: int | None = None,
  by_group: bool = False,
  tries: int = 8,
  **constants: Hashable,
) -> GradientCheck:
  """Checks the gradients of a loss, compiled for the layout of a live model, against forward mode.

  For some layouts the program that XLA partitions is silently wrong: for example, the loss is right, but the
  gradient of a leaf is half the correct value. This function works on the mesh and at full size. It draws
  random directions of +1 and -1, and compares the product of the gradient with each direction with the
  derivative of the loss along it in forward mode: first for all leaves together, with equal weights, and if
  the two differ, for groups of equal layers and for single leaves. The model does not change, and is not
  copied.

  It checks the program that a `jax.jit` of your own would run, without `train_step`. To check the program of
  a step, call `step.check_gradients`.

  It can miss an error that is, by chance, nearly orthogonal to the directions. If the gradient of one leaf of
  100 is twice too large, it passes in float32 once in 600 checks. In bfloat16 the rounding of other leaves
  may hide the error: then `by_group` compares each group of equal layers. Gradients below 1e-4 (in bfloat16
  2e-2) of the total norm have less weight, since they may be zero except for rounding. Rules of
  `jax.custom_jvp` are not checked, and neither are rules of `jax.custom_vjp` whose function rounds.

  Args:
    model: a live module; or a tuple or dict of modules, which is passed to the loss function as it is.
    batch: one placed batch.
    loss_fn: as for `train_step`.
    wrt: a filter for the Variables to differentiate.
    seed: the seed of the directions.
    directions: the number of directions; by default 1, or 2 if the loss computes in less than float32.
    by_group: whether to compare each group of equal layers, too. This costs one forward derivative for each
      group and direction. Use it in bfloat16, where the rounding of many leaves can hide one wrong leaf.
    tries: the number of other layouts to try for leaves whose gradients are wrong, to suggest a fix. Each try
      compiles two programs.
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
  return checked(subject_of(model, batch, loss, wrt), seed, directions, by_group=by_group, tries=tries)


def coarsest_dtype(
  model: Model, batch: PyTree, loss_fn: LossFn, wrt: nnx.filterlib.Filter = nnx.Param
) -> str:
  """The coarsest floating dtype in which a loss computes, by name: it sets the rounding of the gradients."""
  subject = subject_of(model, batch, loss_fn, wrt)
  with subject.places.active():
    return coarsest(subject.trace, jax.default_backend())


def subject_of(model: Model, batch: PyTree, loss_fn: LossFn, wrt: nnx.filterlib.Filter) -> Subject:
  """A loss to check that `jax.grad` differentiates in a separate jit."""
  if isinstance(loss_fn, Mapping):
    raise TrainError(
      "a check takes one loss function.", fix="step.check_gradients(models, optimizers, batch), for several."
    )
  binding, options = Binding({"model": model}), StepOptions(loss_fn)
  with own_mesh(binding.mesh):
    places = places_of_loss(binding, loss_fn, batch, options)
    layout, batch = Layout(places.mesh, {}), places.placed(batch)
    return Subject(options, loss_fn, binding, batch, {None: wrt}, layout, places)


class Looks:
  """Compares the derivatives of a subject, for any set of its leaves.

  Args:
    subject: the subject of the check.
    seed: the seed of the directions.
    directions: the number of directions; None: 1, or 2 in coarse dtypes.
  """

  def __init__(self, subject: Subject, seed: int = 0, directions: int | None = None):
    self.subject = subject
    self.arrays = subject.arrays
    self.dtype = coarsest(subject.trace, jax.default_backend())
    count = directions or (1 if jnp.finfo(self.dtype).bits >= 32 else 2)
    # If something is wrong, more directions decide, and say whether one factor explains it.
    self.first = count
    self.seeds = [np.uint32((seed * 2**16 + n) % 2**32) for n in range(2 * count)]
    self.tolerance, self.closer = _TOLERANCE[self.dtype], _CLOSER[self.dtype]
    loss, rows = subject.reverse(self.arrays, subject.batch, np.array(self.seeds))
    self.loss, rows = float(loss), np.asarray(rows, np.float64)
    self.norms, self.products = rows[0], rows[1:]
    total = math.hypot(*self.norms[np.isfinite(self.norms)]) or abs(self.loss) or 1.0
    self.floor = _FLOOR[self.dtype] * total
    self.factors, self.sizes = _weights(self.norms, self.floor)
    self.loss_forward, self.cannot, self.too_large = math.nan, "", ""
    try:
      self.subject.forward.trace(self.arrays, subject.batch, self.seeds[0], self.factors.astype(np.float32))
    except (TypeError, ValueError, NotImplementedError) as error:
      # The reverse program was traced before, so this is about forward mode.
      self.cannot = str(error).split("\n")[0]

  @functools.cached_property
  def values(self) -> tuple[dict[str, float], Verdict, str]:
    """The loss by each program, whether they agree, and why it was not checked."""
    subject = self.subject
    losses = {"with the gradient": self.loss}
    if not math.isnan(self.loss_forward):
      losses["by forward mode"] = self.loss_forward
    if subject.together:
      return losses, "not decided", subject.together
    given = (self.arrays, subject.batch, self.seeds[0], np.zeros(len(self.factors), np.float32))
    found = self._on_whole_arrays(subject.value_by_device, *given)
    if found is None:
      return losses, "not decided", self.too_large
    value, size, _ = map(float, found)
    allowed = LOSS_TOLERANCE[self.dtype] * max(abs(value), size)
    if all(abs(loss - value) <= allowed for loss in losses.values()):
      return {**losses, _BY_DEVICE: value}, "right", ""
    # Perhaps the examples depend on each other (a contrastive loss).
    together = self._on_whole_arrays(subject.by_device(slope=False, whole=True), *given)
    if together is None:
      return losses, "not decided", self.too_large
    whole = float(together[0])
    right = all(abs(loss - whole) <= allowed for loss in losses.values())
    return {**losses, "by each device for all examples": whole}, "right" if right else "wrong", ""

  @functools.cached_property
  def by_device(self) -> PyTree:
    """The derivative by a program that XLA does not partition."""
    return self.subject.by_device(slope=True, whole=_BY_DEVICE not in self.values[0])

  def look(
    self, name: str, chosen: Sequence[int], *, closer: bool = False, by_device: bool = False
  ) -> GradientComparison:
    """Compares the derivatives along directions in the chosen leaves.

    A closer look uses all directions, to decide. With `by_device`, it compares with the derivative by a
    program that XLA does not partition, and not with forward mode on the layout.
    """
    which = list(chosen)
    factors = np.zeros(len(self.factors))
    factors[which] = self.factors[which]
    size = math.hypot(*(factors * self.sizes)[which])
    count = len(self.seeds) if closer else self.first
    slopes = [self._slope(seed, factors, by_device) for seed in self.seeds[:count]]
    forward, errors = np.array([slope for slope, _ in slopes]), [error for _, error in slopes]

    def compared(products: np.ndarray) -> tuple[np.ndarray, float]:
      """The gradient along the directions, and how much that differs from the derivatives."""
      along = np.nansum(np.where(factors, products[:count] * factors, 0.0), axis=1)
      return along, math.sqrt(np.mean((along - forward) ** 2)) / size

    reverse, difference = compared(self.products)
    tolerance = max(self.closer if closer else self.tolerance, 5 * max(errors) / size)
    labels = tuple(self.subject.leaves[n][0] for n in which)
    one = factors[which[0]] if len(which) == 1 else size
    found = GradientComparison(
      name, labels, (*(reverse / one).tolist(),), (*(forward / one).tolist(),), difference, "right"
    )
    why = ""
    if difference <= tolerance < _COARSE:
      return found
    if self.cannot and any(self.subject.rules.values()):
      why = "differences see the rounding"
    elif tolerance >= _COARSE:
      why = "differences are too coarse"
    elif self.unstopped is not None and compared(self.unstopped)[1] <= tolerance:
      why = "without stop_gradient the two agree"
    elif difference < 1 and all(0 < self.norms[n] < self.floor for n in which):
      why = "perhaps zero but for rounding"
    return dataclasses.replace(found, verdict="not decided" if why else "wrong", why=why or _said(found))

  @functools.cached_property
  def unstopped(self) -> np.ndarray | None:
    """The products of the gradient without `stop_gradient`, where differences see through it."""
    if not self.cannot or "stop_gradient" not in str(self.subject.trace):
      return None
    rows = self.subject.reverse_unstopped(self.arrays, self.subject.batch, np.array(self.seeds))[1]
    return np.asarray(rows, np.float64)[1:]

  def same_by_device(self, chosen: Sequence[int]) -> bool:
    """Whether separate devices compute these gradients too: then the layout is not at fault."""
    given = (self.arrays, self.subject.batch, np.array(self.seeds))
    program = self.subject.gradients_by_device(whole=_BY_DEVICE not in self.values[0])
    try:
      program.trace(*given)
    except (TypeError, ValueError, NotImplementedError):  # a rule for the backward pass has its own shard_map
      return False
    found = self._on_whole_arrays(program, *given)
    if found is None:
      return False
    rows = np.asarray(found, np.float64)
    off = np.sqrt(np.mean((rows - self.products) ** 2, 0)) / self.sizes
    return bool((off[list(chosen)] <= self.closer).all())

  def _on_whole_arrays(self, program: PyTree, *given: PyTree) -> PyTree:
    """The results of a program that gathers all arrays on each device; None if they do not fit."""
    try:
      return jax.block_until_ready(program(*given))
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      first = str(error).split("\n")[0]
      self.too_large = f"global arrays do not fit on one device: {first}"
      return None

  def _slope(self, seed: np.uint32, factors: np.ndarray, by_device: bool) -> tuple[float, float]:
    """The derivative along a direction, and its possible error if it is computed by differences."""
    if self.cannot:
      return self._differences(seed, factors)
    given = (self.arrays, self.subject.batch, seed, factors.astype(np.float32))
    found = self._on_whole_arrays(self.by_device, *given) if by_device else None
    if found is not None:
      return float(found[2]), 0.0
    loss, slope = self.subject.forward(*given)
    self.loss_forward = float(loss)
    return float(slope), 0.0

  def _differences(self, seed: np.uint32, factors: np.ndarray) -> tuple[float, float]:
    """Central differences at several steps: the neighbours that agree best, and how far they may be off."""
    size = math.hypot(*(factors * self.sizes))
    chosen = factors > 0
    # No parameter moves far for its size, and the loss does not either.
    first = min(
      0.02 * max(abs(self.loss), 1e-3) / size, 0.05 * float(np.min(self.spans[chosen] / factors[chosen]))
    )
    found: list[float] = []
    rounding: list[float] = []
    for step in (first, first / 4, first / 16, first / 64):
      up, down = (
        self.subject.shifted(self.arrays, self.subject.batch, seed, moved.astype(np.float32))
        for moved in (step * factors, -step * factors)
      )
      found.append((float(up) - float(down)) / (2 * step))
      rounding.append(float(jnp.finfo(up.dtype).eps) * abs(self.loss) / step)
    errors = np.maximum(abs(np.diff(found)), rounding[1:])
    best = int(errors.argmin())
    return found[best + 1], float(errors[best])

  @functools.cached_property
  def spans(self) -> np.ndarray:
    """The root mean square of each trained array; 1 for an array of zeros."""
    arrays = [self.arrays[position] for position in self.subject.positions]
    return np.array([math.sqrt(float(inner(x, jnp.conj(x))) / max(x.size, 1)) or 1.0 for x in arrays])


def checked(subject: Subject, *args: Any, **options: Any) -> GradientCheck:
  """Compares all leaves at once, then closer if the derivatives differ; see `check_gradients`."""
  with subject.places.active():
    return _checked(subject, *args, **options)


def _checked(
  subject: Subject,
  seed: int = 0,
  directions: int | None = None,
  *,
  by_group: bool = False,
  tries: int = 8,
) -> GradientCheck:
  check_examples(subject.batch)
  looks = Looks(subject, seed, directions)
  leaves = subject.leaves
  lost = _not_finite(leaves, looks.norms)  # the remaining leaves tell nothing then
  found, by_device = (lost, False) if lost else _looked(looks, by_group)
  losses, verdict, why = looks.values
  not_checked = [f"the loss itself: {why}; nxp.check_step compares two layouts"] if why else []
  if looks.cannot:
    not_checked.append(f"by forward mode, so by central differences: {looks.cannot}")
  wrong = [n for n, leaf in enumerate(leaves) if any(not x and x.leaves == leaf[:1] for x in found)]
  notes, fix = [] if lost else _notes(looks, found[0], by_device), ""
  if lost:
    fix = 'jax.config.update("jax_debug_nans", True), to see which operation gives the first NaN.'
  elif verdict == "wrong" or not all(found):
    more, fix = _remedies(looks, seed, wrong, by_device, tries)
    notes += more
  if looks.too_large and looks.too_large != why:
    not_checked.append(looks.too_large)
  mesh = subject.places.mesh
  return GradientCheck(
    comparisons=tuple(found),
    losses=losses,
    loss_verdict=verdict,
    tolerance=looks.tolerance,
    closer=looks.closer,
    dtype=looks.dtype,
    layouts={leaves[n][0]: where.spec for n in wrong if (where := leaves[n][1]) is not None},
    mesh={} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1},
    batch=batch_axes_of(subject.batch),
    not_checked=tuple(not_checked),
    notes=tuple(notes),
    fix=fix,
  )


def _looked(looks: Looks, by_group: bool) -> tuple[list[GradientComparison], bool]:
  """All comparisons, and whether they are of the gradients that each device computes separately."""
  leaves = looks.subject.leaves
  every = range(len(leaves))
  found = [looks.look("all", every)]
  by_device = not found[0] and not looks.cannot and not looks.values[2]
  if by_device:
    found = [looks.look("all", every, by_device=True)]
  if len(leaves) == 1:
    return found if found[0] else [
      looks.look(leaves[0][0], every, closer=True, by_device=by_device)
    ], by_device
  if found[0] and not by_group:
    return found, by_device
  for name, group in _groups(leaves):
    together = looks.look(name, group, closer=True, by_device=by_device)
    found.append(together)
    if not together and len(group) > 1:
      found += _closer(looks, group, by_device)
  if not found[0] and found[0].difference <= looks.closer and all(found[1:]):
    found[0] = dataclasses.replace(found[0], verdict="not decided", why="no single group is wrong")
  return found, by_device


def _closer(looks: Looks, group: Sequence[int], by_device: bool) -> list[GradientComparison]:
  """Compares the leaves of a wrong group: one by one, or first in halves if there are many."""
  names = [looks.subject.leaves[n][0] for n in group]
  if len(group) <= _LEAVES:
    return [
      looks.look(name, [n], closer=True, by_device=by_device) for name, n in zip(names, group, strict=True)
    ]
  found: list[GradientComparison] = []
  half = len(group) // 2
  for some in (slice(half), slice(half, None)):
    name = f"{names[some][0]} to {names[some][-1]}"
    found.append(looks.look(name, group[some], closer=True, by_device=by_device))
    found += [] if found[-1] else _closer(looks, group[some], by_device)
  return found


def _notes(looks: Looks, first: GradientComparison, by_device: bool) -> list[str]:
  """The remarks that a table does not contain."""
  notes: list[str] = []
  if by_device and first:
    notes.append("forward mode is wrong on this layout; each gradient is computed on each device on its own")
  words = [name for name, rounds in looks.subject.rules.items() if rounds]
  if words and not looks.cannot:
    notes.append(f"{few(words)}: rounds, so that its reverse rule is taken at its word")
  silent = [leaf[0] for leaf, norm in zip(looks.subject.leaves, looks.norms, strict=True) if norm == 0]
  if silent and first:
    notes.append(f"{few(silent)}: no gradient, by any way: the loss does not depend on it, or stops it")
  return notes


def _remedies(
  looks: Looks, seed: int, wrong: Sequence[int], by_device: bool, tries: int
) -> tuple[list[str], str]:
  """The likely cause, and how to fix it."""
  subject, alone = looks.subject, looks.subject.on_one_device
  if alone or (wrong and not looks.values[2] and looks.same_by_device(wrong)):
    rules = f" ({few(list(subject.rules))})" if subject.rules else ""
    reason = "there is one device" if alone else "each device alone computes the same gradients"
    said = (
      f"the layout is not at fault, since {reason}: a rule for the backward pass{rules} is not the derivative"
      " of the forward pass"
    )
    return [said], "make the rule the derivative; where it differs on purpose, train without this check."
  notes = [f"a known XLA error on such a layout: {fault}" for fault in _known(subject)]
  if tries:
    option, said = _mended(looks, seed, wrong or range(len(subject.leaves)), by_device, tries)
    notes.append(said)
    if option is not None:
      return notes, f"lay {option.name} out as {option.sharding.spec}."
  if len(subject.binding.names) > 1:
    return notes, "another layout; nxp.check_step(plan, other, loss_fn, batch) compares a step on two."
  return notes, "nxp.train_step, which avoids known XLA errors; its check_gradients tells."


def _known(subject: Subject) -> list[Fault]:
  """The known faults of XLA that this layout may meet."""
  mesh: Any = subject.places.mesh
  model = subject.binding.template.build(subject.arrays)[0]
  scope = subject.places.scope
  rules = RuleSet() if scope is None else RuleSet(logical=scope.rules, inputs=scope.inputs)
  leaves = [
    LeafPlan(
      "model", (name,), "", x.shape, x.dtype, None, where.spec, (), None, Decision("replicated", ""), mesh
    )
    for name, where, x in subject.leaves
    if where is not None
  ]
  module = model if isinstance(model, nnx.Module) else None
  found = possible_faults(leaves, module, rules, batch_axes_of(subject.batch), dict(mesh.shape))
  return [fault for fault, _ in found]


def _mended(
  looks: Looks, seed: int, wrong: Sequence[int], by_device: bool, tries: int
) -> tuple[Relayout | None, str]:
  """Tries other layouts of the wrong leaves, then of all leaves in their modules, smallest change first."""
  subject, leaves = looks.subject, looks.subject.leaves
  modules = {leaves[n][0].rpartition(".")[0] for n in wrong}
  groups = _groups(leaves)
  own = [group for group in groups if set(group[1]) & set(wrong)]
  near = [g for g in groups if g not in own and leaves[g[1][0]][0].rpartition(".")[0] in modules]
  tried: list[str] = []
  for some in (own, near):
    every: list[Relayout] = []
    for name, positions in some:
      _, where, array = leaves[positions[0]]
      every += [] if where is None else relayouts(name, positions, array, where)
    for option in cheapest(every)[: tries - len(tried)]:
      relaid = dict.fromkeys(option.positions, option.sharding)
      other = Looks(dataclasses.replace(subject, relaid=relaid), seed, looks.first)
      if other.look("all", range(len(leaves)), by_device=by_device) and other.values[1] != "wrong":
        return option, f"{option} makes the loss and all gradients right: compiled and checked"
      tried.append(f"{option.name} as {option.sharding.spec}")
  return None, f"no change of a single layout corrects everything; tried {', '.join(tried) or 'none'}"


def _not_finite(
  leaves: Sequence[tuple[str, NamedSharding | None, AnyArray]], norms: np.ndarray
) -> list[GradientComparison]:
  return [
    GradientComparison(name, (name,), (float(norm),), (math.nan,), math.inf, "wrong", "not finite")
    for (name, _, _), norm in zip(leaves, norms, strict=True)
    if not math.isfinite(norm)
  ]


def _weights(norms: np.ndarray, floor: float) -> tuple[np.ndarray[Any, Any], np.ndarray]:
  """The factor of each direction, and the norm that each gradient is measured against.

  All gradients have equal weights, except gradients below the floor: the rounding of a zero gradient (of a
  bias before a norm) must not hide others. A gradient that is exactly zero was stopped, and has full weight.
  """
  finite = np.isfinite(norms)
  sizes = np.where(finite, np.maximum(norms, floor), 1.0)
  wanted = np.where((norms < floor) & (norms > 0), norms / floor**2, 1 / sizes)
  factors = np.array([power_of_two(x) if ok else 0.0 for x, ok in zip(wanted, finite, strict=True)])
  return factors / (factors.max() or 1.0), sizes  # at most 1: nothing overflows in float16


def _said(look: GradientComparison) -> str:
  if not any(look.reverse):
    return "the gradient is 0, and the derivative is not"
  factor = look.factor if len(look.leaves) == 1 else None
  return "" if factor is None else f"{factor:.3g} times the derivative"


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
