"""The metrics of a run as files: JSON lines or TensorBoard, read back, and drawn as curves."""

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

from nnx_parallel.core.figures import BLUE, SKY, new_figure, open_axes
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

  def __init__(self, path: str | Path, *, after: int = 0):
    self.path = Path(path)
    self.earlier: Path | None = None
    first = jax.process_index() == 0
    if first:
      self._start(after)
    self._file = (self.path if first else Path(os.devnull)).open("a", encoding="utf-8")

  def _start(self, after: int) -> None:
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if after:
      _keep(self.path, [record for record in read_metrics(self.path) if record["step"] <= after])
    elif self.path.is_file() and self.path.stat().st_size:
      self.earlier = self.path.rename(_unused(self.path))

  def write(self, step: int, values: AnyMetrics) -> None:
    """Appends one line: the step, then the values.

    Args:
      step: the step's number.
      values: the values by name. A number that is not finite is written as null, and an array as a list.
    """
    self._file.write(_line({"step": step, **values}))
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


class TensorBoardLog:
  """Files for TensorBoard: a curve for each number, and a histogram for each array.

  `log.write` is a tracker for `nxp.fit`. In a job of several processes, only process 0 writes.

  Args:
    directory: the folder of the run; each run needs its own folder.
    after: the step from which the run resumes. TensorBoard does not show earlier records of later steps.

  Raises:
    TrainError: tensorboardX is not installed.
  """

  def __init__(self, directory: str | os.PathLike[str], *, after: int = 0):
    try:
      from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
      raise TrainError(
        f"cannot write TensorBoard files to {os.fspath(directory)}: tensorboardX is not installed.",
        fix="pip install 'nnx-parallel[tensorboard]', or MetricsLog(...), which needs nothing.",
      ) from error
    purge, first = after + 1 if after else None, jax.process_index() == 0
    self._writer = SummaryWriter(os.fspath(directory), purge_step=purge, write_to_disk=first)

  def write(self, step: int, values: AnyMetrics) -> None:
    """Adds one point to each curve.

    Args:
      step: the step's number.
      values: the values by name. An array becomes a histogram of its elements, and text becomes a text entry.
    """
    for name, value in values.items():
      if isinstance(value, str):
        self._writer.add_text(name, value, step)
      elif np.ndim(value):
        self._writer.add_histogram(name, np.asarray(value, np.float32).ravel(), step)
      else:
        self._writer.add_scalar(name, float(value), step)

  def close(self) -> None:
    """Flushes and closes the file."""
    self._writer.close()

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


def _unused(path: Path) -> Path:
  names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
  return next(name for name in names if not name.exists())


def _line(record: AnyMetrics) -> str:
  return json.dumps({name: _plain(value) for name, value in record.items()}) + "\n"


def _plain(value: Any) -> Any:
  if np.ndim(value):
    return [_plain(x) for x in np.asarray(value)]
  value = value.item() if hasattr(value, "item") else value
  return None if isinstance(value, float) and not math.isfinite(value) else value


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


def draw_curves(
  records: Sequence[Record], path: str | Path, *, names: Sequence[str] = ("loss",), title: str = ""
) -> Path:
  """Draws metrics against the step, one panel each; the suffix of the path is the format."""
  figure = new_figure(7.2, 1.4 + 2.6 * len(names))
  panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
  for panel, name in zip(panels, names, strict=True):
    steps = [r["step"] for r in records if name in r]
    values = [r[name] for r in records if name in r]
    if not steps:
      seen = sorted({k for r in records for k in r} - {"step"})
      raise TrainError(f"no record has the metric {name!r}.", fix=f"one of {', '.join(seen)}.")
    _draw_panel(panel, steps, values, name)
  panels[-1].set_xlabel("step")
  figure.suptitle(title)
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)
  return path


def _draw_panel(panel: Any, steps: Sequence[float], values: Sequence[float], name: str) -> None:
  window = len(values) // 40 * 2 + 1
  ones = np.ones(window)  # fewer neighbours at the ends
  smooth = np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
  panel.plot(steps, values, color=SKY, linewidth=1, label="each step")
  panel.plot(steps, smooth, color=BLUE, linewidth=2, label=f"mean of {window} steps")
  panel.xaxis.get_major_locator().set_params(integer=True)
  panel.set_ylabel(name.replace("_", " "))
  open_axes(panel)
  panel.legend(loc="upper right", frameon=False)  # "best" looks at every point
  panel.annotate(f"{smooth[-1]:.3f}", (steps[-1], smooth[-1]), xytext=(4, 4), textcoords="offset points")
