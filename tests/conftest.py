"""Eight simulated CPU devices, strict numerics and a cache of compiled programs for every test.

The environment is set before anything imports jax, because jax reads it once. On a machine with a GPU,
`NXP_TEST_PLATFORM=cuda pytest tests/layers/test_cudnn.py` runs the tests that need one.
"""

import argparse
import functools
import gc
import hashlib
import inspect
import os
import platform
import re
import signal
from collections.abc import Callable, Generator, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

DEVICES = 8
FLAG = "--xla_force_host_platform_device_count"

PLATFORM = os.environ.get("NXP_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = PLATFORM
others = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(FLAG)]
# A collective holds one thread of XLA's pool for each simulated device that waits. Where the pool is as small
# as a small machine, all its threads can wait for a device that has none: XLA ends the process after a
# while. NPROC is what XLA takes for the number of cores.
os.environ["NPROC"] = "64"
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# Half of the time that XLA takes to compile goes into loops whose speed no test needs. Each version of XLA
# has its own flag for that, and ends the process for one that it does not have.
SIMPLE_LOOPS = (
  "--xla_cpu_opt_preset=FAST_COMPILE"
  if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) >= (0, 12)
  else "--xla_cpu_use_fusion_emitters=false"
)
# readline, which pytest loads, hands the terminal's size on to the workers: tables would take it.
os.environ.pop("COLUMNS", None)
if PLATFORM == "cpu":
  os.environ["XLA_FLAGS"] = " ".join([*others, f"{FLAG}={DEVICES}", PATIENCE, SIMPLE_LOOPS])


def processor() -> str:
  """Names this kind of processor: a program that is compiled for one need not run on another."""
  cpuinfo = Path("/proc/cpuinfo")
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
  return hashlib.sha256(features.encode()).hexdigest()[:8]


# Compilation is half of the suite's processor time. A program is compiled once for all tests, for the
# processes that they start, and for later runs; an entry is found by program, flags and jaxlib.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nnx_parallel-tests" / processor()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# LLVM's optimizations cost a quarter of the suite's processor time, and its programs run for milliseconds.
# XLA's passes, its partitioner among them, are as users have them. tests/create, and guides in nightly runs,
# have all.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"

# A shell that starts tests in the background makes them, and the processes that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# jax's caches keep most objects alive, and to look for cycles among them takes a tenth of the suite's time.
gc.set_threshold(100_000, 20, 50)

import jax  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

import leaks  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def relaxed(update: Callable[..., Any]) -> Callable[..., Any]:
  @functools.wraps(update)
  def wrapper(*args: Any, **kwargs: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
      return update(*args, **kwargs)

  return wrapper


def relax_optax() -> None:
  """Lets optax promote dtypes inside its own updates, and nothing else.

  Adam's bias correction, the cosine schedule and MultiSteps mix Python floats with an int32 count,
  which strict promotion refuses (optax 0.2.8).
  """
  make = optax.GradientTransformation.__new__
  optax.GradientTransformation.__new__ = lambda cls, init, update: make(cls, init, relaxed(update))
  optax.MultiSteps.update = relaxed(optax.MultiSteps.update)


relax_optax()


def pytest_addoption(parser: pytest.Parser) -> None:
  first = "what `make test` runs: one case of each test that is not slow or nightly, and the everyday ones"
  parser.addoption("--first", action="store_true", help=first)
  rest = "what `.ci/run` adds to `make test`: all that is not nightly and that --first leaves out"
  parser.addoption("--rest", action="store_true", help=rest)
  part = "K/N: the K-th of N shares of the files, of about equally many cases"
  parser.addoption("--part", metavar="K/N", type=read_part, help=part)
  explicit = "meshes have Explicit axes, as of jax.make_mesh, where a test does not say which"
  parser.addoption("--explicit", action="store_true", help=explicit)


def pytest_configure(config: pytest.Config) -> None:
  if config.getoption("explicit"):
    from nnx_parallel.core.mesh import make_mesh  # here, since tests look at what an import does

    inspect.unwrap(make_mesh).__kwdefaults__["explicit"] = True


def by_test(items: list[pytest.Item]) -> Iterable[list[pytest.Item]]:
  """The cases of each test."""
  found: dict[str, list[pytest.Item]] = {}
  for item in items:
    found.setdefault(item.nodeid.split("[")[0], []).append(item)
  return found.values()


def has(item: pytest.Item, *marks: str) -> bool:
  return any(item.get_closest_marker(mark) for mark in marks)


def choose_first(items: list[pytest.Item]) -> set[pytest.Item]:
  """What `--first` selects."""
  chosen: set[pytest.Item] = set()
  for cases in by_test(items):
    quick = [item for item in cases if not has(item, "slow", "nightly")]
    chosen.update(item for item in quick if item is quick[0] or has(item, "each_case"))
    chosen.update(item for item in cases if has(item, "everyday"))
  return chosen


def read_part(text: str) -> tuple[int, int]:
  found = re.fullmatch(r"(\d+)/(\d+)", text)
  if found is None or not 1 <= int(found[1]) <= int(found[2]):
    raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, such as 1/4")
  return int(found[1]), int(found[2])


def share(items: list[pytest.Item], part: tuple[int, int]) -> set[pytest.Item]:
  """The items of the files of one share; the fullest file goes to the emptiest share."""
  number, count = part
  files: dict[Path, list[pytest.Item]] = {}
  for item in items:
    files.setdefault(item.path, []).append(item)
  shares: list[list[pytest.Item]] = [[] for _ in range(count)]
  for cases in sorted(files.values(), key=len, reverse=True):
    min(shares, key=len).extend(cases)
  return set(shares[number - 1])


LEFT_OUT = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Marks the cases beyond `cases(n)` as nightly, then selects; `-m` and `-k` select from the rest."""
  for cases in by_test(items):
    if mark := cases[0].get_closest_marker("cases"):
      for k, item in enumerate(cases):
        if k * mark.args[0] % len(cases) >= mark.args[0]:
          item.add_marker("nightly")
  kept = set(items)
  if config.getoption("first"):
    kept = choose_first(items)
  elif config.getoption("rest"):
    kept = {item for item in items if not has(item, "nightly")} - choose_first(items)
  if config.getoption("explicit"):
    kept = {item for item in kept if not has(item, "auto_axes")}
  if part := config.getoption("part"):
    kept &= share(items, part)
  if config.getoption("first"):
    left = [item for item in items if item not in kept]
    slow, nightly = (sum(has(item, mark) for item in left) for mark in ("slow", "nightly"))
    more = len(left) - sum(has(item, "slow", "nightly") for item in left)
    text = f"left out: {slow} slow cases, {nightly} nightly ones, {more} further cases of quick tests"
    config.stash[LEFT_OUT] = f"{text}. Fix: make test-all"
    if hasattr(config, "workeroutput"):
      config.workeroutput["left_out"] = config.stash[LEFT_OUT]
  if left := [item for item in items if item not in kept]:
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
  """Takes what a worker has left out; each leaves out the same."""
  node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", "")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
  if text := config.stash.get(LEFT_OUT, ""):
    terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Generator[None]:
  """Fails a test that leaves a mesh, a setting or a thread for the tests after it; see `leaks.py`."""
  before = leaks.read()
  yield
  if left := leaks.left_since(before):
    leaks.take_back(before)
    pytest.fail(
      "this test leaves something behind for the tests after it:\n  " + "\n  ".join(left), pytrace=False
    )


@pytest.fixture
def as_users_have_it() -> Generator[None]:
  """jax's own promotion, for models that are as people write them."""
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture
def compiled_here() -> Generator[None]:
  """Compiles each program instead of loading it, for programs with several collectives at a time.

  The collectives of a program that XLA's CPU backend has loaded may wait for each other for ever. With jaxlib
  0.12.0 they did in 5 of 6 processes that ran a pipeline over fsdp and tensor axes up to twelve times, and
  compiled in none of 5.
  """
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", True)
  compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> list[jax.Device]:
  """All simulated devices; without them most tests would pass for the wrong reason."""
  devices = jax.devices()
  if PLATFORM == "cpu" and len(devices) != DEVICES:
    pytest.exit(f"the tests need {DEVICES} simulated devices, found {devices}", returncode=3)
  return devices
