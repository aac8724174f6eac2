"""What `--mesh` and `--devices` mean, and what they refuse."""

import os
import subprocess
import sys

import pytest

from nnx_parallel import cli
from nnx_parallel.cli import options
from nnx_parallel.cli.command import make_parser
from nnx_parallel.errors import MeshError
from nnx_parallel.loop.loader import Recipe


def recipe(sizes):
  return Recipe("toy", "toy.py", init=lambda: None, mesh=sizes and (lambda: sizes))


@pytest.mark.parametrize(("text", "message"), [
  ("data", "cannot read 'data' in --mesh data."), ("data=0", "cannot read 'data=0'"),
  ("data=two", "cannot read 'data=two'"), ("data=2,", "cannot read ''"),
  ("da ta=2", "cannot read 'da ta=2'"),
  ("data=2,data=4", "cannot read 'data=4' in --mesh data=2,data=4."),
  ("data=-1,fsdp=-1", "cannot read 'fsdp=-1' in --mesh data=-1,fsdp=-1."),
])  # fmt: skip
def test_a_mesh_that_cannot_be_read(text, message):
  with pytest.raises(MeshError) as caught:
    options.parse_mesh(text)
  assert str(caught.value).startswith(message)
  assert "Fix: --mesh data=" in str(caught.value)


def test_an_axis_that_the_rules_do_not_know_names_the_nearest():
  with pytest.raises(MeshError, match=r"toy has no mesh axis 'tensr'\.\n.*\n  Fix: did you mean tensor\?"):
    options.mesh_sizes(recipe({"data": 2, "tensor": 2}), "data=2,tensr=4")


@pytest.mark.parametrize(
  ("sizes", "devices", "needed"), [({"data": 4}, 8, 4), ({"data": 4, "fsdp": -1}, 6, 4), ({"data": 4}, 0, 4)]
)
def test_devices_that_the_mesh_does_not_fill(sizes, devices, needed):
  with pytest.raises(MeshError) as caught:
    options.start_devices(sizes, devices)
  assert f"the mesh does not fill {devices} devices." in str(caught.value)
  assert f"Fix: --devices {needed}, or another --mesh." in str(caught.value)


SCRIPT = """
import jax
from nnx_parallel.cli import options
options.start_devices({sizes}, {devices})
print(jax.device_count(), dict(options.real_mesh({sizes}, {devices}).shape))
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sizes", "devices", "environment", "expected"), [
  ({"data": 3, "tensor": 2}, None, {}, "6 {'data': 3, 'tensor': 2}"),
  ({"data": 2}, 2, {"JAX_NUM_CPU_DEVICES": "4"}, "4 {'data': 2}"),
  ({"data": 2}, 2, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "4 {'data': 2}"),
])  # fmt: skip
def test_devices_are_simulated_unless_the_environment_says_how_many(sizes, devices, environment, expected):
  clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
  command = [sys.executable, "-c", SCRIPT.format(sizes=sizes, devices=devices)]
  done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)
  assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize("command", ["plan", "compile", "train"])
def test_another_remat_policy_is_refused(command, capsys):
  with pytest.raises(SystemExit):
    make_parser().parse_args([command, "text_lm", "--remat", "some"])
  assert "argument --remat: invalid choice: 'some' (choose from" in capsys.readouterr().err
  with pytest.raises(SystemExit):
    make_parser().parse_args(["trian"])
  assert capsys.readouterr().err.endswith("Fix: did you mean train?\n")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("step", [("--remat", "full"), ("--microbatches", "2"), ("--batch", "8")])
def test_options_of_the_step_show_its_memory_without_a_chip(step, capsys):
  assert cli.main(["plan", "text_lm", "--mesh", "data=2,fsdp=2,tensor=2", *step]) == 0
  assert "Planned memory per device" in capsys.readouterr().out


def test_a_misspelt_name_of_a_rule_is_refused_and_a_new_one_is_added(capsys):
  mesh = ["plan", "text_lm", "--mesh", "data=2,fsdp=2,tensor=2"]
  assert cli.main([*mesh, "--rules", "embd=tensor"]) == 1
  text = "--rules names 'embd', which the rules of text_lm do not have.\n  Fix: did you mean embed?"
  assert text in capsys.readouterr().err
  assert cli.main([*mesh, "--rules", "sequence=tensor"]) == 0
