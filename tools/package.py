"""Builds the wheel and the sdist, checks what is in them, and tries the wheel in empty environments.

Run by `make package`, in an environment that has `build` and `twine`. It publishes nothing. For each Python
that `.ci/pythons` finds, it does what a new user does, outside of the checkout: it installs the wheel, with
the newest versions of what the wheel needs, and runs the code of README.md, the demo, and examples of the
sdist.

  .venv/bin/python tools/package.py               every Python
  .venv/bin/python tools/package.py python3.13    this one
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
EXTRAS = "digits,safetensors"  # what the examples need
WHEEL = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
SDIST = {"PKG-INFO", "setup.cfg"} | {
  f"nnx_parallel.egg-info/{name}"
  for name in (
    "PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt", "top_level.txt",
  )
}  # fmt: skip
BESIDE = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}


def run(command: list[str | Path], **options: object) -> str:
  """Runs a command and returns what it printed; stops with that when it fails."""
  words = [str(word) for word in command]
  output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 1800}
  done = subprocess.run(words, **output, **options)
  if done.returncode != 0:
    sys.exit(f"{done.stdout}\nexit code {done.returncode} of: {' '.join(words)}")
  return done.stdout


def build() -> tuple[Path, Path]:
  """Makes an empty dist/, and the sdist and the wheel in it; the wheel is built from the sdist."""
  shutil.rmtree(DIST, ignore_errors=True)
  run([sys.executable, "-m", "build", "--outdir", DIST, ROOT])
  files = sorted(DIST.iterdir())
  run([sys.executable, "-m", "twine", "check", "--strict", *files])
  (wheel,), (sdist,) = ([f for f in files if f.name.endswith(end)] for end in (".whl", ".tar.gz"))
  return wheel, sdist


def check_files(wheel: Path, sdist: Path) -> None:
  """Lists what is in both files, and stops if something is missing or does not belong there."""
  tracked = run(["git", "ls-files"], cwd=ROOT).splitlines()
  package = {name for name in tracked if name.startswith("nnx_parallel/")}
  examples = {name for name in tracked if name.startswith("examples/")}
  with zipfile.ZipFile(wheel) as archive:
    inside = {name for name in archive.namelist() if not name.endswith("/")}
    (metadata,) = (name for name in inside if name.endswith(".dist-info/METADATA"))
    described = archive.read(metadata).decode()
  info = metadata.removesuffix("METADATA")
  compare(wheel, inside, package | {info + name for name in WHEEL})
  with tarfile.open(sdist) as archive:
    inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
  compare(sdist, inside, package | examples | BESIDE | SDIST)
  if relative := re.findall(r"\]\((?!https?:|#)[^)]*\)", described):
    sys.exit(f"the description in {wheel.name} has relative links: {relative}")


def compare(file: Path, inside: set[str], wanted: set[str]) -> None:
  """Prints the files of an archive, by folder, and stops if they are not the wanted ones."""
  folders = collections.Counter("/".join(name.split("/")[:-1][:2]) or "." for name in inside)
  print(f"{file.name}: {len(inside)} files, {file.stat().st_size / 1e6:.2f} MB")
  print("  " + ", ".join(f"{folder} {count}" for folder, count in sorted(folders.items())))
  if inside != wanted:
    sys.exit(
      f"{file.name} is not what it should be (tracked files of the package; see tools/package.py).\n"
      f"  does not belong: {sorted(inside - wanted)}\n  missing: {sorted(wanted - inside)}"
    )


def first_minutes(python: str | Path, wheel: Path, sdist: Path, folder: Path) -> None:
  """Does what a new user does, in an empty environment and an empty folder; prints what took how long."""
  own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
  # Threads for XLA's pool: simulated devices that wait for each other hold one each.
  environment = own | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "64"}
  bin = folder / "venv" / "bin"

  def step(what: str, *command: str | Path, show: str = "") -> None:
    began = time.perf_counter()
    printed = run([*command], cwd=folder, env=environment)
    found = re.findall(show, printed, re.MULTILINE) if show else [""]
    if not found:
      sys.exit(f"{printed}\n{what} printed nothing like {show!r}")
    print(f"  {time.perf_counter() - began:5.0f} s  {what}{'  ' if show else ''}{found[-1]}", flush=True)

  step("an empty environment", python, "-m", "venv", "venv")
  step("pip install the wheel", bin / "python", "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]")
  where = (
    "import nnx_parallel, jax, flax; from importlib.metadata import version;"
    " print(nnx_parallel.__file__); print('nnx-parallel', version('nnx-parallel'), 'jax', jax.__version__,"
    " 'flax', flax.__version__)"
  )
  step("the installed files", bin / "python", "-c", where, show=rf"^{folder}/venv/.*\n(nnx-parallel .*)")
  with tarfile.open(sdist) as archive:
    archive.extractall(folder, filter="data")
  python, examples = bin / "python", folder / sdist.name.removesuffix(".tar.gz") / "examples"
  step("README.md", python, ROOT / "guides/run.py", "--here", ROOT / "README.md", show=r"^\['0.*")
  step("tiny_checkpoint.py", python, examples / "tiny_checkpoint.py")
  step("finetune.py 20", python, examples / "finetune.py", "20", show=r"^step 20/20  loss [\d.]+")
  step("finetune.py 30", python, examples / "finetune.py", "30", show="^.*resumed from step 20")
  step("vision_transformer.py", python, examples / "vision_transformer.py", show=r"eval_accuracy [\d.]+")
  step("make demo", python, ROOT / "tools/demo.py", show="^restored on .*")


def main(pythons: list[str]) -> None:
  wheel, sdist = build()
  check_files(wheel, sdist)
  found = pythons or [line.split()[1] for line in run([ROOT / ".ci" / "pythons"]).splitlines()]
  for python in found:
    print(run([python, "--version"]).strip(), flush=True)
    with tempfile.TemporaryDirectory(prefix="nnx-parallel-") as folder:
      first_minutes(python, wheel, sdist, Path(folder).resolve())
  print(f"{wheel.name} and {sdist.name}: ok on {len(found)} Pythons. Nothing was published.")


if __name__ == "__main__":
  main(sys.argv[1:])
