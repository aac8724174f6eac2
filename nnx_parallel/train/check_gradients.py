"""Checks on a layout itself that the gradients of a loss are its derivatives."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from nnx_parallel.layout.constrain import default_scope, scope_of
from nnx_parallel.layout.render import number_pattern
from nnx_parallel.layout.variables import path_str
from nnx_parallel.train.accumulate import Layout, equations, pinned, slope_of
from nnx_parallel.train.binding import Binding
from nnx_parallel.train.directions import inner, power_of_two, signs
from nnx_parallel.train.gradient_check import GradientCheck, GradientLook
from nnx_parallel.train.jaxprs import as_function, own_rules, without_own_rules
from nnx_parallel.train.loss_scale import common_scale
from nnx_parallel.train.losses import check_examples, means
from nnx_parallel.train.update import Differentiable, LossFn, Recipe, differentiable, gradients_of, keyed

_TOLERANCE = {"float64": 1e-7, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
_FLOOR = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}
_LEAVES = 16


def check_gradients(
  model: Any,
  batch: Any,
  loss_fn: LossFn,
  *,
  wrt: Any = nnx.Param,
  seed: int = 0,
  directions: int = 2,
) -> GradientCheck:
  """Checks that `jax.grad` of a loss, compiled for the layout of a live model, gives its derivatives.

  XLA partitions a program by rules of its own, and some layouts make it wrong in silence: the loss is right,
  and the gradient of a leaf is half of what it should be. This compares, on the mesh and at full size, the
  product of the gradient with random directions of +1 and -1 with the derivative of the loss along them by
  forward mode: first over all leaves, each weighted alike, then, where the two differ, over groups of equal
  layers and over single leaves. The model is unchanged, and no second copy of it is made.

  A jit of your own is checked, as it would be without `train_step`; `step.check_gradients` checks what a step
  computes.

  What it can miss: a leaf whose gradient is far smaller than the tolerance times that of all leaves; and by
  chance an error that is nearly orthogonal to each direction (with a gradient twice too large, about one
  check in a million in float32). More `directions` make both less likely.

  Args:
    model: a live module; or a tuple or dict of modules, which the loss function gets as they are.
    batch: one placed batch.
    loss_fn: as for `train_step`.
    wrt: which Variables to differentiate.
    seed: of the directions.
    directions: how many.

  Returns:
    What was found: true when nothing is wrong.

  Raises:
    TrainError: a loss, batch or module that a step cannot use.

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
  binding = Binding({"model": model})

  def layouts(_: Any) -> Any:
    return lambda paths, stages: Layout(binding.mesh, [], False, frozenset(), ())  # pyright: ignore[reportUnknownLambdaType]

  subject = Subject(Recipe(loss_fn), loss_fn, binding, batch, wrt={None: wrt}, layouts=layouts)
  return checked(subject, seed, directions)


@dataclasses.dataclass(frozen=True)
class Subject:
  """A loss of live objects, and the programs that differentiate it.

  Attributes:
    recipe: what the step does.
    loss_fn: the loss.
    binding: the live objects: a model, and its optimizer if there is one.
    batch: one placed batch.
    wrt: the filter of the Variables that are trained, by the key of their model.
    layouts: `(optimizers) -> (paths, stages) -> Layout`; see `update`.
    mend: what the step does to a program before it is compiled.
  """

  recipe: Recipe
  loss_fn: LossFn
  binding: Binding
  batch: Any
  wrt: Mapping[Any, Any]
  layouts: Callable[[Any], Any]
  mend: Callable[[Any], Any] = lambda program: program

  @functools.cached_property
  def parts(self) -> int | None:
    """Microbatches; None for a batch in one piece."""
    whole = self.recipe.microbatches == 1 and self.recipe.reduction is None
    return None if whole else self.recipe.microbatches

  @functools.cached_property
  def leaves(self) -> list[tuple[str, NamedSharding | None, Any]]:
    """Dotted path, layout and dtype of each trained array."""
    loss, _, _ = self._pieces(self.binding.read())
    index = self.binding.template.index
    return [
      (path_str(path), self.binding.shardings[index[(0, *path)]], array.dtype)
      for path, array in zip(loss.paths, loss.train, strict=True)
    ]

  def _pieces(self, arrays: Sequence[Any]) -> tuple[Differentiable, dict[Any, Any], Any]:
    """The loss, the optimizers and the loss scale, around these arrays."""
    objects = self.binding.template.build(self.binding.with_raw(arrays))
    optimizers: dict[Any, Any] = dict.fromkeys(self.wrt)
    scale = None
    if len(objects) > 1:
      optimizers = {key: keyed(*objects)[key] for key in self.wrt}
      scale = common_scale(optimizers.values())
    return differentiable(self.recipe, self.loss_fn, objects[0], self.wrt, scale), optimizers, scale

  @functools.cached_property
  def reverse(self) -> Callable[..., Any]:
    """`(arrays, batch, seeds) -> loss, norm of each gradient, its product with each direction`."""

    def reverse(arrays: list[Any], batch: Any, seeds: jax.Array) -> Any:
      with default_scope(scope_of(self.binding.variables)):
        loss, optimizers, scale = self._pieces(arrays)
        total, grads = gradients_of(self.recipe, loss, optimizers, batch, self.layouts(optimizers))
      one = jnp.float32(1) if scale is None else scale
      grads = [pinned(g, where) for g, (_, where, _) in zip(grads, self.leaves, strict=True)]
      norms = [jnp.sqrt(inner(g, jnp.conj(g))) / one for g in grads]
      products = [
        [inner(g, pinned(signs(seed, n, g), self.leaves[n][1])) / one for n, g in enumerate(grads)]
        for seed in seeds
      ]
      return (
        means(total.terms, total.parts)["loss"],
        jnp.stack(norms),
        jnp.stack(list(map(jnp.stack, products))),
      )

    return jax.jit(self.mend(reverse))

  @functools.cached_property
  def forward(self) -> Callable[..., Any]:
    """`(arrays, batch, seed, factors) -> loss, derivative along signs times a factor for each leaf`."""

    def forward(arrays: list[Any], batch: Any, seed: jax.Array, factors: jax.Array) -> Any:
      with default_scope(scope_of(self.binding.variables)):
        loss, _, scale = self._pieces(arrays)
        tangents = self._direction(loss, seed, factors)
        objective = _without_own_rules(loss.objective) if self.rules else loss.objective
        value, slope = slope_of(objective, loss.train, tangents, loss.others, batch, self.parts)
      return value, slope if scale is None else slope / scale

    return jax.jit(self.mend(forward))

  def _direction(self, loss: Differentiable, seed: jax.Array, factors: jax.Array) -> list[Any]:
    return [
      pinned(signs(seed, n, x) * factors[n].astype(x.dtype), self.leaves[n][1])
      for n, x in enumerate(loss.train)
    ]

  @functools.cached_property
  def trace(self) -> Any:
    """The trace of the loss of one part of the batch."""
    with default_scope(scope_of(self.binding.variables)):
      arrays, batch = jax.tree.map(_abstract, (self.binding.read(), self.batch))

      def run(arrays: list[Any], batch: Any) -> Any:
        loss, _, _ = self._pieces(arrays)
        return loss.objective(loss.train, loss.others, batch)[0]

      return jax.make_jaxpr(run)(arrays, batch)

  @functools.cached_property
  def rules(self) -> list[str]:
    """The `jax.custom_vjp` functions of the loss: forward mode cannot use their rules."""
    return own_rules(self.trace)


class _Looks:
  """Compares the two derivatives of a subject, for any set of its leaves.

  Args:
    subject: what is checked.
    seed: of the directions.
    directions: how many.
  """

  def __init__(self, subject: Subject, seed: int, directions: int):
    self.subject = subject
    self.arrays = subject.binding.read()
    self.seeds = [np.uint32((seed * 2**16 + n) % 2**32) for n in range(directions)]
    self.dtype = _coarsest(subject.trace)
    loss, norms, products = subject.reverse(self.arrays, subject.batch, np.array(self.seeds))
    self.loss = float(loss)
    self.norms, self.products = np.asarray(norms, np.float64), np.asarray(products, np.float64)
    self.loss_forward = math.nan
    total = math.hypot(*self.norms[np.isfinite(self.norms)]) or abs(self.loss) or 1.0
    self.sizes = np.maximum(self.norms, _FLOOR[self.dtype] * total)
    self.factors = np.array([power_of_two(1 / size) if np.isfinite(size) else 0.0 for size in self.sizes])
    # The largest is 1: nothing overflows in float16.
    self.factors /= self.factors.max() or 1.0

  def look(self, name: str, chosen: Sequence[int]) -> GradientLook:
    """Compares the derivatives along directions in some leaves, each weighted alike."""
    factors = np.zeros(len(self.factors))
    factors[list(chosen)] = self.factors[list(chosen)]
    forward = [self._slope(seed, factors) for seed in self.seeds]
    reverse = [float(np.nansum(np.where(factors, row * factors, 0.0))) for row in self.products]
    size = math.hypot(*(factors * self.sizes)[list(chosen)])
    difference = math.sqrt(np.mean([(r - f) ** 2 for r, f in zip(reverse, forward, strict=True)])) / size
    one = factors[chosen[0]] if len(chosen) == 1 else size
    labels = tuple(self.subject.leaves[n][0] for n in chosen)
    verdict = "right" if difference <= _TOLERANCE[self.dtype] else "wrong"
    found = GradientLook(
      name, labels, tuple(r / one for r in reverse), tuple(f / one for f in forward), difference, verdict
    )
    return found if found.verdict == "right" else dataclasses.replace(found, why=_said(found))

  def _slope(self, seed: np.uint32, factors: np.ndarray[Any, Any]) -> float:
    given = factors.astype(np.float32)
    loss, slope = self.subject.forward(self.arrays, self.subject.batch, seed, given)
    self.loss_forward = float(loss)
    return float(slope)


def checked(subject: Subject, seed: int, directions: int) -> GradientCheck:
  """Looks at all leaves together, then closer where the derivatives differ."""
  check_examples(subject.batch)
  looks = _Looks(subject, seed, directions)
  leaves = subject.leaves
  every = range(len(leaves))
  found = [looks.look("all", list(every))]
  if found[0].verdict != "right" and len(leaves) > 1:
    for name, group in _groups(leaves):
      together = looks.look(name, group)
      found.append(together)
      if together.verdict != "right" and len(group) > 1:
        found += [looks.look(leaves[n][0], [n]) for n in group[:_LEAVES]]
  wrong = {look.leaves[0] for look in found if look.verdict != "right" and len(look.leaves) == 1}
  mesh = subject.binding.mesh
  return GradientCheck(
    looks=tuple(found),
    losses={"with the gradient": looks.loss, "by forward mode": looks.loss_forward},
    tolerance=_TOLERANCE[looks.dtype],
    dtype=looks.dtype,
    layouts={name: where.spec for name, where, _ in leaves if name in wrong and where is not None},
    mesh={} if mesh is None else {axis: size for axis, size in mesh.shape.items() if size > 1},
    batch=(),
  )


def _said(look: GradientLook) -> str:
  if not any(look.reverse):
    return "the gradient is 0, and the derivative is not"
  factor = look.factor if len(look.leaves) == 1 else None
  return "" if factor is None else f"{factor:.3g} times the derivative"


def _groups(leaves: Sequence[tuple[str, Any, Any]]) -> list[tuple[str, list[int]]]:
  """The positions of alike leaves of equal layers, with a name for them."""
  found: dict[Any, list[int]] = {}
  for n, (name, where, dtype) in enumerate(leaves):
    found.setdefault((number_pattern(name), where, dtype), []).append(n)
  return [(key[0] if len(group) > 1 else leaves[group[0]][0], group) for key, group in found.items()]


def _coarsest(jaxpr: Any) -> str:
  """The coarsest floating dtype in which a program computes."""
  dtypes = {
    var.aval.dtype for eqn in equations(jaxpr.jaxpr) for var in eqn.outvars if hasattr(var.aval, "dtype")
  }
  floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
  return str(max(floats, key=lambda dtype: float(jnp.finfo(dtype).eps), default=jnp.dtype("float32")))


def _without_own_rules(objective: Any) -> Any:
  def plain(*args: Any) -> Any:
    traced, shape = jax.make_jaxpr(objective, return_shape=True)(*args)
    flat = as_function(without_own_rules(traced))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), flat)

  return plain


def _abstract(x: Any) -> Any:
  return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=getattr(x, "sharding", None))
