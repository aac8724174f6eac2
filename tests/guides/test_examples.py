"""Each example trains on 8 simulated devices, and continues from what it saved when it is started again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(folder: Path, *command: object) -> str:
  """What a command prints, in a process of its own with 8 simulated devices."""
  # NPROC: threads for XLA's pool. Simulated devices that wait for each other hold one each.
  variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "NPROC": "64", "PYTHONPATH": str(ROOT)}
  variables["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
  words, out = [sys.executable, *map(str, command)], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  done = subprocess.run(words, env={**os.environ, **variables}, cwd=folder, text=True, **out)
  assert done.returncode == 0, done.stdout
  return done.stdout


def losses(printed: str) -> dict[int, float]:
  """The loss of each step that a run has printed."""
  return {int(n): float(loss) for n, loss in re.findall(r"step +(\d+)/\d+ +loss ([\d.]+)", printed)}


def check(first: str, second: str, steps: int) -> None:
  """The first run learned, and the second one went on."""
  before, after = losses(first), losses(second)
  assert list(before)[-1] == steps
  assert before[steps] < 0.9 * before[1]
  assert f"resumed from step {steps}" in second
  assert min(after) == steps + 1
  assert min(after.values()) < before[1]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "steps", "again"),
  [
    ("language_model", 8, ["--tensor", "2"]),  # on another mesh
    ("vision_transformer", 20, []),
    ("mixture_of_experts", 8, []),
    ("distillation", 120, []),  # the teacher has 100 steps, so the last loss of each step is the student's
    ("lora", 6, []),
  ],
)
def test_an_example_learns_and_continues(tmp_path, name, steps, again):
  if name in ("vision_transformer", "distillation"):
    pytest.importorskip("sklearn")
  script = EXAMPLES / f"{name}.py"
  first = run(tmp_path, script, "--steps", steps)
  second = run(tmp_path, script, "--steps", steps + 2, *again)
  check(first, second, steps)
  assert "Involuntary full rematerialization" not in first + second
  if name == "lora":
    files = {file.name for file in (tmp_path / "runs/lora" / f"peft-{steps}").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
  if name == "vision_transformer":
    assert "eval_accuracy" in first


def test_the_table_lists_each_file_and_a_script_is_short():
  table = (EXAMPLES / "README.md").read_text()
  for file in EXAMPLES.iterdir():
    if file.is_file() and file.name != "README.md":
      assert f"]({file.name})" in table
      assert len(file.read_text().splitlines()) <= 100
