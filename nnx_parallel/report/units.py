"""How reports write bytes, FLOPs and seconds."""

from __future__ import annotations


def format_bytes(count: float) -> str:
  """Bytes in binary units.

  Example:
    >>> format_bytes(0), format_bytes(1536), format_bytes(6 * 2**30)
    ('0 B', '1.50 KiB', '6.00 GiB')
  """
  for unit in ("B", "KiB", "MiB", "GiB"):
    if abs(count) < 1024:
      return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
    count /= 1024
  return f"{count:.2f} TiB"


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
