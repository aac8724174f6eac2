"""Names of types: of traces, in the forms of all supported versions of jax, and of values without a class.

jax's own classes do not serve as types here: they give no shape to a variable's type, and closed traces are a
class of their own in older versions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from flax import nnx

Aval: TypeAlias = Any
"""The type of a variable: `jax.core.ShapedArray`, or the type of a token or a reference."""
PyTree: TypeAlias = Any
"""Arrays, or what stands for them, in containers that jax knows."""
TreeDef: TypeAlias = Any
"""The structure of a pytree; a variable for type checkers, in jax."""
Value: TypeAlias = Any
"""What a variable of a trace is bound to: an array, or what a walk puts in its place."""
Var: TypeAlias = Any
"""An input or a result of an operation: a variable of a trace, or a literal (`jax.extend.core`)."""
JaxprEqn: TypeAlias = Any
"""An operation of a trace: `jax.extend.core.JaxprEqn`."""
Jaxpr: TypeAlias = Any
"""A trace, its operations in order: `jax.extend.core.Jaxpr`."""
ClosedJaxpr: TypeAlias = Any
"""A trace with the values of its constants: `jax.extend.core.ClosedJaxpr`."""
Program: TypeAlias = Any
"""A trace, closed or not."""
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
