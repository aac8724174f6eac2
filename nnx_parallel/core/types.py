"""Names of types: of traces, in the forms of all supported versions of jax, and of values without a class.

The protocols say what this package reads of jax's classes of the same names (`jax.extend.core`). Those give
no shape to a variable's type, and closed traces are a class of their own in older versions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from flax import nnx
from jax.extend import core

Aval: TypeAlias = Any
"""The type of a variable: `jax.core.ShapedArray`, or the type of a token or a reference."""
PyTree: TypeAlias = Any
"""Arrays, or what stands for them, in containers that jax knows."""
TreeDef: TypeAlias = Any
"""The structure of a pytree; a variable for type checkers, in jax."""
Value: TypeAlias = Any
"""What a variable of a trace is bound to: an array, or what a walk puts in its place."""


class Var(Protocol):
  """An input or a result of an operation: a variable of a trace, or a literal."""

  @property
  def aval(self) -> Aval: ...


class JaxprEqn(Protocol):
  """An operation of a trace."""

  @property
  def primitive(self) -> core.Primitive: ...
  @property
  def invars(self) -> Sequence[Var]: ...
  @property
  def outvars(self) -> Sequence[Var]: ...
  @property
  def params(self) -> dict[str, Any]: ...
  @property
  def effects(self) -> Set[core.Effect]: ...
  @property
  def source_info(self) -> Any: ...
  @property
  def ctx(self) -> Any: ...
  @property
  def replace(self) -> Callable[..., Self]: ...


class Jaxpr(Protocol):
  """A trace: its operations in order."""

  @property
  def constvars(self) -> Sequence[Var]: ...
  @property
  def invars(self) -> Sequence[Var]: ...
  @property
  def outvars(self) -> Sequence[Var]: ...
  @property
  def eqns(self) -> Sequence[JaxprEqn]: ...
  @property
  def effects(self) -> Set[core.Effect]: ...
  @property
  def debug_info(self) -> Any: ...
  @property
  def replace(self) -> Callable[..., Self]: ...


class ClosedJaxpr(Protocol):
  """A trace with the values of its constants."""

  @property
  def jaxpr(self) -> Jaxpr: ...
  @property
  def consts(self) -> Sequence[Value]: ...
  @property
  def eqns(self) -> Sequence[JaxprEqn]: ...
  @property
  def in_avals(self) -> Sequence[Aval]: ...
  @property
  def out_avals(self) -> Sequence[Aval]: ...
  @property
  def effects(self) -> Set[core.Effect]: ...
  @property
  def replace(self) -> Callable[..., Self]: ...


Program: TypeAlias = Jaxpr | ClosedJaxpr
"""A trace, closed or not."""
P = TypeVar("P", bound=Program)
"""One of the two, the same in and out."""
DType: TypeAlias = np.dtype[Any]
"""The dtype of an array."""
Model: TypeAlias = Any
"""A module, or modules in a tuple or a dict."""
LossFn: TypeAlias = Callable[..., Any]
"""`loss(model, batch)`, of one model or several; or `loss(model, x, y)` for a batch that is a tuple."""
AnyMetrics: TypeAlias = Mapping[str, Any]
"""Name -> scalar, or a `(sum, count)` pair of scalars, or an array of examples."""
Optimizer: TypeAlias = nnx.Optimizer[Any]
"""An optimizer of any model."""
Optimizers: TypeAlias = Any
"""An optimizer, or one for each model that is trained, in a tuple or a dict."""
AnyArray: TypeAlias = Any
"""An array: of jax, of NumPy, or abstract (`jax.ShapeDtypeStruct`)."""
Variable: TypeAlias = nnx.Variable[Any]
"""A Variable with any value."""
State: TypeAlias = nnx.State[Any, Any]
"""Variables by path."""
Leaf: TypeAlias = Any
"""A Variable of a module, or an array that stands in it, abstract or not."""
