"""Random numbers for the examples of one replica: its rows of what one device draws for all of them.

A loss that a replica computes for its 2 of 8 examples would draw a mask of 2 rows, with the same key the same
mask on each replica. It gets its rows of the mask of 8 instead:

    random_bits[shape=(2, 5)] key    ->    random_bits[shape=(8, 5)] key, as (4, 2, 5), split over replicas

`linearity.py` finds which draws have the examples on a dim, and `draw_rows` replaces them in a loss that
`jax.vmap` then maps over the replicas. XLA makes each device compute its own rows only, since a number of
`jax_threefry_partitionable` depends on the key and its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from nnx_parallel.core.interpret import DEFAULT, rewrite
from nnx_parallel.core.jaxprs import as_function, bind, by_trace
from nnx_parallel.core.types import JaxprEqn, PyTree, Value

Shape = tuple[int, ...]
DRAWS = frozenset(("random_bits", "random_split"))
"""Operations whose results depend on a key and on the shape that they are asked for."""


@dataclasses.dataclass(frozen=True)
class Draws:
  """The draws of a loss."""

  # operation, and shapes of its keys and its result for one part -> the dim along which one key draws for
  # several examples, or None
  dims: dict[tuple[str, Shape, Shape], int | None] = dataclasses.field(default_factory=dict[Any, Any])

  def add(self, eqn: JaxprEqn, dim: int | None = None) -> bool:
    """Notes a draw; False if draws of one shape differ in where they have the examples."""
    return self.dims.setdefault(_kind_of(eqn), dim) == dim

  def __bool__(self) -> bool:
    return any(dim is not None for dim in self.dims.values())


REPLICA = "replica"
"""The axis name of the replicas in the `jax.vmap` that maps the loss over them."""


class UnknownDraw(Exception):
  """A loss draws random numbers that it did not draw when it was compared."""


def draw_rows(
  run: Callable[..., PyTree], draws: Draws, times: int, parts: int, sharding: NamedSharding
) -> Callable[..., PyTree]:
  """`run` for one replica's examples, with random numbers as one device draws them for all replicas."""

  # The result is to be mapped by `jax.vmap` over the replicas, with axis name `REPLICA`. The draws were noted
  # for `times` times the examples of one replica; `sharding` is of dim 0, a dim of replicas.
  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Any:
    if eqn.primitive.name not in DRAWS:
      return DEFAULT
    name, keys, shape = _kind_of(eqn)
    dims = {dim for kind, dim in draws.dims.items() if kind == (name, keys, _larger(shape, dim, times))}
    if len(dims) != 1:
      raise UnknownDraw(f"{name} of shape {shape}")
    (dim,) = dims
    if dim is None:
      return DEFAULT
    # With a mapped argument, `vmap` takes the rule also where the key is the same on all replicas.
    return [_rows_of(eqn, dim, parts, sharding)(inputs[0], jax.lax.axis_index(REPLICA))]

  return by_trace(run, lambda traced, args: as_function(rewrite(traced, rule))(*jax.tree.leaves(args)))


def _kind_of(eqn: JaxprEqn) -> tuple[str, Shape, Shape]:
  return eqn.primitive.name, tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)


def _larger(shape: Shape, dim: int | None, times: int) -> Shape:
  return tuple(size * times if d == dim else size for d, size in enumerate(shape))


def _rows_of(eqn: JaxprEqn, dim: int, parts: int, sharding: NamedSharding) -> Callable[[Value, Value], Value]:
  """A draw that gives each element of a `jax.vmap` its own rows."""
  shape = eqn.outvars[0].aval.shape
  first = dim - (len(shape) - len(eqn.params["shape"]))  # an array of keys draws for each of them

  @jax.custom_batching.custom_vmap
  def draw(key: Value, _: Value) -> Value:
    return bind(eqn, [key])[0]

  @draw.def_vmap  # pyright: ignore[reportUntypedFunctionDecorator]
  def _draw(size: int, batched: list[bool], key: Value, _: Value) -> tuple[Value, bool]:
    if size != parts or batched[0]:
      raise UnknownDraw(f"a key for each of {size} replicas")
    (whole,) = bind(eqn, [key], shape=_larger(eqn.params["shape"], first, parts))
    split = jnp.reshape(whole, (*shape[:dim], parts, *shape[dim:]))
    spec = PartitionSpec(*sharding.spec, *[PartitionSpec.UNCONSTRAINED] * len(shape))
    split = jnp.moveaxis(split, dim, 0)
    return jax.lax.with_sharding_constraint(split, NamedSharding(sharding.mesh, spec)), True

  return draw
