"""The programs that differentiate one loss on one layout, in several ways that must agree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.interpret import DEFAULT, rewrite
from nnx_parallel.core.jaxprs import (
  as_function,
  bind,
  by_trace,
  equations,
  has_reverse_rule,
  inner_equations,
  open_jaxpr,
  program_of,
)
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.shards import pin
from nnx_parallel.core.types import AnyArray, ClosedJaxpr, JaxprEqn, Program, PyTree, Value
from nnx_parallel.layers.gather import Gather
from nnx_parallel.layers.pipeline_1f1b import PIPELINE_RULE
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.optimizers.loss_scale import common_scale
from nnx_parallel.train.axes import Shardings
from nnx_parallel.train.binding import Binding
from nnx_parallel.train.gradients import StepLayout, slope_of
from nnx_parallel.train.losses import means
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.trace import Arrays, Differentiable, differentiable
from nnx_parallel.train.update import by_key, gradients_of

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)


@dataclasses.dataclass(frozen=True)
class Subject:
  """A loss of live objects, and the two programs that differentiate it on their layout.

  `layout` has what the gradient gathers where the loss reads it, and `reference` what forward mode does.
  """

  options: StepOptions
  loss_fn: LossFn
  binding: Binding
  batch: PyTree
  wrt: Mapping[Hashable, nnx.filterlib.Filter]
  layout: StepLayout
  places: Shardings
  reference: Gather | None
  mend: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] = lambda program: program

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of both programs: those of the live objects, including arrays outside of Variables.

    They are not kept here: a step copies an array with another holder instead of donating it.
    """
    return self.places.place(self.binding.leaves())

  @functools.cached_property
  def leaves(self) -> list[tuple[str, NamedSharding | None, AnyArray]]:
    """Dotted path, layout and abstract value of each trained array."""
    loss, _ = self._pieces([_abstract(x) for x in self.arrays])
    own, index = self.places.shardings, self.binding.template.index
    return [
      (path_str(path), own[index[(0, *path)]], array)
      for path, array in zip(loss.paths.values(), loss.train.values(), strict=True)
    ]

  @functools.cached_property
  def reverse(self) -> Any:
    """`(arrays, batch, seeds) -> loss, rows`: the norm of each gradient, its product with each direction."""

    def reverse(arrays: list[jax.Array], batch: PyTree, seeds: jax.Array) -> PyTree:
      with default_scope(self.places.scope):
        loss, scale = self._pieces(arrays, self.layout.gather)
        total, found = gradients_of(self.options, loss, batch, self.layout)
      grads = [pin(g, where) for g, (_, where, _) in zip(found.values(), self.leaves, strict=True)]
      norms = [jnp.sqrt(inner(g, jnp.conj(g))) for g in grads]
      products = [
        [inner(g, pin(signs(seed, n, g), self.leaves[n][1])) for n, g in enumerate(grads)] for seed in seeds
      ]
      rows = jnp.stack([jnp.stack(row) for row in (norms, *products)])
      return means(total.terms, total.parts)["loss"], _unscale(rows, scale)

    return self._compiled(reverse)

  @functools.cached_property
  def forward(self) -> Any:
    """`(arrays, batch, seed, factors) -> loss, derivative along signs times a factor for each leaf`."""
    parts = None if self.options.in_one_piece else self.options.turns

    def forward(arrays: list[jax.Array], batch: PyTree, seed: jax.Array, factors: jax.Array) -> PyTree:
      with default_scope(self.places.scope):
        loss, scale = self._pieces(arrays, self.reference)
        tangents: Arrays = {}
        for n, (i, x) in enumerate(loss.train.items()):
          tangents[i] = pin(signs(seed, n, x) * factors[n].astype(x.dtype), self.leaves[n][1])
        plain = by_trace(loss.objective, _run_without_own_rules) if self.rules else loss.objective
        value, slope = slope_of(loss._replace(objective=plain), tangents, batch, parts)
      return value, _unscale(slope, scale)

    return self._compiled(forward)

  def _compiled(self, program: Callable[..., PyTree]) -> Any:
    mesh: Any = self.places.mesh
    # Numbers that each process of a job can read.
    placed: dict[str, Any] = {} if mesh is None else {"out_shardings": NamedSharding(mesh, PartitionSpec())}
    return jax.jit(self.mend(program), **placed)

  def _pieces(
    self, arrays: Sequence[AnyArray], gather: Gather | None = None
  ) -> tuple[Differentiable, jax.Array | None]:
    """The loss and its scale, around these arrays."""
    models, *optimizers = self.binding.template.build(arrays)
    scale = None
    if optimizers:
      chosen = by_key(models, *optimizers)
      scale = common_scale(chosen[key] for key in self.wrt)
    return differentiable(self.options, self.loss_fn, models, self.wrt, scale, gather), scale

  @functools.cached_property
  def trace(self) -> ClosedJaxpr:
    """The trace of the loss of one part of the batch."""
    with default_scope(self.places.scope):
      batch = jax.tree.map(_abstract, self.batch)

      def run(arrays: list[jax.Array], batch: PyTree) -> PyTree:
        loss, _ = self._pieces(arrays)
        return loss.objective(loss.train, loss.rest, batch)[0]

      return jax.make_jaxpr(run)([_abstract(x) for x in self.arrays], batch)

  @functools.cached_property
  def rules(self) -> dict[str, bool]:
    """The `jax.custom_vjp` functions of the loss, and whether each rounds: forward mode cannot pass them."""
    found: dict[str, bool] = {}
    for eqn in filter(has_reverse_rule, equations(self.trace)):
      found[_name(eqn)] = found.get(_name(eqn), False) or _is_kept(eqn)
    return found


def _unscale(x: jax.Array, scale: jax.Array | None) -> jax.Array:
  return x if scale is None else x / scale.astype(x.dtype)


def _abstract(x: AnyArray) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=getattr(x, "sharding", None))


def _run_without_own_rules(traced: ClosedJaxpr, args: tuple[PyTree, ...]) -> Sequence[jax.Array]:
  return as_function(without_own_rules(traced))(*jax.tree.leaves(args))


def without_own_rules(jaxpr: Program) -> ClosedJaxpr:
  """The same program with each `jax.custom_vjp` function replaced by a function that has a forward mode.

  The rule of a function that rounds is kept: it differs from the derivative on purpose.
  """

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if not has_reverse_rule(eqn):
      return DEFAULT
    function = _at_its_word(eqn) if _is_kept(eqn) else as_function(without_own_rules(program_of(eqn)))
    return function(*inputs)

  return rewrite(jaxpr, rule)


def _at_its_word(eqn: JaxprEqn) -> Callable[..., Sequence[jax.Array]]:
  """A function with a forward mode that is the transpose of its reverse rule."""
  floats = [n for n, var in enumerate(eqn.invars) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]

  @jax.custom_jvp
  def function(*inputs: PyTree) -> PyTree:
    return bind(eqn, inputs)

  @function.defjvp
  def derivative(inputs: PyTree, tangents: PyTree) -> PyTree:  # pyright: ignore[reportUnusedFunction]
    def of_floats(*chosen: PyTree) -> PyTree:
      given = dict(zip(floats, chosen, strict=True))
      return bind(eqn, [given.get(n, x) for n, x in enumerate(inputs)])

    out, back = jax.vjp(of_floats, *[inputs[n] for n in floats])
    try:
      if any(map(_is_rounding, equations(jax.make_jaxpr(back)(out)))):
        raise NotImplementedError("rounding")
      return out, jax.linear_transpose(back, out)(tuple(tangents[n] for n in floats))[0]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
      raise NotImplementedError(f"the reverse rule of {_name(eqn)}, which rounds, is not linear") from error

  return function


def _name(eqn: JaxprEqn) -> str:
  return open_jaxpr(program_of(eqn)).debug_info.func_name


def _is_kept(eqn: JaxprEqn) -> bool:
  """Whether a function rounds; not a pipeline, whose layers may round: its rule is the one to check."""
  return _name(eqn) != PIPELINE_RULE and any(map(_is_rounding, inner_equations(eqn)))


def _is_rounding(eqn: JaxprEqn) -> bool:
  """Whether an operation rounds to integers, or to a dtype of 8 bits or less."""
  if eqn.primitive.name != "convert_element_type":
    return eqn.primitive.name in ("round", "floor", "ceil")
  before, after = (var.aval.dtype for var in (*eqn.invars, *eqn.outvars))
  return jnp.issubdtype(before, jnp.floating) and after.itemsize == 1 and after.kind != "b"


def signs(seed: jax.Array, number: int, like: AnyArray) -> jax.Array:
  """Random +1 and -1, for both parts of a complex array, the same in every program and every layout."""
  # A function of the positions of the elements and the number of the array, so that no array is copied.
  if jnp.issubdtype(like.dtype, jnp.complexfloating):
    part = jax.ShapeDtypeStruct(like.shape, jnp.finfo(like.dtype).dtype)
    return jax.lax.complex(signs(seed, 2 * number, part), signs(~seed, 2 * number + 1, part))
  found = jnp.full(like.shape, _mix(seed + jnp.uint32(number * _ODD[0] % 2**32)), jnp.uint32)
  for dim in range(len(like.shape)):
    found += jax.lax.broadcasted_iota(jnp.uint32, like.shape, dim) * jnp.uint32(_ODD[dim % len(_ODD)])
  return jnp.where(_mix(_mix(found)) >> 31 == 0, 1, -1).astype(like.dtype)


def _mix(x: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3: each bit of the result depends on all bits of `x`."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def inner(a: jax.Array, b: jax.Array) -> jax.Array:
  """The real part of the sum of products, in at least float32: how a gradient meets a direction."""
  with jax.numpy_dtype_promotion("standard"):
    dtype = jnp.result_type(a, b, jnp.float32)
  return jnp.real(jnp.sum(a.astype(dtype) * b.astype(dtype)))
