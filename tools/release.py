"""Makes a release ready, and stops before the upload.

  make release VERSION=0.1.0rc1

It checks what a release must have: a clean tree on `main`, this version in the package, a dated section for
it in CHANGELOG.md, and a recent nightly run. Then it does what `make package` does: it builds the wheel and
the sdist, and tries the wheel in an empty environment of each Python. It ends with the command that
tags, for a maintainer to run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import package

ROOT = package.ROOT


def git(*words: str) -> str:
  return subprocess.run(["git", *words], cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()


def find_obstacles(version: str) -> Iterator[str]:
  """Yields what stands in the way of this version, and how to mend it."""
  if git("status", "--porcelain"):
    yield "the tree has changes that are not committed.  Fix: git commit"
  if (branch := git("rev-parse", "--abbrev-ref", "HEAD")) != "main":
    yield f"this is {branch}.  Fix: git switch main"
  if f"v{version}" in git("tag", "--list").split():
    yield f"the tag v{version} exists.  Fix: another VERSION"
  found = re.search(r'^__version__ = "(.+)"', (ROOT / "nnx_parallel/__init__.py").read_text(), re.MULTILINE)
  if found is None or found[1] != version:
    yield f"nnx_parallel.__version__ is {found and found[1]}.  Fix: set it to {version}"
  if not re.search(
    rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
  ):
    yield f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'.  Fix: name the section Unreleased so"
  nightly = subprocess.run(
    [sys.executable, ROOT / "tools/last_nightly.py", "age"], capture_output=True, text=True, check=False
  )
  if "Fix:" in nightly.stdout:
    yield nightly.stdout.strip()


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("which version?  Fix: make release VERSION=0.1.0rc1")
  (version,) = sys.argv[1:]
  if obstacles := [*find_obstacles(version)]:
    sys.exit("\n".join([f"{version} is not ready:", *(f"  {one}" for one in obstacles)]))
  package.main([])
  print(
    f"\n{version} is ready in dist/. Nothing is tagged or uploaded yet; the tag starts"
    " .github/workflows/release.yml, which tests again and uploads:\n"
    f"  git tag -a v{version} -m 'nnx_parallel {version}' && git push origin v{version}"
  )


if __name__ == "__main__":
  main()
