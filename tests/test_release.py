"""What `make release` asks of a release, before it builds anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_parallel as nxp

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "release.py"

MISSING = {
  (): ["which version?  Fix: make release VERSION=0.1.0rc1"],
  ("9.9.9",): ["9.9.9 is not ready:", "nnx_parallel.__version__ is 0.", "Fix: set it to 9.9.9",
               "CHANGELOG.md has no section '## [9.9.9] - YYYY-MM-DD'"],
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), MISSING.items())
def test_a_release_that_is_not_ready_says_what_is_missing(words, said):
  command = [sys.executable, TOOL, *words]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 1
  assert all(one in done.stderr for one in said), done.stderr


def test_the_version_stands_in_each_place():
  version = nxp.__version__
  assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
  assert re.search(rf"^## \[{re.escape(version)}\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
  text = (ROOT / ".github/workflows/release.yml").read_text()
  command = ["sh", "-c", re.search(r"the version of the package\n +run: (.+)", text)[1]]
  for tag, code in ((f"v{version}", 0), (f"v{version}1", 1), (version.replace(".", "x"), 1)):
    variables = {**os.environ, "GITHUB_REF_NAME": tag}
    assert subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode == code, tag
