"""The launcher ends all that it started, shows the first failure first, and starts again."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import nnx_parallel as nxp
from nnx_parallel.cli.command import main
from nnx_parallel.cli.launch import command_of
from nnx_parallel.hosts.launch import Job, launch, worker_variables
from searches import driver, soak

ROOT = Path(__file__).resolve().parents[2]


def python(body: str) -> list[str]:
  setup = "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
  return [sys.executable, "-c", setup + textwrap.dedent(body)]


def launched(body: str, **options) -> tuple[int, list[str]]:
  lines: list[str] = []
  code = launch(Job(python(body), **({"processes": 2} | options)), lines.append)
  return code, lines


def alive(pid: int) -> bool:
  try:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
  except (FileNotFoundError, ProcessLookupError):
    return False


def wait_until(condition, seconds=10.0):
  until = time.monotonic() + seconds
  while not condition() and time.monotonic() < until:
    time.sleep(0.02)
  return condition()


def test_each_process_knows_its_number_and_lines_have_it_in_front():
  code, lines = launched(
    """
    print(rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"])
    print("no newline", end="")
    """,
    processes=3,
  )
  wanted = [f"[{n}] {text}" for n in range(3) for text in (f"{n} 3 {n} 127.0.0.1", "no newline")]
  assert (code, sorted(lines)) == (0, sorted(wanted))


def test_the_first_failure_ends_the_others_and_is_named_behind_its_last_lines():
  code, lines = launched("""
    signal.signal(signal.SIGTERM, lambda *_: (print("what follows"), time.sleep(60)))
    if rank == 1:
      time.sleep(0.3)
      print("the reason")
      sys.exit(7)
    time.sleep(60)
  """)
  assert code == 7
  assert lines[0] == "[1] the reason"
  assert lines[1].startswith("-- process 1 failed first: exit code 7 after ")
  assert lines[2:] == ["[0] what follows"]


def test_the_process_that_raised_first_is_named_although_another_ends_first():
  code, lines = launched("""
    import traceback
    if rank == 1:
      try:
        raise ValueError("a bad shard")
      except ValueError:
        traceback.print_exc()  # and waits for the others, as jax does at exit
        time.sleep(60)
    time.sleep(1.0)
    print("Gloo: connection closed by peer")
    os.abort()
  """)
  assert code == 1
  text = "\n".join(lines)
  assert "-- process 1 failed first: it raised an error, and waits for the others after " in text
  assert "-- process 0 failed first" not in text
  first, second = text.index("-- process 1, "), text.index("-- process 0, killed by SIGABRT, failed after")
  assert first < text.index("--   ValueError: a bad shard") < second
  assert text.index("--   Gloo: connection closed by peer") > second


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_comes_before_its_peers_that_end_at_the_same_time(killed, monkeypatch):
  monkeypatch.setattr("nnx_parallel.hosts.launch.LOOK_S", 2)  # so that both have ended at the first look
  code, lines = launched(f"""
    if rank != {killed}:
      time.sleep(0.3)
      sys.exit(1)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
  """)
  assert code == 137
  assert any(line.startswith(f"-- process {killed} failed first: killed by SIGKILL") for line in lines)


def test_a_launcher_without_stdin():
  """As under cron, or in a daemon."""
  command = [sys.executable, "-m", "nnx_parallel", "launch", "-n", "1", "--", "echo", "hi"]
  done = subprocess.run(
    ["sh", "-c", 'exec "$@" <&-', "sh", *command], cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  assert (done.returncode, done.stdout) == (0, "[0] hi\n"), done.stderr


def test_children_of_a_process_that_ended_well_are_ended(tmp_path):
  file = tmp_path / "pid"
  body = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open({str(file)!r}, "w").write(str(child.pid))
  """
  code, _ = launched(body, processes=1)
  assert code == 0
  assert wait_until(lambda: not alive(int(file.read_text())))


def test_restarts_have_a_budget_and_a_pause_that_doubles():
  started = time.monotonic()
  code, lines = launched("sys.exit(5)", processes=1, restarts=3, pause=0.1)
  assert code == 5
  restarts = [line for line in lines if "restart" in line]
  wanted = [f"-- restart {n} of 3 in {pause} s" for n, pause in enumerate((0.1, 0.2, 0.4), 1)]
  assert restarts == [*wanted, "-- no restart is left of 3"]
  assert time.monotonic() - started > 0.7


def test_the_process_that_is_behind_is_named_when_no_step_is_made(tmp_path):
  code, lines = launched(
    f"""
    from pathlib import Path
    gate = Path({str(tmp_path)!r})
    (gate / str(rank)).touch()
    while len([*gate.iterdir()]) < 2:
      time.sleep(0.02)
    for step in range(1, 4 if rank == 0 else 3):
      Path(os.environ["NNX_PARALLEL_HEARTBEAT"]).write_text(str(step))
    time.sleep(60)
    """,
    hang_after=0.5,
  )
  assert code == 1
  assert lines[0].startswith("-- process 1 hangs: no step for 0.5 s; last steps {0: 3, 1: 2} after ")


STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: print("saving"))
print("ready", os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
until = time.time() + 60
while time.time() < until:
  time.sleep(0.05)
"""


def start(*options: str, body: str = STUBBORN) -> tuple[subprocess.Popen[str], list[int]]:
  """A launcher of two processes, and the numbers of them and their children, once they are ready."""
  command = [sys.executable, "-m", "nnx_parallel", "launch", "-n", "2", *options, "--", *python(body)]
  variables = {**os.environ, "PYTHONPATH": str(ROOT)}
  launcher = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
  lines = [launcher.stdout.readline() for _ in range(2)]
  return launcher, [int(word) for line in lines for word in line.split()[2:]]


def ended(launcher: subprocess.Popen[str], pids: list[int]) -> str:
  """What it printed; nothing of it is left."""
  output, _ = launcher.communicate(timeout=20)
  assert wait_until(lambda: not any(map(alive, pids))), [pid for pid in pids if alive(pid)]
  return output


def test_a_killed_launcher_leaves_no_orphan():
  launcher, pids = start()
  assert len(pids) == 4
  assert all(map(alive, pids))
  launcher.kill()
  ended(launcher, pids)


def test_sigterm_is_passed_on_and_then_force_comes():
  launcher, pids = start("--grace", "0.5")
  launcher.terminate()
  output = ended(launcher, pids)
  assert launcher.returncode == 143
  assert output.splitlines()[0] == "-- SIGTERM: passed on"
  assert {"[0] saving", "[1] saving"} <= set(output.splitlines())


def test_the_second_interrupt_ends_at_once():
  launcher, pids = start("--grace", "60")
  launcher.send_signal(signal.SIGINT)
  assert launcher.stdout.readline() == "-- SIGINT: passed on\n"
  launcher.send_signal(signal.SIGINT)
  assert "-- ending at once" in ended(launcher, pids)
  assert launcher.returncode == 130


def test_the_variables_of_a_process():
  given = {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=8", "RANK": "7", "MASTER_ADDR": "node0"}
  found = worker_variables(Job([], processes=2, devices_per_process=4), 1, 1234, given)
  assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("1", "2", "1234")
  assert (found["XLA_FLAGS"], found["JAX_NUM_CPU_DEVICES"], found["JAX_PLATFORMS"]) == ("--a", "4", "cpu")
  found = worker_variables(Job([], cluster=True), 0, 1234, given)
  assert (found["RANK"], found["MASTER_ADDR"], found["XLA_FLAGS"]) == ("7", "node0", given["XLA_FLAGS"])
  assert "WORLD_SIZE" not in found


def test_what_is_started(tmp_path):
  recipe, script = tmp_path / "recipe.py", tmp_path / "script.py"
  recipe.write_text("def init(): ...\ndef loss(m, b): ...\ndef batches(s=0, *, split=''): ...\n")
  script.write_text("print(1)\n")
  train = ["-m", "nnx_parallel", "train"]
  assert command_of(["text_lm", "--steps", "5"])[1:] == [*train, "text_lm", "--steps", "5"]
  assert command_of(["train", str(recipe), "--steps", "5"])[1:] == [*train, str(recipe), "--steps", "5"]
  assert command_of([str(recipe), "-x"]) == [sys.executable, str(recipe), "-x"]  # whatever it defines
  assert command_of([str(script), "-x"]) == [sys.executable, str(script), "-x"]
  assert command_of([sys.executable, "-m", "mine"]) == [sys.executable, "-m", "mine"]
  with pytest.raises(nxp.errors.RecipeError, match="there is no file"):
    command_of([str(tmp_path / "none.py")])


@pytest.mark.parametrize(("words", "message"), [
  ([], "no recipe and no script"),
  (["--cluster", "-n", "2", "--", "text_lm"], "--cluster starts one process"),
  (["--restarts", "-1", "--", "text_lm"], "cannot be negative"),
  (["--restarts", "1", "--", "text_lm"], "add --checkpoint DIR"),
])  # fmt: skip
def test_wrong_usage(words, message, capsys):
  with pytest.raises(SystemExit) as caught:
    main(["launch", *words])
  assert caught.value.code == 2
  assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_ends_with_the_losses_of_an_undisturbed_one(tmp_path, monkeypatch):
  # The long form, with bad disks, damaged steps and second jobs, is `make soak`.
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("NNX_PARALLEL_SOAK", "")
  monkeypatch.delenv("XLA_FLAGS")
  given = driver.arguments(soak, ["--kills", "1", "--steps", "60"])
  run, done = soak.soak(given, 1, tmp_path)
  assert run.problems == []
  assert (done.total(), run.restarts) == (1, 1)
