"""The few places where the forms of a trace differ between the supported versions of jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

CHECKPOINTS = ("checkpoint", "remat", "remat2")
CALLS = ("jit", "pjit", "closed_call", "core_call")


@dataclasses.dataclass(frozen=True)
class ScanCounts:
  """How the flat inputs of a scan divide: constants, then carried values, then rows."""

  constants: int
  carried: int


def opened(jaxpr: Any) -> Any:
  """The jaxpr itself, closed or not."""
  return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
  """The constants that a closed jaxpr carries."""
  return getattr(jaxpr, "consts", ())


def as_function(jaxpr: Any) -> Callable[..., Sequence[Any]]:
  """A jaxpr as a function of flat arrays."""
  inner = opened(jaxpr)
  closed = core.ClosedJaxpr(inner, constants(jaxpr))  # pyright: ignore[reportPrivateImportUsage]
  return core.jaxpr_as_fun(closed)


def called(eqn: Any) -> Any:
  """The program that an operation holds (a call, a checkpoint, a custom rule), or None."""
  return next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)


def nbytes(x: Any) -> int:
  """Bytes of an array, abstract or not."""
  return math.prod(x.shape) * x.dtype.itemsize


def scan_counts(eqn: Any) -> ScanCounts:
  """Reads them from the ranks: a row has one dim more outside the loop than inside.

  The names of the parameters that hold the counts changed between versions.
  """
  inner = opened(eqn.params["jaxpr"])
  rows = sum(_rank(a) > _rank(b) for a, b in zip(eqn.invars, inner.invars, strict=True))
  carried = sum(_rank(a) == _rank(b) for a, b in zip(eqn.outvars, inner.outvars, strict=True))
  return ScanCounts(len(eqn.invars) - rows - carried, carried)


def _rank(var: Any) -> int:
  return len(var.aval.shape)
