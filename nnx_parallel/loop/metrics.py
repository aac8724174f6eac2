"""The metrics of a run as a file of JSON lines, and read back."""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.types import AnyMetrics
from nnx_parallel.errors import TrainError

Record = dict[str, float]


class MetricsLog:
  """A file of JSON lines, one for each step; `log.write` is a tracker for `nxp.fit`.

  Each line is flushed, so a process that is killed loses no line. In a job of several processes, only process
  0 writes.

  Args:
    path: the file; its folder is created if necessary.
    after: the step from which the run resumes. Lines of later steps (of a run that was killed after its last
      checkpoint) and half-written lines are removed, so every step is in the file once. With 0, a new file is
      started, and the file of an earlier run is renamed to `metrics-1.jsonl`.

  Attributes:
    path: the file.
    earlier: the new path of an earlier run's file, if there was one.

  Raises:
    TrainError: the file cannot be written.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with MetricsLog(path) as log:
    ...   log.write(1, {"loss": 2.5})
    ...   log.write(2, {"loss": 2.25})
    >>> with MetricsLog(path, after=1) as log:
    ...   log.write(2, {"loss": 2.0})
    >>> read_metrics(path)
    [{'step': 1, 'loss': 2.5}, {'step': 2, 'loss': 2.0}]
  """

  @check_arguments(TrainError)
  def __init__(self, path: str | Path, *, after: int = 0):
    self.path = Path(path)
    self.earlier: Path | None = None
    first = jax.process_index() == 0
    try:
      if first:
        self._start(after)
      self._file = (self.path if first else Path(os.devnull)).open("a", encoding="utf-8")
    except OSError as error:
      raise TrainError(
        f"cannot write metrics to {path}: {error}.", fix='nxp.loop.MetricsLog("run/metrics.jsonl")'
      ) from error

  def _start(self, after: int) -> None:
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if after:
      _keep(self.path, [record for record in read_metrics(self.path) if record["step"] <= after])
    elif self.path.is_file() and self.path.stat().st_size:
      numbered = (self.path.with_stem(f"{self.path.stem}-{n}") for n in itertools.count(1))
      self.earlier = self.path.rename(next(path for path in numbered if not path.exists()))

  @check_arguments(TrainError)
  def write(self, step: int, values: AnyMetrics) -> None:
    """Appends one line: the step, then the values.

    Args:
      step: the step's number.
      values: the values by name. A number that is not finite is written as null, and an array as a list.

    Raises:
      TrainError: a value is no number, text or list of them.
    """
    try:
      line = _line({"step": step, **values})
    except TypeError as error:
      raise TrainError(
        f"the values of step {step} are not numbers: {error}.", fix='write(step, {"loss": 2.5}).'
      ) from error
    self._file.write(line)
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def _keep(path: Path, records: Sequence[Record]) -> None:
  """Replaces the file by these records; a kill leaves either the old file or the new file."""
  draft = path.with_name(f"{path.name}.tmp")
  with draft.open("w", encoding="utf-8") as file:
    file.writelines(map(_line, records))
    file.flush()
    os.fsync(file.fileno())
  draft.replace(path)


def _line(record: AnyMetrics) -> str:
  return json.dumps({name: _plain(value) for name, value in record.items()}) + "\n"


def _plain(value: Any) -> Any:
  if np.ndim(value):
    return [_plain(x) for x in np.asarray(value)]
  value = value.item() if hasattr(value, "item") else value
  return None if isinstance(value, float) and not math.isfinite(value) else value


@check_arguments(TrainError)
def read_metrics(path: str | Path) -> list[Record]:
  """Reads the records of a metrics file, in order. A missing file has no records.

  An incomplete last line, which a killed process can leave, is ignored. Null values are read as NaN.

  Args:
    path: as given to `MetricsLog`.

  Returns:
    One dict for each line, its `step` first.

  Raises:
    TrainError: another line than the last is not a JSON object with a step.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with MetricsLog(path) as log:
    ...   log.write(1, {"loss": 2.5})
    >>> read_metrics(path)
    [{'step': 1, 'loss': 2.5}]
  """
  path = Path(path)
  if not path.is_file():
    return []
  *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
  return [_parse(line, path, number) for number, line in enumerate(lines, start=1)]


def _parse(line: str, path: Path, number: int) -> Record:
  try:
    record: dict[str, Any] = json.loads(line)
    return {"step": operator.index(record.pop("step")), **{k: _or_nan(v) for k, v in record.items()}}
  except (ValueError, KeyError, AttributeError, TypeError) as error:
    raise TrainError(
      f"{path} is not a metrics file: line {number} is not a JSON object with a step.",
      details=f"the line: {line[:80]!r}",
      fix="another --out DIR, or move this file away.",
    ) from error


def _or_nan(value: Any) -> Any:
  if isinstance(value, list):
    return [_or_nan(x) for x in value]  # pyright: ignore[reportUnknownVariableType]
  return math.nan if value is None else value
