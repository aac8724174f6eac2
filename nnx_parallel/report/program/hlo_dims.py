"""Operations of compiled programs in terms of `jax.lax`: their parameters, and how they treat dims.

HLO and `jax.lax` have the same operations, so the table in `core/dims.py` is read for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from jax import lax

from nnx_parallel.core.dims import DimMap, dim_map
from nnx_parallel.report.program.hlo import Instruction

_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
ELEMENTWISE = frozenset({
  "abs", "add", "and", "atan2", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "convert", "copy",
  "cosine", "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor",
  "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or",
  "popcnt", "power", "reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt",
  "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sqrt", "subtract",
  "tan", "tanh", "xor",
})  # fmt: skip
"""Elementwise operations; all operands have the shape of the result, or are scalars."""

Shapes = Sequence[tuple[int, ...]]


def dot_params(at: Instruction) -> dict[str, Any]:
  """The parameters of a `dot` as `lax.dot_general` takes them."""
  summed, batch = (
    tuple(tuple(at.numbers(f"{side}_{kind}_dims")) for side in ("lhs", "rhs"))
    for kind in ("contracting", "batch")
  )
  return {"dimension_numbers": (summed, batch)}


def window_params(at: Instruction, rank: int) -> dict[str, Any]:
  """The parameters of a window over `rank` dims as `lax.reduce_window` takes them."""
  given = dict(part.split("=") for part in at.attribute("window").strip("{}").split())

  def each(name: str, default: str) -> list[str]:
    return given[name].split("x") if name in given else [default] * rank

  keys = {"window_dimensions": "size", "window_strides": "stride", "base_dilation": "lhs_dilate",
          "window_dilation": "rhs_dilate"}  # fmt: skip
  found: dict[str, Any] = {key: tuple(map(int, each(name, "1"))) for key, name in keys.items()}
  return {**found, "padding": [tuple(map(int, pair.split("_"))) for pair in each("pad", "0_0")]}


def convolution_params(at: Instruction) -> dict[str, Any]:
  """The parameters of a `convolution` as `lax.conv_general_dilated` takes them."""
  labels = _LABELS.findall(at.attribute("dim_labels"))[0]
  space = [str(n) for n in range(len(labels[0]) - 2)]
  specs = [
    tuple(text.index(label) for label in (*first, *space))
    for text, first in zip(labels, ("bf", "oi", "bf"), strict=True)
  ]
  window = window_params(at, len(space))
  if "1" in at.attribute("window").partition("rhs_reversal=")[2]:
    raise ValueError("the kernel is reversed")
  return {
    "window_strides": window["window_strides"],
    "padding": window["padding"],
    "lhs_dilation": window["base_dilation"],
    "rhs_dilation": window["window_dilation"],
    "dimension_numbers": lax.ConvDimensionNumbers(*specs),
    "feature_group_count": int(at.attribute("feature_group_count") or 1),
    "batch_group_count": int(at.attribute("batch_group_count") or 1),
  }


def gather_params(at: Instruction) -> dict[str, Any]:
  """The parameters of a `gather` as `lax.gather` takes them, with the vectors of its indices last."""
  names = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
           "start_indices_batching_dims")  # fmt: skip
  numbers = lax.GatherDimensionNumbers(*(tuple(at.numbers(name)) for name in names))
  return {"dimension_numbers": numbers, "slice_sizes": tuple(at.numbers("slice_sizes"))}


def scatter_params(at: Instruction) -> dict[str, Any]:
  """The parameters of a `scatter` as `lax.scatter` takes them, with the vectors of its indices last."""
  names = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
           "input_batching_dims", "scatter_indices_batching_dims")  # fmt: skip
  return {"dimension_numbers": lax.ScatterDimensionNumbers(*(tuple(at.numbers(name)) for name in names))}


_Params = Callable[[Instruction, Shapes, Shapes], Mapping[str, Any]]
# Opcode -> the name in `core/dims.py`, and the parameters that are read there.
_LIKE: Mapping[str, tuple[str, _Params]] = {
  "broadcast": ("broadcast_in_dim", lambda at, shapes, results: {
    "shape": results[0], "broadcast_dimensions": at.numbers("dimensions")}),
  "convolution": ("conv_general_dilated", lambda at, shapes, results: convolution_params(at)),
  "dot": ("dot_general", lambda at, shapes, results: dot_params(at)),
  "gather": ("gather", lambda at, shapes, results: gather_params(at)),
  "reduce": ("reduce_sum", lambda at, shapes, results: {"axes": at.numbers("dimensions")}),
  "reduce-window": ("reduce_window_sum", lambda at, shapes, results: window_params(at, len(shapes[0]))),
  "scatter": ("scatter_add", lambda at, shapes, results: scatter_params(at)),
  "select-and-scatter": ("select_and_scatter_add", lambda at, shapes, results: window_params(
    at, len(shapes[0]))),
  "sort": ("sort", lambda at, shapes, results: {"dimension": at.numbers("dimensions")[0]}),
  "transpose": ("transpose", lambda at, shapes, results: {"permutation": at.numbers("dimensions")}),
}  # fmt: skip


def dims_of(at: Instruction, shapes: Shapes, results: Shapes) -> DimMap | None:
  """How an operation treats the dims of its operands, or None; of a reduction, those of the first array."""
  if at.opcode not in _LIKE or (at.opcode == "scatter" and len(results) > 1):
    return None
  if at.opcode in ("gather", "scatter") and int(at.attribute("index_vector_dim")) < len(shapes[1]) - 1:
    return None
  name, params = _LIKE[at.opcode]
  count = 1 if at.opcode == "reduce" else len(results)
  inputs = [shapes[0], shapes[-1]] if at.opcode == "reduce" else shapes
  eqn: Any = SimpleNamespace(
    primitive=SimpleNamespace(name=name),
    params=params(at, shapes, results),
    invars=[_variable(shape) for shape in inputs],
    outvars=[_variable(shape) for shape in results[:count]],
  )
  return dim_map(eqn)


def _variable(shape: tuple[int, ...]) -> SimpleNamespace:
  return SimpleNamespace(aval=SimpleNamespace(shape=shape))
