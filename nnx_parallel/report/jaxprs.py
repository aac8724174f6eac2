"""The few places where the forms of a trace differ between the supported versions of jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

CHECKPOINTS = ("checkpoint", "remat", "remat2")


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
