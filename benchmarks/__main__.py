"""Runs every benchmark of this folder: `python -m benchmarks [NAME ...]`.

Each benchmark runs in its own process; `python -m benchmarks.NAME` runs one benchmark with its own options. A
benchmark is a module that writes a record. Some benchmarks measure `by_hand.py` and `llama.py`, which are not
benchmarks. `make store` runs `object_store.py`; searches are in `searches/`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_MEASURED = {
  "__main__",
  "__init__",
  "harness",
  "headlines",
  "by_hand",
  "llama",
  "maxtext_step",
  "object_store",
}


def main() -> None:
  """Runs the benchmarks named on the command line, or all; fails when one fails."""
  known = {path.stem for path in HERE.glob("*.py")}
  names = sys.argv[1:] or sorted(known - NOT_MEASURED)
  if unknown := [name for name in names if name not in known]:
    sys.exit(f"no benchmark {unknown[0]!r}; for a part of a benchmark: python -m benchmarks.NAME PART")
  failed = []
  for name in names:
    print(f"== {name}", flush=True)
    if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=HERE.parent).returncode != 0:
      failed.append(name)
  subprocess.run([sys.executable, "-m", "benchmarks.headlines"], cwd=HERE.parent, check=True)
  sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
  main()
