"""Runs the ```python blocks of guides from top to bottom, as a reader would type them.

Each guide gets a fresh process, eight simulated CPU devices, one namespace and an empty working
directory. A traceback shows the guide's own file and line.

A ```text block is what the ```python block before it printed, and is compared with it, line by line:

- `...` alone on a line stands for any number of lines, at the end of a line for the rest of it.
- What another machine or the next run prints otherwise (`VARIES`) is compared without its figures.
- Under another jax than the one that `constraints/newest.txt` pins, no figures are compared, and no spaces;
  a block fenced as `text newest` (what a compiler made, in words that differ) is not compared at all.

A ```diff block is the difference of the two ```python blocks before it.

What no block printed is fenced otherwise: `sh` for commands, `py` for code that is not run, `console` for the
rest.

  python guides/run.py                      all guides and README.md
  python guides/run.py guides/02-plan.md    one
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8

COMPARED = ("text", "text newest", "diff")
UNCHECKED = ("sh", "py", "console")

NUMBER = r"\d+(?:[.,]\d+)*"
VARIES = (
  (rf"{NUMBER} (?:us|ms|s)\b", "<time>"),
  (rf"{NUMBER}(?= (?:samples|tokens)/s\b)", "<rate>"),
  (rf"{NUMBER}%", "<part of the time>"),
  (r"[\w-]+\.(?:py|md):\d+", "<line of code>"),
)
"""What is not the same in each run, and what stands for it in a comparison."""


def pages() -> list[Path]:
  """Every page whose code is run."""
  return [ROOT / "README.md", *sorted((ROOT / "guides").glob("*.md"))]


class Block(NamedTuple):
  """A fenced block: the word on its fence, the number of its first line, and what it holds."""

  kind: str
  start: int
  text: str


def blocks(text: str) -> Iterator[Block]:
  """Yields every fenced block of a page."""
  kind: str | None = None
  start, lines = 0, []
  for number, line in enumerate(text.splitlines(), 1):
    if kind is not None and line.rstrip() == "```":
      yield Block(kind, start, "\n".join(lines))
      kind = None
    elif kind is not None:
      lines.append(line)
    elif line.startswith("```"):
      kind, start, lines = line[3:].strip(), number + 1, []
  if kind is not None:
    raise SystemExit(f"the ```{kind} block before line {start} is never closed")


class Echo(io.StringIO):
  """Keeps what is printed, and prints it."""

  def write(self, text: str) -> int:
    """Does both."""
    sys.__stdout__.write(text)
    return super().write(text)


def has_pinned_jax() -> bool:
  """Whether this is the jax whose exact figures the guides show."""
  return f"jax=={version('jax')}\n" in (ROOT / "constraints" / "newest.txt").read_text()


def comparable(text: str, exact: bool) -> list[str]:
  """The lines of a text without what may differ."""
  for pattern, instead in VARIES:
    text = re.sub(pattern, instead, text)
  if not exact:
    text = re.sub(r"[ -]+", " ", re.sub(NUMBER, "#", text))
  return [line.rstrip() for line in text.strip("\n").splitlines()]


def difference(shown: str, printed: str, exact: bool) -> str:
  """How a ```text block differs from what was printed; nothing if it does not."""
  want, got = comparable(shown, exact), comparable(printed, exact)
  pattern = ""
  for line in want:
    rest = ".*" if line.endswith("...") else ""
    pattern += r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.removesuffix("...")) + rest + r"\n"
  if re.fullmatch(pattern, "".join(f"{line}\n" for line in got)):
    return ""
  return "\n".join(difflib.unified_diff(want, got, "in the page", "printed", lineterm="", n=1))


def execute(page: Path) -> None:
  """Runs a page's blocks in this process; a failure shows the page and the line."""
  namespace = {"__name__": "__main__", "__file__": str(page)}
  exact, wrong, printed = has_pinned_jax(), [], None
  code = ["", ""]
  for kind, start, text in blocks(page.read_text()):
    where = f"{page}:{start}"
    if kind == "python":
      echo = Echo()
      with contextlib.redirect_stdout(echo), contextlib.redirect_stderr(echo):
        # Blank lines put the code where it stands in the page, so that tracebacks point there.
        exec(compile("\n" * (start - 1) + text, str(page), "exec", dont_inherit=True), namespace)
      printed = echo.getvalue()
      code = [code[1], text]
    elif kind in UNCHECKED:
      continue
    elif kind not in COMPARED:
      known = ", ".join((*COMPARED, *UNCHECKED))
      wrong.append(f"{where}: a block is fenced as {known} or python, not {kind!r}")
    elif kind == "diff":
      lines = difflib.unified_diff(*(part.splitlines() for part in code), lineterm="", n=1)
      changes = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
      if unlike := difference(text, changes, exact=True):
        wrong.append(f"{where}: this is not the difference of the two blocks before it\n{unlike}")
    elif printed is None:
      wrong.append(f"{where}: no ```python block printed this; fence it as sh, py or console")
    else:
      if (kind == "text" or exact) and (unlike := difference(text, printed, exact)):
        wrong.append(f"{where}: this is not what the block before it prints\n{unlike}")
      printed = None
  if wrong:
    raise SystemExit("\n\n".join(wrong))


def run(page: Path) -> subprocess.CompletedProcess[str]:
  """Runs a page in a process of its own, in an empty directory that is deleted afterwards."""
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(DEVICES),
    "XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "NPROC": "64",  # threads for XLA's pool: simulated devices that wait for each other hold one each
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    "MPLBACKEND": "agg",
  }
  environment.pop("COLUMNS", None)  # tables as in a file
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
