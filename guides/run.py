"""Runs the ```python blocks of guides from top to bottom, as a reader would type them.

Each guide gets a fresh process, eight simulated CPU devices, one namespace and an empty working
directory. A traceback shows the guide's own file and line.

  python guides/run.py                      all guides and README.md
  python guides/run.py guides/02-plan.md    one
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8


def pages() -> list[Path]:
  """Every page whose code is run."""
  return [ROOT / "README.md", *sorted((ROOT / "guides").glob("*.md"))]


def blocks(text: str) -> Iterator[tuple[int, str]]:
  """Yields each ```python block as (line number of its first line of code, code)."""
  code: list[str] | None = None
  start = 0
  for number, line in enumerate(text.splitlines(), 1):
    if code is None and line.rstrip() == "```python":
      code, start = [], number + 1
    elif code is not None and line.rstrip() == "```":
      yield start, "\n".join(code)
      code = None
    elif code is not None:
      code.append(line)
  if code is not None:
    raise SystemExit(f"the ```python block before line {start} is never closed")


def execute(page: Path) -> None:
  """Runs a page's blocks in this process; a failure shows the page and the line."""
  namespace = {"__name__": "__main__", "__file__": str(page)}
  for start, code in blocks(page.read_text()):
    # Blank lines put the code where it stands in the page, so that tracebacks point there.
    exec(compile("\n" * (start - 1) + code, str(page), "exec", dont_inherit=True), namespace)


def run(page: Path) -> subprocess.CompletedProcess[str]:
  """Runs a page in a process of its own, in an empty directory that is deleted afterwards."""
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600",
    "NPROC": "32",  # threads for XLA's pool: simulated devices that wait for each other hold one each
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    "MPLBACKEND": "agg",
  }
  command = [sys.executable, str(Path(__file__).resolve()), "--here", str(page)]
  with tempfile.TemporaryDirectory(prefix="guide-") as directory:
    return subprocess.run(
      command,
      env=environment,
      cwd=directory,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )


def main() -> None:
  """Runs the pages named on the command line, or all of them."""
  if sys.argv[1:2] == ["--here"]:
    return execute(Path(sys.argv[2]))
  failed = 0
  for page in [Path(name).resolve() for name in sys.argv[1:]] or pages():
    began = time.perf_counter()
    result = run(page)
    verdict = "ok" if result.returncode == 0 else "FAILED"
    print(f"{verdict:6}  {time.perf_counter() - began:5.1f} s  {os.path.relpath(page)}", flush=True)
    if result.returncode != 0:
      failed += 1
      print(result.stdout)
  sys.exit(f"{failed} failed" if failed else 0)


if __name__ == "__main__":
  main()
