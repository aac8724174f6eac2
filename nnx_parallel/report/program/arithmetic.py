"""The arithmetic of a matrix product: the type of its operands and, for float32, its precision.

One name for traces and for compiled programs, as `Chip.peak` takes it: `"bfloat16"`, `"float8"`, `"float32"`
(JAX's default precision), `"float32 high"`, `"float32 highest"`, or a type and its passes: `"bfloat16 x3"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

ENDLESS = "passes of a loop of unknown length, after its first"
"""The part of a loop of unknown length that is not counted."""
_HLO_TYPES: Mapping[str, str] = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
# First word of an algorithm's name, as in `jax.lax.DotAlgorithmPreset` and in HLO.
_ALGORITHMS: Mapping[str, str] = {
  "BF16": "bfloat16", "F16": "float16", "TF32": "tf32", "F32": "float32 highest", "F64": "float64",
  "ANY": "float8",
}  # fmt: skip
_PASSES = re.compile(r"_X(\d+)$")


def traced_arithmetic(operands: Sequence[Any], precision: Any = None) -> str:
  """The arithmetic of an operation of a trace.

  Args:
    operands: the two arrays, abstract or not; the wider type counts.
    precision: its parameter of this name, into which JAX has put `jax_default_matmul_precision`.

  Example:
    >>> x = jax.ShapeDtypeStruct((8, 8), jax.numpy.float32)
    >>> traced_arithmetic((x, x)), traced_arithmetic((x, x), jax.lax.Precision.HIGHEST)
    ('float32', 'float32 highest')
  """
  dtype = max((x.dtype for x in operands), key=lambda dtype: dtype.itemsize)
  if isinstance(precision, jax.lax.DotAlgorithmPreset):
    return _algorithm(precision.name) or _named(dtype.name)
  asked = [p for p in (precision if isinstance(precision, tuple) else (precision,)) if p is not None]
  level = max((p for p in asked if isinstance(p, jax.lax.Precision)), key=lambda p: p.value, default=None)
  return _named(dtype.name, level.name.lower() if level else "default")


def compiled_arithmetic(types: Sequence[str], attributes: str) -> str:
  """The arithmetic of an instruction of a compiled program.

  Args:
    types: element types of its operands by their HLO names, e.g. `"bf16"`; the wider one counts.
    attributes: what follows its operands.

  Example:
    >>> compiled_arithmetic(("f32", "f32"), "lhs_contracting_dims={1}, operand_precision={high,highest}")
    'float32 highest'
  """
  found = re.search(r"\balgorithm=dot_(\w+)", attributes)
  algorithm = _algorithm(found[1].upper()) if found else None
  if algorithm:
    return algorithm
  widest = max(types, key=lambda name: int((re.search(r"\d+", name) or ["8"])[0]))
  levels = re.search(r'operand_precision(?:=\{|":\[)([^}\]]*)', attributes)
  words = levels[1].lower() if levels else ""
  level = next((name for name in ("highest", "high") if name in words), "default")
  return _named(_HLO_TYPES.get(widest, widest), level)


def _algorithm(name: str) -> str | None:
  kind, passes = _ALGORITHMS.get(name.split("_")[0]), _PASSES.search(name)
  return f"{kind} x{passes[1]}" if kind and passes else kind


def _named(dtype: str, level: str = "default") -> str:
  if dtype.startswith(("float8", "f8")):
    return "float8"
  if dtype in ("int8", "uint8", "int4", "uint4", "s8", "u8", "s4", "u4"):
    return "int8"
  return f"float32 {level}" if dtype == "float32" and level != "default" else dtype
