"""How reports write bytes, FLOPs and seconds."""

from __future__ import annotations

from nnx_parallel.core.text import format_bytes

__all__ = ["format_bytes", "format_count", "format_seconds"]


def format_count(count: float) -> str:
  """A number with a decimal prefix.

  Example:
    >>> format_count(989e12), format_count(12)
    ('989 T', '12')
  """
  for prefix in ("", " k", " M", " G", " T", " P"):
    if abs(count) < 1000:
      return f"{count:.3g}{prefix}"
    count /= 1000
  return f"{count:.3g} E"


def format_seconds(seconds: float) -> str:
  """A duration.

  Example:
    >>> format_seconds(0.0123), format_seconds(3.0)
    ('12.3 ms', '3.00 s')
  """
  if seconds >= 1:
    return f"{seconds:.2f} s"
  return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
