"""The programs that differentiate one loss on one layout, in several ways that must agree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import axes_of
from nnx_parallel.core.interpret import DEFAULT, rewritten
from nnx_parallel.core.jaxprs import (
  as_function,
  bind,
  by_trace,
  called,
  equations,
  has_reverse_rule,
  inner_equations,
  opened,
)
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.shards import pinned
from nnx_parallel.core.types import AnyArray, ClosedJaxpr, JaxprEqn, Program, PyTree, Value
from nnx_parallel.layers.pipeline_1f1b import PIPELINE_RULE
from nnx_parallel.layout.constrain import default_scope, mapped_axes
from nnx_parallel.layout.gather import Gather
from nnx_parallel.train.axes import Places
from nnx_parallel.train.binding import Binding
from nnx_parallel.train.gradients import Layout, loss_of, slope_of
from nnx_parallel.train.loss_scale import common_scale
from nnx_parallel.train.losses import mean, means
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.trace import Arrays, Differentiable, differentiable, why_not_by_replica
from nnx_parallel.train.update import gradients_of, keyed

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)


Compiled: TypeAlias = Any
"""A jitted program; its results are pytrees of arrays."""


@dataclasses.dataclass(frozen=True)
class Subject:
  """A loss of live objects, and the programs that differentiate it.

  Attributes:
    options: the options of the step.
    loss_fn: the loss.
    binding: the live objects: a model, and its optimizer if there is one.
    batch: one batch, in the layout of the programs.
    wrt: the filter of the trained Variables, by the key of their model.
    layout: the layout of the gradients.
    places: the places of the arrays in the programs.
    mend: corrects operations of a program, as in the step.
    relaid: other layouts to try, by position among the trained arrays.
  """

  options: StepOptions
  loss_fn: LossFn
  binding: Binding
  batch: PyTree
  wrt: Mapping[Hashable, nnx.filterlib.Filter]
  layout: Layout
  places: Places
  mend: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] = lambda program: program
  relaid: Mapping[int, NamedSharding] = dataclasses.field(default_factory=dict[int, NamedSharding])

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all programs: the arrays of the live objects, including arrays outside of Variables.

    They are not kept here: a step copies an array with another holder instead of donating it.
    """
    arrays = self._placed
    for n, where in self.relaid.items():
      arrays[self.positions[n]] = jax.device_put(arrays[self.positions[n]], where)
    return arrays

  @property
  def _placed(self) -> list[jax.Array]:
    return self.places.placed(self.binding.leaves())

  @property
  def _abstract(self) -> list[jax.ShapeDtypeStruct]:
    return [_abstract(x) for x in self._placed]

  @functools.cached_property
  def positions(self) -> list[int]:
    """The position of each trained array among all arrays."""
    loss, _ = self._pieces(self._abstract)
    return [self.binding.template.index[(0, *path)] for path in loss.paths.values()]

  @property
  def _parts(self) -> int | None:
    return None if self.options.in_one_piece else self.options.turns

  @functools.cached_property
  def leaves(self) -> list[tuple[str, NamedSharding | None, AnyArray]]:
    """Dotted path, layout and abstract value of each trained array."""
    loss, _ = self._pieces(self._abstract)
    own = self.places.shardings
    return [
      (path_str(path), self.relaid.get(n, own[self.positions[n]]), array)
      for n, (path, array) in enumerate(zip(loss.paths.values(), loss.train.values(), strict=True))
    ]

  @property
  def _gather(self) -> Gather | None:
    """What the loss gathers, as in the step, with the layouts to try."""
    found, paths = self.layout.gather, self.binding.template.paths
    if found is None or not self.relaid:
      return found
    moved = {paths[self.positions[n]][1:]: tuple(map(axes_of, x.spec)) for n, x in self.relaid.items()}
    return dataclasses.replace(found, reads={**found.reads, **moved})

  def _pieces(
    self, arrays: Sequence[AnyArray], gather: Gather | None = None
  ) -> tuple[Differentiable, jax.Array | None]:
    """The loss and its scale, around these arrays."""
    models, *optimizers = self.binding.template.build(arrays)
    scale = None
    if optimizers:
      chosen = keyed(models, *optimizers)
      scale = common_scale(chosen[key] for key in self.wrt)
    return differentiable(self.options, self.loss_fn, models, self.wrt, scale, gather), scale

  @functools.cached_property
  def reverse(self) -> Compiled:
    """`(arrays, batch, seeds) -> loss, rows`: the norm of each gradient, its product with each direction."""
    return self._reverse(lambda objective: objective)

  @functools.cached_property
  def reverse_unstopped(self) -> Compiled:
    """`reverse`, without `jax.lax.stop_gradient`."""
    return self._reverse(functools.partial(_changed, without_stops))

  def _reverse(self, change: Callable[[Any], Any]) -> Compiled:
    def reverse(arrays: list[jax.Array], batch: PyTree, seeds: jax.Array) -> PyTree:
      with default_scope(self.places.scope):
        loss, scale = self._pieces(arrays, self._gather)
        loss = loss._replace(objective=change(loss.objective))
        paths = [*loss.paths.values()]
        relaid = {paths[n]: where for n, where in self.relaid.items()}
        layout = self.layout._replace(gradients={**self.layout.gradients, **relaid})
        total, found = gradients_of(self.options, loss, batch, layout)
      grads = [pinned(g, where) for g, (_, where, _) in zip(found.values(), self.leaves, strict=True)]
      norms = [jnp.sqrt(inner(g, jnp.conj(g))) for g in grads]
      products = [
        [inner(g, pinned(signs(seed, n, g), self.leaves[n][1])) for n, g in enumerate(grads)]
        for seed in seeds
      ]
      rows = jnp.stack([jnp.stack(row) for row in (norms, *products)])
      return means(total.terms, total.parts)["loss"], _unscaled(rows, scale)

    return self._compiled(reverse)

  def _compiled(self, program: Callable[..., PyTree]) -> Compiled:
    mesh: Any = self.places.mesh
    # Numbers that each process of a job can read.
    placed: dict[str, Any] = {} if mesh is None else {"out_shardings": NamedSharding(mesh, PartitionSpec())}
    return jax.jit(self.mend(program), **placed)

  @functools.cached_property
  def forward(self) -> Compiled:
    """`(arrays, batch, seed, factors) -> loss, derivative along signs times a factor for each leaf`."""

    def forward(arrays: list[jax.Array], batch: PyTree, seed: jax.Array, factors: jax.Array) -> PyTree:
      with default_scope(self.places.scope):
        loss, scale = self._pieces(arrays, self._gather)
        tangents = self._direction(loss, seed, factors)
        plain = loss._replace(objective=self._plain(loss.objective))
        value, slope = slope_of(plain, tangents, batch, self._parts)
      return value, _unscaled(slope, scale)

    return self._compiled(forward)

  @functools.cached_property
  def shifted(self) -> Compiled:
    """`(arrays, batch, seed, factors) -> loss` with the factors times signs added to the parameters."""

    def shifted(arrays: list[jax.Array], batch: PyTree, seed: jax.Array, factors: jax.Array) -> PyTree:
      with default_scope(self.places.scope):
        loss, scale = self._pieces(arrays, self._gather)
        train = jax.tree.map(jnp.add, loss.train, self._direction(loss, seed, factors))
        value = loss_of(loss._replace(train=train), batch, self.options.turns)
      return _unscaled(value, scale)

    return self._compiled(shifted)

  def by_device(self, *, slope: bool, whole: bool = False) -> Compiled:
    """The loss, and if `slope` its derivative, by a program that leaves nothing for a compiler to partition.

    The result is `(arrays, batch, seed, factors) -> loss, mean of its sizes on the devices, slope`. With
    `whole`, each device computes the global batch instead of its own examples.
    """

    def local(loss: Differentiable, batch: PyTree, seed: jax.Array, factors: jax.Array) -> PyTree:
      terms_of = functools.partial(_loss_terms, self._plain(loss.objective), loss.rest, batch)
      (total, count), change = terms_of(loss.train), jnp.zeros(())
      if slope:
        tangents = self._direction(loss, seed, factors, pin=False)
        _, (change, _) = jax.jvp(terms_of, (loss.train,), (tangents,))
      return [total, abs(total), change], count

    return self._manual(local, whole)

  @functools.cached_property
  def value_by_device(self) -> Compiled:
    """`by_device` without the slope; compiled once."""
    return self.by_device(slope=False)

  def gradients_by_device(self, *, whole: bool = False) -> Compiled:
    """`(arrays, batch, seeds) -> rows`: the products of `reverse`, by a program without partitioning."""

    def local(loss: Differentiable, batch: PyTree, seeds: jax.Array) -> PyTree:
      terms_of = functools.partial(_loss_terms, loss.objective, loss.rest, batch)
      grads, count = jax.grad(terms_of, has_aux=True)(loss.train)
      return [
        jnp.stack([inner(g, signs(seed, n, g)) for n, g in enumerate(grads.values())]) for seed in seeds
      ], count

    return self._manual(local, whole)

  def _manual(self, local: Callable[..., PyTree], whole: bool) -> Compiled:
    """Means over the examples, from the sums of `local(loss, batch, ...)` per device; arrays are global."""
    mesh: Any = self.places.mesh
    axes = tuple(mesh.axis_names)
    specs = [_spec(x) for x in self.arrays]
    split = PartitionSpec() if whole else PartitionSpec(axes)

    def summed(arrays: list[jax.Array], batch: PyTree, rest: PyTree) -> PyTree:
      gathered = [_gathered(x, spec) for x, spec in zip(arrays, specs, strict=True)]
      sums, count = jax.lax.psum(local(self._pieces(gathered)[0], batch, *rest), axes)
      return [mean(x, count.astype(x.dtype)) for x in sums]

    def manual(arrays: list[jax.Array], batch: PyTree, *rest: PyTree) -> PyTree:
      parts = jax.tree.map(lambda x: split if jnp.ndim(x) else PartitionSpec(), batch)
      with default_scope(self.places.scope):
        return jax.shard_map(
          summed,
          mesh=mesh,
          in_specs=(specs, parts, PartitionSpec()),
          out_specs=PartitionSpec(),
          check_vma=False,
        )(arrays, batch, rest)

    return jax.jit(manual)

  @property
  def on_one_device(self) -> bool:
    """Whether nothing is partitioned."""
    mesh = self.places.mesh
    return mesh is None or mesh.size == 1

  @functools.cached_property
  def together(self) -> str:
    """Why the devices cannot compute the loss of their own examples; empty if they can."""
    mesh: Any = self.places.mesh
    if self.on_one_device:
      return "there is one device"
    if AxisType.Explicit in mesh.axis_types:
      return "the model states shardings on Explicit axes"
    if self.options.layers.pipeline is not None:
      return "each computes some of the layers, as a stage of a pipeline"
    shapes = {jnp.shape(x) for x in jax.tree.leaves(self.batch) if jnp.ndim(x)}
    sizes = {shape[0] for shape in shapes}
    if len(sizes) != 1 or min(sizes) % mesh.size:
      found = " and ".join(map(str, sorted(sizes))) or "no"
      return f"{found} examples do not divide over {mesh.size} devices"

    axes = tuple(mesh.axis_names)
    part = jax.tree.map(lambda x: _abstract(x, mesh.size), self.batch)
    with default_scope(self.places.scope), mapped_axes(axes):
      loss, _ = self._pieces(self._abstract)
      try:
        changed, traced = loss.write(part).changed, loss.inspect(part)
      except (TypeError, ValueError, NotImplementedError) as error:  # its shard_map, say, splits the batch
        return f"the loss takes all examples only: {str(error).strip().splitlines()[0]}"
      if changed:
        return "the loss changes Variables (statistics, counters or random state)"
      return why_not_by_replica(traced, axes)

  def _plain(self, objective: Callable[..., PyTree]) -> Callable[..., PyTree]:
    return _changed(without_own_rules, objective) if self.rules else objective

  def _direction(
    self, loss: Differentiable, seed: jax.Array, factors: jax.Array, *, pin: bool = True
  ) -> Arrays:
    found: Arrays = {}
    for n, (i, x) in enumerate(loss.train.items()):
      found[i] = signs(seed, n, x) * factors[n].astype(x.dtype)
      found[i] = pinned(found[i], self.leaves[n][1]) if pin else found[i]
    return found

  @functools.cached_property
  def trace(self) -> ClosedJaxpr:
    """The trace of the loss of one part of the batch."""
    with default_scope(self.places.scope):
      batch = jax.tree.map(_abstract, self.batch)

      def run(arrays: list[jax.Array], batch: PyTree) -> PyTree:
        loss, _ = self._pieces(arrays)
        return loss.objective(loss.train, loss.rest, batch)[0]

      return jax.make_jaxpr(run)(self._abstract, batch)

  @functools.cached_property
  def rules(self) -> dict[str, bool]:
    """The `jax.custom_vjp` functions of the loss, and whether each rounds: forward mode cannot pass them."""
    return own_rules(self.trace)


def _loss_terms(
  objective: Callable[..., PyTree], rest: Arrays, batch: PyTree, train: Arrays
) -> tuple[jax.Array, jax.Array]:
  """Sum and count of the loss of some examples."""
  found = objective(train, rest, batch)[1][0]
  total, count = found.sums["loss"], found.counts["loss"]
  return total, jnp.ones_like(total) if count is None else count


def _unscaled(x: jax.Array, scale: jax.Array | None) -> jax.Array:
  return x if scale is None else x / scale.astype(x.dtype)


def _spec(x: AnyArray) -> PartitionSpec:
  sharding = getattr(x, "sharding", None)
  return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _gathered(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """The global array from its shards, inside a manual program."""
  for dim, entry in enumerate(spec):
    if entry:
      x = jax.lax.all_gather(x, axes_of(entry), axis=dim, tiled=True)
  return x


def _changed(change: Callable[[Any], Any], objective: Callable[..., PyTree]) -> Callable[..., PyTree]:
  """An objective whose trace is changed before it runs."""
  return by_trace(objective, lambda traced, args: as_function(change(traced))(*jax.tree.leaves(args)))


def _abstract(x: AnyArray, parts: int = 0) -> jax.ShapeDtypeStruct:
  """The shape and sharding of an array; or the shape of one of several parts of it."""
  shape, dtype = jnp.shape(x), jnp.result_type(x)
  if parts:
    return jax.ShapeDtypeStruct((shape[0] // parts, *shape[1:]) if shape else (), dtype)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(x, "sharding", None))


def own_rules(jaxpr: Program) -> dict[str, bool]:
  """The functions of a program with a custom reverse rule; True if the rule is kept because it rounds."""
  found: dict[str, bool] = {}
  for eqn in equations(jaxpr):
    if has_reverse_rule(eqn):
      name = opened(called(eqn)).debug_info.func_name
      found[name] = found.get(name, False) or _is_kept(eqn)
  return found


def without_own_rules(jaxpr: Program) -> ClosedJaxpr:
  """The same program with each `jax.custom_vjp` function replaced by a function that has a forward mode.

  If a function rounds, the replacement still uses the reverse rule of the function, because this rule differs
  from the derivative on purpose. The rule of a pipeline is never used, because it is the rule to check; the
  layers in a pipeline may round.
  """

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if not has_reverse_rule(eqn):
      return DEFAULT
    function = _at_its_word(eqn) if _is_kept(eqn) else as_function(without_own_rules(called(eqn)))
    return function(*inputs)

  return rewritten(jaxpr, rule)


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
      name = opened(called(eqn)).debug_info.func_name
      raise NotImplementedError(f"the reverse rule of {name}, which rounds, is not linear") from error

  return function


def without_stops(jaxpr: Program) -> ClosedJaxpr:
  """The same program with copies in place of `jax.lax.stop_gradient`."""

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    return [jnp.positive(*inputs)] if eqn.primitive.name == "stop_gradient" else DEFAULT

  return rewritten(jaxpr, rule)


def _is_kept(eqn: JaxprEqn) -> bool:
  return opened(called(eqn)).debug_info.func_name != PIPELINE_RULE and rounds(eqn)


def rounds(eqn: JaxprEqn) -> bool:
  """Whether the inner programs of an operation round values to integers, or to a dtype of 8 bits or less."""
  return any(map(_is_rounding, inner_equations(eqn)))


def _is_rounding(eqn: JaxprEqn) -> bool:
  if eqn.primitive.name != "convert_element_type":
    return eqn.primitive.name in ("round", "floor", "ceil")
  before, after = (var.aval.dtype for var in (*eqn.invars, *eqn.outvars))
  return jnp.issubdtype(before, jnp.floating) and after.itemsize == 1 and after.kind != "b"


def signs(seed: jax.Array, number: int, like: AnyArray) -> jax.Array:
  """Random +1 and -1 with the shape and dtype of an array, the same in every program and every layout.

  They are computed from the positions of the elements, so that a compiler can fuse them into their use: the
  array is not copied, and nothing is drawn in one layout and moved to another. `number` distinguishes the
  arrays of a model. A complex array gets signs for both parts.

  Example:
    >>> import jax.numpy as jnp
    >>> signs(jnp.uint32(0), 0, jnp.zeros((2, 6))).astype(int)
    Array([[ 1, -1, -1,  1, -1,  1],
           [-1, -1,  1,  1, -1,  1]], dtype=int32)
  """
  if jnp.issubdtype(like.dtype, jnp.complexfloating):
    part = jax.ShapeDtypeStruct(like.shape, jnp.finfo(like.dtype).dtype)
    return jax.lax.complex(signs(seed, 2 * number, part), signs(~seed, 2 * number + 1, part))
  found = jnp.full(like.shape, _mixed(seed + jnp.uint32(number * _ODD[0] % 2**32)), jnp.uint32)
  for dim in range(len(like.shape)):
    found += jax.lax.broadcasted_iota(jnp.uint32, like.shape, dim) * jnp.uint32(_ODD[dim % len(_ODD)])
  return jnp.where(_mixed(_mixed(found)) >> 31 == 0, 1, -1).astype(like.dtype)


def _mixed(x: jax.Array) -> jax.Array:
  """The finalizer of MurmurHash3: each bit of the result depends on all bits of `x`."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def inner(a: jax.Array, b: jax.Array) -> jax.Array:
  """The real part of the sum of products, in at least float32: how a gradient meets a direction."""
  with jax.numpy_dtype_promotion("standard"):
    dtype = jnp.result_type(a, b, jnp.float32)
  return jnp.real(jnp.sum(a.astype(dtype) * b.astype(dtype)))


def power_of_two(x: float) -> float:
  """The nearest power of two, by which every floating dtype multiplies without rounding."""
  return 2.0 ** round(math.log2(x))
