"""What the searches share: seeds, time, workers that may die, shrinking and the record.

    python -m searches.seams --seeds 0:100 --minutes 15 --workers 2

A search is a module of this folder with `cases(seed, given)`, a list of cases, and `check(case, given)`, a
dict with a `verdict`, a `message` or `off` for a reader, and perhaps `counts` and `figures` for the record. A
module may also say `options(parser)`, `smaller(case)` for shrinking, `still(found, wanted)`, `group(given)`
of the record, `SEEDS`, `WORKERS` (0: in this process), `PATIENCE` in seconds for a case, and what is `BAD`.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

QUIET = ("right", "refused", "rounded", "skipped", "unfit")
Result = dict[str, Any]


def seeds(text: str) -> range:
  """Reads `FIRST:END`."""
  try:
    first, end = map(int, text.split(":"))
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:END, such as 0:100") from None
  return range(first, end)


def arguments(search: Any, words: list[str] | None = None) -> argparse.Namespace:
  form, usual = argparse.RawDescriptionHelpFormatter, getattr(search, "SEEDS", "0:1000000")
  parser = argparse.ArgumentParser(description=search.__doc__, formatter_class=form)
  parser.add_argument("--seeds", type=seeds, default=usual, help="FIRST:END of the cases")
  parser.add_argument("--minutes", type=float, default=1e6, help="begin no case after so long")
  parser.add_argument("--workers", type=int, default=getattr(search, "WORKERS", 1), help="0: this process")
  parser.add_argument("--show", action="store_true", help="print every case, and raise what it raises")
  parser.add_argument("--shrink", action="store_true", help="make what fails smaller, and print that")
  parser.add_argument("--record", action="store_true", help="write the counts to benchmarks/results")
  getattr(search, "options", lambda _: None)(parser)
  return parser.parse_args(words)


def checked(search: Any, case: Any, given: argparse.Namespace) -> Result:
  """Checks a case; an error that no check expects is a verdict too."""
  began = time.time()
  try:
    result = search.check(case, given)
  except Exception as error:
    if given.show:
      raise
    result = {"verdict": "BROKEN", "message": f"{type(error).__name__}: {error}"[:400]}
  return result | {"seconds": round(time.time() - began, 2)}


def work(connection: Any, name: str, given: argparse.Namespace, errors: pathlib.Path) -> None:
  """Checks the cases that come in, list by list; sends a word before each, and its result."""
  with errors.open("w") as stream:
    os.dup2(stream.fileno(), 2)
  search = importlib.import_module(name)
  while (job := connection.recv()) is not None:
    for case in job:
      connection.send("begun")
      connection.send(checked(search, case, given))


class Worker:
  """A forked process that checks cases; a new one where the last one died."""

  def __init__(self, search: Any, given: argparse.Namespace):
    self.search, self.given = search, given
    self.process: Any = None
    self.job: list[Any] = []
    self.begun = False

  def start(self) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([self.search.__name__])
    self.connection, theirs = context.Pipe()
    opened, name = tempfile.mkstemp(suffix=".err")
    os.close(opened)
    self.errors = pathlib.Path(name)
    given = (theirs, self.search.__name__, self.given, self.errors)
    self.process = context.Process(target=work, args=given, daemon=True)
    self.process.start()
    theirs.close()

  def give(self, job: list[Any]) -> None:
    if self.process is None:
      self.start()
    self.job, self.begun, self.since = [*job], False, time.time()
    self.connection.send(job)

  def results(self) -> Iterator[tuple[Any, Result]]:
    try:
      while self.job and self.connection.poll(0.05):
        result = self.connection.recv()
        self.since = time.time()
        self.begun = result == "begun"
        if not self.begun:
          yield self.job.pop(0), result
    except (EOFError, ConnectionResetError):
      yield from self.died("abort")
      return
    if self.job and time.time() - self.since > getattr(self.search, "PATIENCE", 600):
      self.process.kill()
      yield from self.died("hang")

  def died(self, verdict: str) -> Iterator[tuple[Any, Result]]:
    self.process.join()
    result = {"verdict": verdict if self.begun else "unfit", "message": _last_words(self.errors)}
    case, rest = self.job[0], self.job[1:]
    self.stop()
    yield case, result
    if rest:
      self.give(rest)

  def stop(self) -> None:
    if self.process is not None:
      self.process.kill()
      self.process.join()
      self.connection.close()
      self.errors.unlink()
    self.process, self.job = None, []

  def check(self, case: Any) -> Result:
    self.give([case])
    while True:
      for _, result in self.results():
        return result


def _last_words(errors: pathlib.Path) -> str:
  lines = errors.read_text(errors="replace").splitlines()
  fatal = [line for line in lines if re.search(r"Check failed|^F\d{4} |terminate", line)]
  raised = [line for line in lines if line and not line.startswith((" ", "-", "Traceback", "For simplicity"))]
  return " ".join((fatal or raised[-1:])[:2])[:400]


def results(search: Any, given: argparse.Namespace) -> Iterator[tuple[Any, Result]]:
  """Each case with its result as it comes, until the seeds or the time are used up."""
  jobs = (job for seed in given.seeds if (job := search.cases(seed, given)))
  until = time.time() + 60 * given.minutes
  if not given.workers:
    for case in itertools.chain.from_iterable(jobs):
      if time.time() > until:
        return
      yield case, checked(search, case, given)
  pool = [Worker(search, given) for _ in range(given.workers)]
  try:
    while pool:
      for worker in pool:
        if not worker.job and time.time() < until and (job := next(jobs, None)) is not None:
          worker.give(job)
      if not any(worker.job for worker in pool):
        return
      for worker in pool:
        yield from worker.results()
  finally:
    for worker in pool:
      worker.stop()


def shrink(search: Any, given: argparse.Namespace, case: Any, wanted: Result) -> tuple[Any, Result]:
  """The smallest case reached that fails in the same way, and its result."""
  still = getattr(search, "still", lambda found, wanted: found["verdict"] == wanted["verdict"])
  worker = Worker(search, given)
  again: Any = True
  while again:
    tried = ((attempt, worker.check(attempt)) for attempt in search.smaller(case))
    again = next((pair for pair in tried if still(pair[1], wanted)), None)
    case, wanted = again or (case, wanted)
  worker.stop()
  return case, wanted


def record(search: Any, given: argparse.Namespace, counts: dict[Any, float], figures: dict[Any, Any]) -> None:
  """Writes the counts as the record of the search; groups that were not run stay as they were written."""
  from benchmarks.harness import Record  # starts jax, so after the flags of the search

  name = search.__name__.rpartition(".")[2]
  command = " ".join([f"python -m {search.__name__}", *sys.argv[1:]])
  made = Record(name, search.__doc__.split("\n", 1)[0], command, notes=getattr(search, "NOTES", []))
  for (group, case), (value, unit) in [*((at, (n, "")) for at, n in counts.items()), *figures.items()]:
    made.value(case, value, unit, group=group)
  made.keep_other_groups()
  made.write()


def run(name: str) -> None:
  """The command line of a search, imported under its own name, so that workers find its cases."""
  search, main = importlib.import_module(name), sys.modules["__main__"]
  main.__spec__ = main.__file__ = None  # else workers run this module a second time
  given = arguments(search)
  bad = getattr(search, "BAD", ("WRONG", "FALSELY REFUSED", "BROKEN", "abort", "hang"))
  verdicts, counts = collections.Counter[str](), collections.Counter[Any]()
  figures: dict[Any, Any] = {}
  group = search.group(given) if hasattr(search, "group") else ""
  began = time.time()
  for case, result in results(search, given):
    verdict = result["verdict"]
    verdicts[verdict] += 1
    if verdict not in ("skipped", "unfit"):
      counts.update({(group, "tried"): 1, (group, verdict): 1})
    counts.update(result.get("counts", {}))
    figures |= result.get("figures", {})
    if given.show or verdict not in QUIET:
      print(f"{verdict}: {case}\n  {result.get('off') or result.get('message', '')}", flush=True)
    if given.shrink and verdict not in QUIET:
      least, result = shrink(search, given, case, result)
      print(f"smallest: {least}\n  {result.get('off') or result.get('message', '')}", flush=True)
  seconds = time.time() - began
  print(f"{dict(verdicts)} in {seconds:.0f} s, {verdicts.total() / seconds * 60:.0f} a minute")
  if given.record:
    figures[group or "run", "seconds"] = (round(seconds), "s")
    record(search, given, counts, figures)
  sys.exit(any(verdict in bad for verdict in verdicts))
