"""Keeps tests/LAST_NIGHTLY.md: the last result of each step of `make nightly`, so that somebody looks at it.

`last_nightly.py write STEP PYTHON STATUS SECONDS [JUNIT_XML]` replaces one row; `last_nightly.py age` says
how many commits ago the steps ran.
"""

import datetime
import os
import subprocess
import sys
import xml.etree.ElementTree as xml

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "tests", "LAST_NIGHTLY.md")
LIMIT = 100  # commits
HEAD = """# The last nightly run

`make nightly` writes this page, one row for each step; `make nightly STEPS="test-all"` runs some of the
steps. If a row is older than the last hundred commits, run its step before you call an issue resolved:
`.ci/run` says so.

| step | Python | commit | date | result | minutes |
|---|---|---|---|---|---|
"""


def git(*args: str) -> str:
  """What git prints, without the last line break."""
  done = subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
  return done.stdout.decode().strip()


def rows() -> dict[tuple[str, str], list[str]]:
  """The rows of the page, by step and Python."""
  if not os.path.exists(PAGE):
    return {}
  with open(PAGE) as file:
    lines = [line for line in file.read().split("\n") if line.startswith("| ")]
  cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
  return {(row[0], row[1]): row for row in cells}


def counts(report: str) -> str:
  """`4036 passed, 97 failed, 36 skipped` of a report that pytest wrote."""
  found = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
  for case in xml.parse(report).iter("testcase"):
    kinds = {child.tag for child in case}
    kind = "failed" if "failure" in kinds else "errors" if "error" in kinds else "skipped"
    found[kind if kinds & {"failure", "error", "skipped"} else "passed"] += 1
  return ", ".join(f"{n} {kind}" for kind, n in found.items() if n)


def write(step: str, python: str, status: str, seconds: str, report: str = "") -> None:
  """Replaces the row of a step."""
  result = "ok" if status == "0" else "FAILED"
  if report and os.path.exists(report):
    result += f": {counts(report)}"
  changed = git("status", "--porcelain", "--untracked-files=no", ":!tests/LAST_NIGHTLY.md")
  commit = git("rev-parse", "--short=10", "HEAD") + (" and changes" if changed else "")
  today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
  table = rows() | {(step, python): [step, python, commit, today, result, f"{int(seconds) / 60:.0f}"]}
  with open(PAGE, "w") as file:
    file.write(HEAD + "".join(f"| {' | '.join(cells)} |\n" for _, cells in sorted(table.items())))


def age() -> None:
  """Prints one line for the steps that ran too long ago, or that the age of all is below the limit."""
  if not rows():
    print("last nightly: never. Fix: make nightly, and commit tests/LAST_NIGHTLY.md")
    return
  ages = {key: git("rev-list", "--count", f"{row[2].split()[0]}..HEAD") for key, row in rows().items()}
  old = [" on ".join(key) for key, n in ages.items() if not n or int(n) > LIMIT]
  if old:
    fix = "Fix: make nightly, before an issue is resolved"
    print(f"last nightly: over {LIMIT} commits ago: {', '.join(old)}. {fix}")
  else:
    ago = max(map(int, ages.values()))
    print(f"last nightly: each step at most {ago} commits ago (tests/LAST_NIGHTLY.md)")


if __name__ == "__main__":
  {"write": write, "age": age}[sys.argv[1]](*sys.argv[2:])
