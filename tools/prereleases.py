"""Runs the tests on pre-releases of jax and flax, where the index has newer ones than what is installed.

`prereleases.py PYTHON VENV [ARGUMENTS of pytest]`, by the Python of an environment with the usual versions.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

PACKAGES = ("jax", "jaxlib", "flax")


def newest(package: str) -> Version | None:
  """The newest version on the index, pre-releases too; None where the index cannot be asked."""
  command = [sys.executable, "-m", "pip", "index", "versions", "--pre", package]
  done = subprocess.run(command, capture_output=True, text=True)
  try:
    return Version(done.stdout.split("(")[1].split(")")[0])  # the first line is "jax (0.12.0)"
  except (IndexError, InvalidVersion):
    return None


def main() -> int:
  """Makes the environment and runs pytest in it; 0 where there is nothing to try."""
  python, venv, *arguments = sys.argv[1:]
  found = {package: newest(package) for package in PACKAGES}
  if None in found.values():
    print("pre-releases: skipped, pip cannot ask an index here")
    return 0
  newer = {
    package: version
    for package, version in found.items()
    if version and version.is_prerelease and version > Version(metadata.version(package))
  }
  if not newer:
    here = ", ".join(f"{package} {metadata.version(package)}" for package in PACKAGES)
    print(f"pre-releases: skipped, the index has none newer than {here}")
    return 0
  setup = Path(__file__).with_name("setup_venv.py")
  subprocess.run([python, str(setup), venv, "test"], check=True)
  pins = [f"{package}=={version}" for package, version in newer.items()]
  print("pre-releases:", *pins, flush=True)
  subprocess.run([f"{venv}/bin/python", "-m", "pip", "install", "-q", "--pre", *pins], check=True)
  return subprocess.run([f"{venv}/bin/python", "-m", "pytest", *arguments]).returncode


if __name__ == "__main__":
  sys.exit(main())
