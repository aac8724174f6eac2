"""The exceptions and the warning of this package.

A message says what failed and where, shows the values that caused the failure, and names a call that works.
Every exception is a subclass of `NnxParallelError`, and of the builtin for that kind of mistake
(`ValueError`, ...).
"""

from __future__ import annotations

__all__ = [
  "CheckpointError",
  "DecodeError",
  "HostError",
  "LayoutMismatchError",
  "MeshError",
  "PlanError",
  "RecipeError",
  "ReportError",
  "SchemeError",
  "ShardingError",
  "TrainError",
]


class NnxParallelError(Exception):
  """The base class of all errors that this package raises on purpose.

  Args:
    what: one sentence that says what failed, and where (the path of the Variable, or the file).
    details: the values that caused the failure, for example shape, names, rule and mesh; printed with an
      indent.
    fix: the call or command that works; printed after `Fix:`.

  Example:
    >>> print(NnxParallelError("cannot shard w.", details="shape (6,)", fix="pad it to 8."))
    cannot shard w.
      shape (6,)
      Fix: pad it to 8.
  """

  def __init__(self, what: str, *, details: str = "", fix: str = ""):
    self.what, self.details, self.fix = what, details, fix
    lines = [what, *details.splitlines()]
    if fix:
      first, *rest = fix.splitlines()
      lines += [f"Fix: {first}", *(f"     {line}" for line in rest)]
    super().__init__("\n  ".join(lines))


class MeshError(NnxParallelError, ValueError):
  """A mesh that cannot be built, or that does not have the requested axes."""


class ShardingError(NnxParallelError, ValueError):
  """Names, rules or a spec that cannot be applied to an array."""


class PlanError(NnxParallelError, ValueError):
  """A module or optimizer that cannot be planned, or a plan used where it does not fit."""


class LayoutMismatchError(NnxParallelError, ValueError):
  """Live arrays that do not have the layout that their plan says."""


class TrainError(NnxParallelError, ValueError):
  """A loss function, batch or optimizer that a step cannot use."""


class CheckpointError(NnxParallelError, RuntimeError):
  """A checkpoint that is missing, incomplete, damaged, or does not fit its target."""


class DamagedError(CheckpointError):
  """A checkpoint whose files or values differ from the saved ones; another may be taken instead."""


class HostError(NnxParallelError, RuntimeError):
  """Processes that did not start, did not arrive at a call, failed, or do not agree on a value."""


class RecipeError(NnxParallelError, ValueError):
  """A recipe file that cannot be loaded or lacks a function that a command needs."""


class ReportError(NnxParallelError, RuntimeError):
  """A report that cannot be made: a missing compiler, an unknown topology or chip."""


class DecodeError(NnxParallelError, ValueError):
  """Prompts, a cache or options that generation cannot use."""


class SchemeError(NnxParallelError, ValueError):
  """Arrays, sizes or mesh axes that a scheme for parallel computation cannot use."""


class NnxParallelWarning(UserWarning):
  """Something that works, but probably not as meant, for example a large parameter that is replicated.

  Silence it with `warnings.filterwarnings("ignore", category=NnxParallelWarning)`, or make it an error with
  `"error"`.
  """
