"""Writes the record of the search from its pieces: how many programs, what they cover, what is wrong.

python -m benchmarks.fuzz --seeds 0:600 --out pieces/toolkit.jsonl         a piece, as many as you like
python -m benchmarks.fuzz_record pieces/*.jsonl                            the record of all of them
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import fuzz  # sets the flags of 8 devices before jax starts
from benchmarks.fuzz_faults import FAULTS, HEAD
from benchmarks.fuzz_programs import BLOCKS, INPUTS, LOSSES, MESHES, STYLES
from benchmarks.harness import Record, table

Line = dict[str, Any]
BAD = ("wrong", "suspicious", "abort", "hang", "error")
HOW = ("step", "mend", "jax", "shardy", "explicit")


def lines_of(paths: Iterable[pathlib.Path]) -> list[Line]:
  """All programs of all pieces, each once: the last result counts."""
  found = {}
  for path in paths:
    for line in fuzz.lines_of(path):
      found[(line["seed"], line["layout"], line.get("style"), *(line[key] for key in HOW))] = line
  return [line for line in found.values() if line["verdict"] != "unfit" and line["style"] in STYLES]


def how_words(key: Sequence[Any]) -> str:
  step, mend, jax_version, shardy, explicit = key
  words = [
    mend or step,
    f"jax {jax_version}",
    "Shardy" if shardy else "GSPMD",
    "Explicit" if explicit else "Auto",
  ]
  return ", ".join(words)


def counts(record: Record, lines: Sequence[Line]) -> None:
  """One group of rows for each way of compiling."""
  groups: dict[tuple[Any, ...], list[Line]] = collections.defaultdict(list)
  for line in lines:
    groups[tuple(line[key] for key in HOW)].append(line)
  for key, members in sorted(groups.items(), key=lambda item: str(item[0])):
    verdicts = collections.Counter(line["verdict"] for line in members)
    compiled = len(members) - verdicts["refused"]
    record.value("programs", len(members), "", group=how_words(key))
    for verdict in (*BAD, "refused"):
      if verdicts[verdict]:
        share = f"({verdicts[verdict] / (len(members) if verdict == 'refused' else compiled):.1%})"
        record.value(verdict, verdicts[verdict], share, group=how_words(key))
    seeds = sorted({line["seed"] for line in members})
    record.value("seeds", len(seeds), f"models, {_ranges(seeds)}", group=how_words(key))


def _ranges(seeds: Sequence[int]) -> str:
  """`0 to 99, 200 to 240`; holes of a few are not shown."""
  parts: list[list[int]] = []
  for seed in seeds:
    if parts and seed - parts[-1][1] < 20:
      parts[-1][1] = seed
    else:
      parts.append([seed, seed])
  return ", ".join(f"{first} to {last}" for first, last in parts)


def coverage(lines: Sequence[Line]) -> str:
  """By operation: programs, the share of meshes x styles that it was seen under, and wrong plain ones."""
  names = _operations()
  meshes = {json.dumps(list(mesh.items())) for mesh in MESHES}
  cells = set(itertools.product(meshes, set(STYLES)))
  seen: dict[str, set[Any]] = collections.defaultdict(set)
  programs: collections.Counter[str] = collections.Counter()
  wrong: collections.Counter[str] = collections.Counter()
  for line in lines:
    for name in set(line["ops"]):
      programs[name] += 1
      seen[name].add((json.dumps([list(item) for item in line["mesh"]]), line["style"]))
      wrong[name] += line["verdict"] in ("wrong", "abort") and line["step"] == "plain" and not line["mend"]
  rows = [(n, str(programs[n]), f"{len(seen[n] & cells) / len(cells):.0%}", str(wrong[n])) for n in names]
  share = sum(len(seen[name] & cells) for name in names) / (len(names) * len(cells))
  head = (
    f"Operations x (meshes x styles of layouts): {share:.0%} of {len(names)} x {len(cells)} were compiled."
  )
  return head + "\n\n" + table(("operation", "programs", "meshes x styles", "wrong or aborted, plain"), rows)


def _operations() -> list[str]:
  names: list[str] = []
  for operations in (INPUTS, BLOCKS, LOSSES):
    for name, found in operations.items():
      kinds = found.options.get("kind", ())
      names += [f"{name} {kind}" for kind in kinds] or [name]
  return names


def measured(python: str, shardy: bool) -> list[str]:
  """What the reproduction of each fault prints on one version and partitioner."""
  with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
    script.write(HEAD + "\n".join(fault.body() for fault in FAULTS))
    script.flush()
    environment = fuzz.environment_for(shardy)
    command = [python, script.name]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=True)
  return run.stdout.splitlines()


def faults(pythons: Sequence[str]) -> str:
  """A section for each class, with its reproduction run on each version and partitioner."""
  where = [(python, shardy) for python in pythons for shardy in (True, False)]
  names = [f"{_version(python)}, {'Shardy' if shardy else 'GSPMD'}" for python, shardy in where]
  printed = [measured(*place) for place in where]
  head = f"Each begins with\n\n```python\n{HEAD.strip()}\n```\n\n"
  head += "and runs with `XLA_FLAGS=--xla_force_host_platform_device_count=8`."
  parts = [head]
  for number, fault in enumerate(FAULTS):
    parts.append(f"## {fault.title}\n\n{fault.text}\n\n```python\n{fault.body().strip()}\n```")
    parts.append(table(("jax", "printed"), [(n, p[number]) for n, p in zip(names, printed, strict=True)]))
  return "\n\n".join(parts)


def _version(python: str) -> str:
  code = "import jax; print(jax.__version__)"
  return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("pieces", nargs="+", type=pathlib.Path)
  parser.add_argument(
    "--pythons", nargs="+", default=[sys.executable], help="interpreters with other versions of jax"
  )
  parser.add_argument("--note", action="append", default=[], help="a sentence about these pieces")
  given = parser.parse_args()
  lines = lines_of(given.pieces)
  record = Record(
    "fuzz",
    "Random programs under random layouts, against one device",
    command="make fuzz; benchmarks/fuzz_record.py",
  )
  counts(record, lines)
  assert fuzz.__doc__
  record.notes.append(f"{len(lines)} programs. " + fuzz.__doc__.split("\n\n", 2)[2].strip())
  record.notes += [ways_of_compiling(), *given.note]
  record.notes.append("## Coverage\n\n" + coverage(lines))
  record.notes.append("# Classes of faults\n\n" + faults(given.pythons))
  record.write()


def ways_of_compiling() -> str:
  """What the names of steps mean, from where they are said."""
  doc = fuzz.Options.__doc__ or ""
  return "Ways of compiling: " + " ".join(doc.split("Attributes:")[1].split("explicit:")[0].split())


if __name__ == "__main__":
  main()
