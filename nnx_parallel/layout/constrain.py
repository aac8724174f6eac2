"""Logical names on activations: `constrain`, and the rules in scope for it.

The rules in scope are part of JAX's cache key (`jax.make_user_context`), so a function that was compiled
under some rules is compiled again under other rules, and never silently keeps the old layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.linen import get_logical_axis_rules
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nnx_parallel.core.axes import Entry, axes_in, axes_of, count_shards, entry_of
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.jaxprs import HELD, is_inexact
from nnx_parallel.core.mesh import (
  AnyMesh,
  auto_mesh,
  axis_sizes,
  check_active,
  is_tracing,
  mesh_inside,
  use_mesh,
)
from nnx_parallel.core.nodes import SCOPE, value_of
from nnx_parallel.core.types import AnyArray, Leaf
from nnx_parallel.errors import MeshError, ShardingError, TrainError
from nnx_parallel.layout.batch import batch_axes, position_axes
from nnx_parallel.layout.resolve import resolve_spec
from nnx_parallel.rules.inputs import InputRules
from nnx_parallel.rules.logical import LogicalRules, Unknown, check_axes
from nnx_parallel.rules.ruleset import Rules, RuleSet


@dataclasses.dataclass(frozen=True)
class Scope:
  """Rules for activations and inputs, and a mesh; equal scopes give one compiled program."""

  rules: LogicalRules  # the logical rules, with a rule for `batch` if rules or mesh decide it
  mesh: AnyMesh | None
  inputs: InputRules | None = None  # the rules for the inputs, if there are some
  stated: bool = True  # whether rules say how the batch is split, and not only the names of the mesh axes
  apart: frozenset[str] = frozenset()  # names for which the plans of several models have different rules
  # the `sharding_rules` that the author of a Variable wrote, where creation put the resolved axes
  own: Any = ()

  def __hash__(self) -> int:
    return self._hash

  @functools.cached_property
  def _hash(self) -> int:
    return hash((self.rules, self.mesh, self.inputs, self.stated, self.apart))

  def __repr__(self) -> str:
    return f"<{len(self.rules)} rules>"  # printed for each Variable of a model

  @property
  def ruleset(self) -> RuleSet:
    """Its rules in the form of a plan."""
    return RuleSet(logical=self.rules, inputs=self.inputs)

  def on_auto_axes(self) -> Scope:
    """The same scope on the mesh with Auto axes."""
    return self if self.mesh is None else dataclasses.replace(self, mesh=auto_mesh(self.mesh))

  def __deepcopy__(self, _: object) -> Scope:
    return self

  def __reduce__(self) -> tuple[object, ...]:
    # A pickled model leaves its devices behind.
    return Scope, (self.rules, None, self.inputs, self.stated, self.apart, self.own)


_SCOPE: Any = jax.make_user_context(None)
_MAPPED: Any = jax.make_user_context(())


@check_arguments(ShardingError)
@contextlib.contextmanager
def use_rules(rules: Rules, mesh: AnyMesh | None = None) -> Generator[None, None, None]:
  """Puts logical rules in scope for `constrain`, and makes a mesh active.

  If you pass a mesh, `jax.lax.with_sharding_constraint(x, PartitionSpec(...))` and models that use the active
  mesh also use this mesh, in place of the mesh of `jax.set_mesh`. Inside a traced function, an active mesh
  stays active, and `constrain` raises an error if it is another mesh.
  `flax.linen.with_logical_constraint` follows the same rules, on Auto axes, unless `nnx.logical_axis_rules`
  are already active. You can enter it around a call or inside a traced function, and you can nest it; the
  innermost scope applies. A function that was compiled under some rules is compiled again under different
  rules, but not under equal rules. Each thread has a separate scope.

  Args:
    rules: the rules, as in `plan`; only the logical rules matter here.
    mesh: the mesh; None uses the mesh of `jax.set_mesh`.

  Yields:
    Nothing.

  Raises:
    ShardingError: the argument is not rules, or a rule can never apply on this mesh.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> mesh, rules = nxp.make_mesh(data=4, tensor=2), nxp.LogicalRules(batch="data", embed="tensor")
    >>> with nxp.use_rules(rules, mesh):
    ...   y = jax.jit(lambda x: nxp.constrain(x * 2, "batch", "embed"))(jnp.ones((8, 4)))
    >>> y.sharding.spec
    P('data', 'tensor')
  """
  logical = RuleSet.of(rules).logical
  if mesh is not None:
    check_axes(logical, axis_sizes(mesh))
  with scoped(Scope(logical, mesh)):
    yield


@contextlib.contextmanager
def scoped(scope: Scope) -> Generator[None, None, None]:
  """`use_rules`, for rules that are already checked; on Auto axes if the program computes on Auto axes."""
  if scope.mesh is not None:
    scope = dataclasses.replace(scope, mesh=mesh_inside(scope.mesh))
  with _flax_rules(scope), _active(scope.mesh), _SCOPE(scope):
    yield


def _flax_rules(scope: Scope) -> contextlib.AbstractContextManager[object]:
  """The same rules for flax's own constraints, unless the user has made other rules active."""
  mesh = scope.mesh
  if mesh is None or AxisType.Explicit in mesh.axis_types:
    return contextlib.nullcontext()
  if _SCOPE.value is None and get_logical_axis_rules():
    return contextlib.nullcontext()
  pairs = [
    (name, entry_of(axes))
    for name, candidates in scope.rules.items()
    for axes in candidates
    if set(axes) <= set(mesh.axis_names)
  ]
  return nnx.logical_axis_rules(pairs)


def _active(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[object]:
  """Makes a mesh active, except in a program that is traced under another mesh."""
  active, outer = jax.sharding.get_abstract_mesh(), _SCOPE.value
  by_scope = outer is not None and outer.mesh is not None and outer.mesh.abstract_mesh == active
  if mesh is None or (is_tracing() and not (active.empty or by_scope)):
    return contextlib.nullcontext()
  return use_mesh(mesh)


def scope_of(variables: Iterable[Leaf]) -> Scope | None:
  """The scope of the plans that Variables were made from; None without a plan."""
  # The plans may have different rules, but not (`TrainError`) other meshes, axes of the batch or of
  # positions.
  leaves = (leaf for leaf in variables if isinstance(leaf, nnx.Variable))
  scopes = dict.fromkeys(scope for leaf in leaves if (scope := leaf.get_metadata().get(SCOPE)) is not None)
  found = dict.fromkeys(dataclasses.replace(scope, own=()) for scope in scopes)
  return functools.reduce(_merge, found) if found else None


def _merge(one: Scope, other: Scope) -> Scope:
  """One scope for the models of two plans. A plan that states how the batch is split decides it."""
  mesh = other.mesh if one.mesh is None else one.mesh
  if mesh is None:
    return one
  if other.mesh is not None and other.mesh != mesh:
    shown = [f"{axis_sizes(where)} ({where.axis_types[0]})" for where in (mesh, other.mesh)]
    raise TrainError(
      "the plans of these models have different meshes.",
      details=" and ".join(shown),
      fix="make the plans with one mesh, or nxp.reshard(model, plan) with such a plan.",
    )
  sizes = axis_sizes(mesh)
  larger = {axis for axis, size in sizes.items() if size > 1}
  batches = [_axes_in(larger, batch_axes(scope.ruleset, sizes)) for scope in (one, other)]
  if one.stated != other.stated:
    first, second = (one, other) if one.stated else (other, one)
  else:
    # Stated splits are the same. Of two that follow from rules, the one with more axes holds the other.
    first, second = (one, other) if len(batches[0]) >= len(batches[1]) else (other, one)
    more, less = sorted(map(set, batches), key=len, reverse=True)
    are_apart = batches[0] != batches[1] if one.stated else not less <= more
    if are_apart:
      raise _different("examples", "batch", batches, sizes)
  if one.inputs != other.inputs and one.inputs is not None and other.inputs is not None:
    raise _different("inputs", "batch", [one.inputs, other.inputs], sizes)
  positions = [_axes_in(larger, position_axes(x.ruleset, sizes)) for x in (one, other) if "seq" in x.rules]
  if len({*positions}) > 1:
    raise _different("positions", "seq", positions, sizes)
  apart = {
    name for name in first.rules.keys() & second.rules.keys() if first.rules[name] != second.rules[name]
  }
  apart = (apart - {"batch", "seq"}) | first.apart | second.apart
  rules = {name: x for name, x in {**second.rules, **first.rules}.items() if name not in apart}
  uneven = second.rules.uneven | first.rules.uneven
  for name in uneven.keys() - rules.keys():
    del uneven[name]
  unknown: Unknown = "replicate" if "replicate" in (first.rules.unknown, second.rules.unknown) else "error"
  merged = LogicalRules(rules, unknown=unknown, uneven=uneven)
  return Scope(merged, mesh, first.inputs or second.inputs, first.stated, frozenset(apart))


def _axes_in(larger: set[str], axes: tuple[str, ...] | None) -> tuple[str, ...]:
  return tuple(axis for axis in axes or () if axis in larger)


def _different(what: str, name: str, found: Sequence[object], sizes: Mapping[str, int]) -> TrainError:
  example = next((x for x in found if isinstance(x, tuple) and x), ("data",))
  return TrainError(
    f"the plans of these models split the {what} differently.",
    details=f"over {found[0]} and over {found[1]}, mesh {dict(sizes)}",
    fix=f"make each plan with the same rule: nxp.LogicalRules({name}={example}).",
  )


def mapped_axes(axes: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
  """Adds the axes of an enclosing `jax.vmap` (its `spmd_axis_name`) to the axes that `constrain` ignores."""
  return _MAPPED((*_MAPPED.value, *axes))


def axes_of_maps() -> frozenset[str]:
  """The axes of `mapped_axes`."""
  return frozenset(_MAPPED.value)


def manual_too(mesh: AnyMesh | None) -> frozenset[str]:
  """The axes of `mapped_axes`: a `jax.shard_map` over other axes must be manual over them too."""
  # The rule for `vmap` splits the arrays of a `shard_map` over them; on an Explicit mesh it follows the
  # types.
  return frozenset() if mesh is None or AxisType.Explicit in mesh.axis_types else axes_of_maps()


def scope_in_use() -> Scope | None:
  """The scope of the innermost `use_rules` or `plan.scope()`, or None."""
  return _SCOPE.value


def default_scope(scope: Scope | None) -> contextlib.AbstractContextManager[None]:
  """Enters the scope of a plan, unless the caller has rules in scope; these then get its mesh by default."""
  outer: Scope | None = _SCOPE.value
  if scope is None:
    return contextlib.nullcontext()
  return scoped(scope if outer is None else Scope(outer.rules, outer.mesh or scope.mesh))


@dataclasses.dataclass(frozen=True)
class ActiveMesh:
  """The mesh and the rules that apply to some arrays, and the axes of the transforms around them."""

  mesh: AnyMesh | None  # the mesh, abstract if it is active; None for one device
  rules: LogicalRules  # the rules of the plan or of `use_rules`, or none
  manual: frozenset[str]  # the mesh axes of an enclosing `shard_map`, along which arrays are shards
  mapped: frozenset[str]  # the mesh axes of an enclosing `jax.vmap` (its `spmd_axis_name`)
  apart: frozenset[str] = frozenset()  # names for which the plans of several models have different rules

  def spec(self, names: tuple[Entry, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of an array with logical names or mesh axes; dims that do not divide are not split."""
    if self.mesh is None:
      return PartitionSpec()
    scope = Scope(self.rules, None, apart=self.apart)
    return _spec(names, shape, self.mesh, scope, {*self.manual, *self.mapped}, True)


def active_mesh(*arrays: Leaf) -> ActiveMesh:
  """The mesh and the rules that apply to arrays or Variables: from the scope, else from their plan."""
  outer, own = _SCOPE.value, scope_of(arrays)
  scope: Scope | None = outer or own
  if outer is not None and outer.mesh is None and own is not None:
    scope = Scope(outer.rules, own.mesh)
  mesh: AnyMesh | None = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    found = (_mesh(value_of(x), scope, mesh) for x in arrays)
    mesh = next((mesh for mesh in found if mesh is not None), None)
  else:
    check_active(scope.mesh if scope else None, "in scope")
    for x in map(value_of, arrays):
      check_active(_own_mesh(x), "of an array")
  manual = frozenset(() if mesh is None else map(str, mesh.manual_axes))
  rules, apart = (scope.rules, scope.apart) if scope else (LogicalRules(), frozenset[str]())
  return ActiveMesh(mesh, rules, manual, axes_of_maps(), apart)


@check_arguments(ShardingError)
def constrain(x: jax.Array, *names: Entry) -> jax.Array:
  """Constrains the sharding of an activation by logical names, inside and outside of jit.

  Without a mesh (for example, in a unit test on one CPU), `x` is returned unchanged. The rules and the mesh
  come from `use_rules` or `plan.scope()`, or in the steps of `train_step` and `eval_step` from the plans of
  the models. Otherwise, the mesh is the mesh of `jax.set_mesh`, or the mesh of `x`.
  Inside `shard_map`, the manual axes are ignored, because `x` is already a shard along them. Inside
  `jax.vmap`, pass no name for the mapped dim. If the mesh axes do not divide a dim with the policy
  `uneven="pad"`, the compiler chooses its sharding, because an activation has no room for padding.

  Args:
    x: an array or a tracer of global shape; along manual axes, of per-device shape.
    *names: one entry for each dim of `x`: a logical name, a mesh axis, a tuple of these, or None.

  Returns:
    `x` with this sharding. The function is differentiable, and the cotangent gets the same sharding.

  Raises:
    ShardingError: the number of names is not the rank of `x`, a name has no rule, or the mesh axes do not
      divide a dim.
    MeshError: the mesh in scope, or the mesh of `x` whose axes are named, is not the active mesh; or the mesh
      has no devices.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> with nxp.use_rules(nxp.LogicalRules(batch="data", embed=None), nxp.make_mesh(data=8)):
    ...   nxp.constrain(jnp.ones((8, 4)), "batch", "embed").sharding.spec
    P('data', None)
  """
  scope: Scope | None = _SCOPE.value
  shape = tuple(jax.numpy.shape(x))
  if len(names) != len(shape):
    raise ShardingError(
      f"cannot constrain an activation: {len(names)} names for an array of {len(shape)} dims.",
      details=f"shape {shape}, names {names}",
      fix="give one name for each dim, None for a dim that is not split.",
    )
  active = jax.sharding.get_abstract_mesh()
  mesh = _mesh(x, scope, active)
  if mesh is None:
    if scope is not None:  # there is no layout, but a name may be misspelt
      axes = {axis: 1 for options in scope.rules.values() for option in options for axis in option}
      resolve_spec(names, (1,) * len(names), axes, scope.rules, path="an activation")
    return x
  if scope is None:
    _check_own_mesh(x, names, mesh)
  manual = {*mesh.manual_axes, *(name for name in mesh.axis_names if name in _MAPPED.value)}
  explicit = AxisType.Explicit in mesh.axis_types
  spec = _spec(names, shape, mesh, scope, manual, explicit)
  if len(manual) == len(mesh.axis_names):
    return x
  if not isinstance(x, Tracer):
    # Outside of jit no compiler can choose the layout of the dim: it is not split.
    placed = PartitionSpec(*(None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec))
    if isinstance(mesh, AbstractMesh):
      raise MeshError(
        "a real array cannot be laid out on an abstract mesh.",
        details=f"mesh {axis_sizes(mesh)}",
        fix="nxp.use_rules(rules, nxp.make_mesh(...)), or trace the call with jax.eval_shape.",
      )
    return jax.device_put(x, NamedSharding(mesh, placed))
  # If the scope has devices, arguments without a mesh must not decide them.
  known = scope.mesh if scope is not None and isinstance(scope.mesh, Mesh) and not manual else mesh
  target = NamedSharding(known, spec) if active.empty or known is not mesh else spec  # pyright: ignore[reportArgumentType]
  return jax.sharding.reshard(x, target) if explicit else jax.lax.with_sharding_constraint(x, target)


def split_positions(x: jax.Array) -> jax.Array:
  """An activation of examples, positions and features, laid out by rules for `batch` and `seq`, if any."""
  scope: Scope | None = _SCOPE.value
  over = axes_of_positions()
  if not over or scope is None or scope.mesh is None or jax.numpy.ndim(x) != 3:
    return x
  sizes = {axis: 1 if axis in _MAPPED.value else size for axis, size in axis_sizes(scope.mesh).items()}
  split = (batch_axes(scope.ruleset, sizes) or (), over)
  shards = [count_shards(axes, sizes) for axes in split]
  if any(n % count for n, count in zip(x.shape, shards, strict=False)) or not is_inexact(jax.typeof(x)):
    return x
  with jax.named_scope(HELD):
    return constrain(x, "batch", "seq", None)


def axes_of_positions() -> tuple[str, ...]:
  """The mesh axes larger than 1 that split the positions of activations between layers, on Auto axes."""
  scope: Scope | None = _SCOPE.value
  if scope is None or scope.mesh is None or AxisType.Explicit in scope.mesh.axis_types:
    return ()
  sizes = axis_sizes(scope.mesh)
  return tuple(axis for axis in position_axes(scope.ruleset, sizes) if sizes[axis] > 1)


def _mesh(x: AnyArray, scope: Scope | None, active: AbstractMesh) -> AnyMesh | None:
  wanted = scope.mesh if scope is not None else None
  if not active.empty:
    check_active(wanted, "in scope")
    # Inside shard_map the active mesh also has the manual axes; outside of jit it has no devices.
    return active if isinstance(x, Tracer) else (wanted or jax.sharding.get_mesh())
  if wanted is not None:
    return wanted
  own: Any = getattr(jax.typeof(x), "sharding", None)
  if own is None or own.mesh.empty:
    return None
  return own.mesh if isinstance(x, Tracer) else x.sharding.mesh


def _check_own_mesh(x: AnyArray, names: tuple[Entry, ...], mesh: AnyMesh) -> None:
  """A `MeshError` if the axes are those of the array's own mesh, and another mesh is active."""
  own = _own_mesh(x)
  missing = {*axes_in(names)} - {*mesh.axis_names}
  if own is not None and missing and missing <= {*own.axis_names}:
    check_active(own, "of the array")


def _own_mesh(x: AnyArray) -> AnyMesh | None:
  """The mesh of an array outside of programs."""
  return None if isinstance(x, Tracer) else getattr(getattr(x, "sharding", None), "mesh", None)


def _spec(
  names: tuple[Entry, ...],
  shape: tuple[int, ...],
  mesh: AnyMesh,
  scope: Scope | None,
  manual: set[str],
  explicit: bool,
) -> PartitionSpec:
  sizes = {name: 1 if name in manual else size for name, size in axis_sizes(mesh).items()}
  if scope is None:
    _check_axes_only(names, sizes)
  elif disputed := scope.apart.intersection(axes_in(names)):
    raise ShardingError(
      f"cannot constrain an activation: the plans of several models have different rules for"
      f" {min(disputed)!r}.",
      details=f"names {names}, mesh {sizes}",
      fix="with nxp.use_rules(rules, mesh): ... around the model that constrains it, with its rules.",
    )
  found = resolve_spec(names, shape, sizes, scope.rules if scope else None, path="an activation")
  entries: list[Any] = []
  for entry, padding in zip(found.spec, found.padding, strict=True):
    kept = tuple(axis for axis in axes_of(entry) if axis not in manual)
    if padding:
      entries.append(None if explicit else PartitionSpec.UNCONSTRAINED)
    else:
      entries.append(entry_of(kept))
  return PartitionSpec(*entries)


def _check_axes_only(names: tuple[Entry, ...], sizes: dict[str, int]) -> None:
  unknown = [name for name in axes_in(names) if name not in sizes]
  if unknown:
    raise ShardingError(
      f"cannot constrain an activation: there is a mesh, and no rules are in scope for {unknown[0]!r}.",
      details=f"names {names}, mesh {sizes}",
      fix="with plan.scope(): ... or with nxp.use_rules(rules, mesh): ... around the call;\n"
      "a step finds the rules of the plans that its models were made from.",
    )
