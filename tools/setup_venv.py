"""Makes a virtual environment that holds this project and its pinned dependencies, once.

Run by `make` with any Python, before anything is installed: only the standard library is used, and
the syntax stays old enough for a Python that is too old to read it and be told so. Nothing is done
when the environment already holds what pyproject.toml and the constraints ask for.

  python3 tools/setup_venv.py .venv test
  python3 tools/setup_venv.py .venv test lint
"""

import hashlib
import os
import subprocess
import sys

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOWNLOAD_MB = 200  # what pip fetches for an empty environment with an empty cache


def constraints_file(version: tuple) -> str:
  """The pins for a Python version: 3.11 is the oldest, every other one gets the newest."""
  return os.path.join(ROOT, "constraints", "py311.txt" if version == (3, 11) else "newest.txt")


def dotted(version: tuple) -> str:
  """`(3, 11)` as people write it."""
  return ".".join(str(part) for part in version)


def fingerprint(version: tuple, extras: list) -> str:
  """Changes when the environment must be set up again."""
  digest = hashlib.sha256(repr((ROOT, version, extras)).encode())
  for path in (os.path.join(ROOT, "pyproject.toml"), constraints_file(version)):
    with open(path, "rb") as file:
      digest.update(file.read())
  return digest.hexdigest()


def run(command: list, what: str) -> None:
  """Runs a command silently; shows all it said when it fails."""
  result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
  if result.returncode != 0:
    sys.stderr.write(result.stdout.decode(errors="replace"))
    sys.exit(f"{what} failed (above); the command was:\n  {' '.join(command)}")


def check_same_python(venv: str, python: str, version: tuple) -> None:
  """Stops when the environment belongs to another Python; deleting it is the user's decision."""
  code = "import sys; print('%d.%d' % sys.version_info[:2])"
  found = subprocess.run([python, "-c", code], stdout=subprocess.PIPE).stdout.decode().strip()
  wanted = dotted(version)
  if found != wanted:
    sys.exit(
      f"{venv} holds Python {found or '(broken)'}, but Python {wanted} was asked for.\n"
      f"  Fix: use a second one (make ... VENV=.venv-{wanted}), or delete this one (make clean)."
    )


def stamp_of(venv: str) -> str:
  """The file in an environment that says for which fingerprints it is up to date."""
  return os.path.join(venv, "nnx-parallel-setup")


def is_set_up(venv: str, wanted: str) -> bool:
  """Whether the stamp of an environment has a fingerprint, and no set-up is under way or was interrupted."""
  if not os.path.exists(stamp_of(venv)) or os.path.exists(stamp_of(venv) + ".unfinished"):
    return False
  with open(stamp_of(venv)) as file:
    return wanted in file.read().split()


def setup(venv: str, extras: list) -> None:
  """Makes or refreshes the environment, unless its stamp says that it is up to date."""
  version = tuple(sys.version_info[:2])
  python = os.path.join(venv, "bin", "python")
  stamp = stamp_of(venv)
  unfinished = stamp + ".unfinished"
  if os.path.lexists(python) and not os.path.exists(unfinished):
    check_same_python(venv, python, version)
  if is_set_up(venv, fingerprint(version, extras)):
    return
  if os.path.exists(stamp):
    print(f"refreshing {venv}", flush=True)
  else:
    print(
      f"setting up {venv} with Python {dotted(version)} (once; fetches about {DOWNLOAD_MB} MB,"
      " takes a minute or two)",
      flush=True,
    )
  # A set-up that was interrupted starts over: half-installed packages cannot be repaired by pip.
  clear = ["--clear"] if os.path.exists(unfinished) else []
  run([sys.executable, "-m", "venv", *clear, venv], "making the environment")
  open(unfinished, "w").close()
  pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
  pip += ["--constraint", constraints_file(version)]
  # The build backend is installed first and pinned like the rest, instead of being fetched by pip
  # in its newest version for each build.
  run([*pip, "setuptools"], "installing the build backend")
  target = f"{ROOT}[{','.join(extras)}]"
  run([*pip, "--no-build-isolation", "--editable", target], f"installing {target}")
  with open(stamp, "w") as file:
    # The larger set of extras also serves every smaller one.
    file.write("\n".join(fingerprint(version, extras[:n]) for n in range(1, len(extras) + 1)))
  os.remove(unfinished)


def main() -> None:
  """Checks the Python that runs this, then sets up under a lock: two `make` may run at once.

  An environment that is up to date needs no lock, which another one may hold for minutes.
  """
  if sys.version_info < OLDEST:
    sys.exit(
      f"nnx-parallel needs Python {dotted(OLDEST)} or newer, but {sys.executable} is Python"
      f" {dotted(sys.version_info[:3])}.\n"
      "  Fix: name a newer one, for example: make test PYTHON=python3.13"
    )
  try:
    import ensurepip  # noqa: F401
    import fcntl
    import venv  # noqa: F401
  except ImportError as error:
    sys.exit(
      f"{sys.executable} cannot make virtual environments ({error}).\n"
      "  Fix: install its venv package (Debian, Ubuntu: apt install python3-venv), or name another"
      " Python: make test PYTHON=python3.13"
    )
  if is_set_up(sys.argv[1], fingerprint(tuple(sys.version_info[:2]), sys.argv[2:])):
    return
  with open(os.path.abspath(__file__)) as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    setup(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
  main()
