"""Int8 and float8 matrix products in training, by the library qwix."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnx_parallel.errors import TrainError


def quantized(
  init: Callable[[], nnx.Module], dtype: DTypeLike, *inputs: Any, layers: str = ".*"
) -> Callable[[], nnx.Module]:
  """A constructor of the same module whose matrix products are computed in int8 or float8.

  Parameters, their gradients and the optimizer stay as they are, and so does the plan: qwix rounds both
  operands of each product, forward and backward, and scales the result. It needs standard dtype promotion:
  `jax.numpy_dtype_promotion("standard")`, which is jax's default.

  Args:
    init: builds the module; a function without arguments.
    dtype: `jnp.int8`, `jnp.float8_e4m3fn`, or another that qwix knows.
    *inputs: example inputs of the module's `__call__`, of any batch size; the module is traced with them.
    layers: a regular expression for the paths of the layers to quantize, with slashes: `"blocks/.*"`.

  Returns:
    The constructor, for `plan` or `create_sharded_model`. Apply `Precision` to `init` first.

  Raises:
    TrainError: qwix is not installed, or there are no inputs.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
    >>> low = nxp.quantized(init, jnp.int8, jnp.zeros((1, 8)))
    >>> model = nxp.create_sharded_model(low, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))  # doctest: +SKIP
  """
  if not inputs:
    raise TrainError(
      "quantized needs example inputs of the module.", fix="nxp.quantized(init, jnp.int8, jnp.zeros((1, 8)))"
    )

  @functools.wraps(init)
  def build() -> nnx.Module:
    qwix = _qwix()
    rule = qwix.QtRule(module_path=layers, weight_qtype=kind, act_qtype=kind, bwd_qtype=kind)
    return qwix.quantize_model(init(), qwix.QtProvider([rule]), *inputs)

  kind = jnp.dtype(dtype)
  return build


def _qwix() -> Any:
  if importlib.util.find_spec("qwix") is None:
    raise TrainError(
      "int8 and float8 products need qwix, which is not installed.",
      fix='pip install "nnx-parallel[quantized]"',
    )
  return importlib.import_module("qwix")
