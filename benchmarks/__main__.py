"""Runs every benchmark of this folder: `python -m benchmarks [NAME ...]`.

Each gets a process of its own. A benchmark is a script that writes a record; `by_hand.py` and `llama.py` are
what some of them measure, `torture.py` is left to `make torture`, and `object_store.py` to `make store`.
"""

from __future__ import annotations

import os
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
  "torture",
  "fuzz",
  "fuzz_programs",
  "fuzz_shrink",
}


def main() -> None:
  """Runs the benchmarks named on the command line, or all; fails when one fails."""
  names = sys.argv[1:] or sorted({path.stem for path in HERE.glob("*.py")} - NOT_MEASURED)
  if not names:
    print(f"no benchmark in {HERE}")
  environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
  failed = []
  for name in names:
    print(f"== {name}", flush=True)
    command = [sys.executable, str(HERE / f"{name}.py")]
    if subprocess.run(command, env=environment, cwd=HERE.parent).returncode != 0:
      failed.append(name)
  subprocess.run([sys.executable, str(HERE / "headlines.py")], env=environment, cwd=HERE.parent, check=True)
  sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
  main()
