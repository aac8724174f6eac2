"""Every command has help; errors become messages and exit codes."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from nnx_parallel import cli
from nnx_parallel.cli import command, options
from nnx_parallel.hosts.heartbeat import STOPPED


def run(*arguments, cwd=None):
  return subprocess.run(
    [sys.executable, "-m", "nnx_parallel", *arguments], capture_output=True, text=True, cwd=cwd, check=False
  )


COMMANDS = ["plan", "compile", "search", "train", "launch", "new", "diff"]
COMMANDS += ["export", "import", "inspect", "reshard", "verify"]


def test_every_command_has_help(capsys):
  assert cli.main([]) == 0
  listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
  assert listed == COMMANDS
  for name in COMMANDS:
    with pytest.raises(SystemExit) as caught:
      cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"nnx-parallel {name}" in capsys.readouterr().out


def test_help_and_the_guide_list_each_exit_code(capsys):
  codes = {command.OK, command.FAILED, 2, options.NO, STOPPED, command.INTERRUPTED, command.CUT_SHORT}
  guide = (Path(__file__).parents[2] / "guides/04-recipes.md").read_text()
  assert {int(code) for code in re.findall(r"^\| (\d+) \|", guide, re.MULTILINE)} == codes
  cli.main([])
  listed = capsys.readouterr().out.partition("Exit codes: ")[2]
  assert {int(code) for code in re.findall(r"\b\d+\b", listed)} == codes


def test_help_does_not_import_jax():
  script = "import sys\nfrom nnx_parallel.cli.command import make_parser\nmake_parser().format_help()\n"
  script += "sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [
  ["no_such_command"], ["plan"],
  ["plan", "text_lm", "--json", "--explain", "embed.embedding"], ["train", "text_lm", "--steps", "0"],
  ["train", "text_lm", "--steps", "many"], ["train", "text_lm", "--resume"],
  ["train", "text_lm", "--save-every", "5"],
])  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments, capsys):
  with pytest.raises(SystemExit) as caught:
    cli.main(arguments)
  assert caught.value.code == 2
  assert "usage: nnx-parallel" in capsys.readouterr().err


@pytest.mark.parametrize("like", ["text_lm", "digits"])
def test_a_new_recipe_is_a_copy_that_commands_take(like, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert cli.main(["new", "jobs/mine.py", "--like", like]) == 0
  assert f"jobs/mine.py is a copy of {like}; next:" in capsys.readouterr().out
  assert "jobs/mine.py --mesh" in (tmp_path / "jobs" / "mine.py").read_text()
  assert cli.main(["plan", "jobs/mine.py", "--mesh", "data=8"]) == 0
  capsys.readouterr()
  assert cli.main(["new", "jobs/mine.py"]) == 1
  assert "cannot write jobs/mine.py: File exists.\n  Fix: another FILE.\n" in capsys.readouterr().err
  assert cli.main(["new", "mine"]) == 1
  assert "Fix: nnx-parallel new mine.py" in capsys.readouterr().err
  assert cli.main(["new", "my job.py", "--like", like]) == 0
  assert "nnx-parallel train 'my job.py'\n" in capsys.readouterr().out
  assert cli.main(["new", "other.py", "--like", "txt"]) == 1
  assert "Fix: --like digits or starter or text_lm." in capsys.readouterr().err


def test_an_error_is_its_message_without_a_traceback(capsys):
  assert cli.main(["plan", "txt_lm"]) == 1
  shown = capsys.readouterr()
  assert shown.out == ""
  assert shown.err.startswith("RecipeError: no recipe named 'txt_lm'.\n  Fix: did you mean text_lm?")
  assert "Traceback" not in shown.err


def test_a_bug_keeps_its_traceback(monkeypatch):
  monkeypatch.setattr("nnx_parallel.recipes.load_recipe", lambda *a, **k: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    cli.main(["plan", "text_lm"])


def test_an_interrupt_is_exit_code_130(monkeypatch, capsys):
  def interrupted(*args, **kwargs):
    raise KeyboardInterrupt

  monkeypatch.setattr("nnx_parallel.recipes.load_recipe", interrupted)
  assert cli.main(["plan", "text_lm"]) == 130
  assert capsys.readouterr().err == "interrupted\n"


def test_plan_needs_no_devices(capsys):
  assert cli.main(["plan", "text_lm", "--mesh", "data=16,fsdp=64,tensor=4"]) == 0
  out = capsys.readouterr().out
  assert "mesh data=16 x fsdp=64 x tensor=4 = 4096 devices (abstract" in out
  assert "(fsdp, tensor)" in out


def test_the_answer_is_not_yes_when_the_reader_stops_before_it(monkeypatch):
  def cut(*_):
    raise BrokenPipeError

  monkeypatch.setattr(command.os, "dup2", lambda *_: None)
  monkeypatch.setattr(command.sys, "stdout", types.SimpleNamespace(flush=cut, fileno=lambda: 1))
  monkeypatch.setattr(command.new, "run", cut)
  assert cli.main(["new", "mine.py"]) == 141
  monkeypatch.setattr(command.new, "run", lambda _: 3)
  assert cli.main(["new", "mine.py"]) == 3
