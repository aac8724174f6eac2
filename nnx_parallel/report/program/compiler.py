"""Runs a compiler and keeps its output: the final program, the partitioned program, its log, its figures."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from nnx_parallel.errors import ReportError
from nnx_parallel.report.program import hlo

# The files of a dump that are read. The TPU partitioner has another name; both dump the program before
# partitioning, and the program of one device after it.
_DUMPS = (
  re.compile(r"before_(?:tpu-)?spmd-partitioning\."),
  re.compile(r"after_(?:tpu-)?spmd-partitioning\."),
  re.compile(r"after_optimizations\.txt$"),
  re.compile(r"after_optimizations-live-range\.txt$"),
)
_TEMPORARIES = re.compile(
  r"required for HLO temporaries \((?P<need>[\d.]+)(?P<unit>[KMGT])\) exceeds available HBM"
)
_TOTAL = re.compile(r"[Uu]sed (?P<need>[\d.]+)(?P<unit>[KMGT]) of (?P<limit>[\d.]+)[KMGT] hbm")
_WARNING = re.compile(
  r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding "
  r"(?P<before>.+?) to (?P<after>.+?) (?:efficiently|without)[^%]*"
  r"(?P<instruction>%[\w.\-]+ = .*)"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class MemoryStats:
  """The compiler's own figures, in bytes per device; zeros where the program did not compile."""

  arguments: int = 0
  outputs: int = 0
  aliased: int = 0
  temporaries: int = 0
  code: int = 0
  peak: int = 0


@dataclasses.dataclass(frozen=True)
class Shortage:
  """The bytes per device that a program would need, by a compiler that checks it (TPU)."""

  bytes: int
  # False: arguments that are not donated come on top (libtpu 0.0.42 and 0.0.50 print "temporaries").
  total: bool


@dataclasses.dataclass(frozen=True)
class Reshard:
  """One `Involuntary full rematerialization` warning of the partitioner."""

  op: str  # the JAX name stack, or the HLO name if there is no name stack
  source: str  # `file.py:line`, or an empty string
  shape: str  # dtype and dims as the compiler printed them, which may be one device's block
  bytes: int  # the bytes of that shape
  before: str  # the original sharding, as the compiler writes it
  after: str  # the sharding that was requested


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The program, its texts on the way (empty if not dumped), and the compiler's log, figures and seconds."""

  text: str
  partitioned: str
  memory: MemoryStats
  shortage: Shortage | None
  log: str
  seconds: float
  live: str = ""
  before: str = ""


def run_compiler(lowered: jax.stages.Lowered) -> Compiled:
  """Compiles a lowered program; a `ReportError` if that failed for another reason than memory."""
  with tempfile.TemporaryDirectory() as folder:
    options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd.*", "xla_dump_hlo_as_text": True}
    start = time.perf_counter()
    compiled, short = None, None
    with _standard_error() as log, _no_cache():
      try:
        compiled = lowered.compile(compiler_options=options)
      except jax.errors.JaxRuntimeError as error:
        short = _shortage(error)
    seconds = time.perf_counter() - start
    before, partitioned, final, live = (_largest(pathlib.Path(folder), kind) for kind in _DUMPS)
  if compiled is None:
    return Compiled(final, partitioned, MemoryStats(), short, log[0], seconds, live, before)
  text = compiled.as_text() or final
  return Compiled(text, partitioned, memory_stats(compiled), None, log[0], seconds, live, before)


def memory_stats(compiled: jax.stages.Compiled) -> MemoryStats:
  """Reads `Compiled.memory_analysis()`; zeros if the backend gives none."""
  stats: Any = compiled.memory_analysis()
  if stats is None:
    return MemoryStats()
  in_host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
  return MemoryStats(
    arguments=stats.argument_size_in_bytes,
    outputs=stats.output_size_in_bytes,
    aliased=stats.alias_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
    # The peak also counts arrays in host memory (offloaded optimizer state), which a device does not hold.
    peak=max(0, stats.peak_memory_in_bytes - in_host),
  )


def _shortage(error: RuntimeError) -> Shortage:
  total, temporaries = _TOTAL.search(str(error)), _TEMPORARIES.search(str(error))
  found = total or temporaries
  if not found:
    raise ReportError(
      "the compiler refused the step.",
      details=str(error)[:600],
      fix="compile it on simulated devices first: topology='cpu:8'; options in compiler_options= of the step"
      " are options of the compiler of that machine.",
    ) from error
  return Shortage(int(float(found["need"]) * _UNITS[found["unit"]]), total is not None)


def _largest(folder: pathlib.Path, kind: re.Pattern[str]) -> str:
  files = [file for file in folder.rglob("*.txt") if kind.search(file.name)]
  return max(files, key=lambda file: file.stat().st_size).read_text() if files else ""


def find_reshards(log: str, frames: Mapping[int, str]) -> tuple[Reshard, ...]:
  """The distinct partitioner warnings in a compiler's log; `frames` has the frames of the program."""
  found: list[Reshard] = []
  for match in _WARNING.finditer(log):
    at = hlo.read_instruction(f" {match['instruction']}")
    if at is None or ("fake_parameter" in at.arguments and not at.op_name):
      continue  # a trial of the partitioner, repeated with the true operands
    reshard = Reshard(
      op=at.op_name or at.name,
      source=frames.get(at.frame, ""),
      shape=", ".join(map(str, at.shapes)),
      bytes=at.bytes,
      before=match["before"],
      after=match["after"],
    )
    if reshard not in found:
      found.append(reshard)
  return tuple(found)


# The process has one standard error and one setting of the cache: a second report waits for the first.
_ALONE = threading.RLock()


@contextlib.contextmanager
def _no_cache() -> Generator[None]:
  """Compiles anew: a program from jax's cache has no dump and no log, and another program's source lines."""
  with _ALONE:
    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax decides once whether there is a cache
    try:
      yield
    finally:
      jax.config.update("jax_enable_compilation_cache", enabled)
      compilation_cache.reset_cache()


# Waits for a line from this process; if the process ends without one, prints its output.
_WATCH = 'read -r done || { cat "$0" >&2; rm -f "$0"; }'


@contextlib.contextmanager
def _standard_error() -> Generator[list[str]]:
  """Collects what compilers write to the process's standard error, then passes it on."""
  with _ALONE:
    log = [""]
    sys.stderr.flush()
    saved = os.dup(2)
    number, name = tempfile.mkstemp(prefix="compiler-", suffix=".log")
    with subprocess.Popen(["sh", "-c", _WATCH, name], stdin=subprocess.PIPE) as watch:
      os.dup2(number, 2)
      try:
        yield log
      finally:
        os.dup2(saved, 2)
        os.close(number)
        log[0] = pathlib.Path(name).read_text(errors="replace")
        os.unlink(name)
        watch.communicate(b"done\n")
        with os.fdopen(saved, "w") as stderr:
          reported = "Involuntary full rematerialization"
          stderr.writelines(line for line in log[0].splitlines(True) if reported not in line)
