"""Programs that the search found wrong, through the step that users get; and the search itself."""

import json
import pathlib

import jax
import numpy as np
import pytest

import nnx_parallel as nxp
from benchmarks import fuzz, fuzz_programs
from benchmarks.fuzz import Case, Model, Numbers, Options, differences
from benchmarks.fuzz_faults import FAULTS, HEAD, Fault

FOUND = [Case(**line) for line in fuzz.lines_of(pathlib.Path(__file__).with_name("fuzz_found.jsonl"))]


pytestmark = pytest.mark.usefixtures("as_users_have_it")


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", FOUND, ids=lambda case: "-".join(case.about()["ops"]).replace(" ", "_"))
def test_a_step_trains_right_where_the_compiler_alone_does_not(case: Case):
  found = fuzz.check(Model(case.program, case.seed), case.layout, Options("toolkit"))
  assert found == {"verdict": "right"}


@pytest.mark.cases(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_xla_still_computes_what_was_found_wrong(fault: Fault, capsys: pytest.CaptureFixture[str]):
  exec(HEAD + fault.body(), {})
  off = [float(part.split()[-1]) for part in capsys.readouterr().out.split(",")]
  assert max(off) > 0.1, f"{fault.name} is mended in jax {jax.__version__}: the record can say so"


def test_an_error_of_the_toolkit_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
  def refuse(*_: object, **__: object):
    raise nxp.errors.ShardingError("no such layout.")

  monkeypatch.setattr(nxp, "plan", refuse)
  found = fuzz.check(Model(FOUND[0].program, FOUND[0].seed), FOUND[0].layout, Options("toolkit"))
  assert found == {"verdict": "refused", "message": "ShardingError: no such layout."}


def test_a_wrong_gradient_is_told_from_rounding():
  grads = {"w": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
  right = Numbers((1.0, 1.0), (grads, grads))
  near = {"w": grads["w"] * (1 + 1e-6), "zero": grads["zero"] + 1e-8}
  assert max(differences(right, Numbers((1.0, 1.0), (near, near))).values()) < fuzz.SUSPICIOUS
  half = {"w": grads["w"] / 2, "zero": grads["zero"]}
  found = differences(right, Numbers((1.0, 1.5), (grads, half)))
  assert {name for name, off in found.items() if off > fuzz.WRONG} == {"second loss", "second grad w"}
  nothing = {"w": grads["w"] * np.nan, "zero": grads["zero"]}
  assert differences(right, Numbers((1.0, 1.0), (nothing, grads)))["grad w"] == float("inf")


def test_seeds_give_the_same_programs_and_valid_layouts():
  for seed in (*range(12), *range(fuzz_programs.SMALL, fuzz_programs.SMALL + 12)):
    program = fuzz_programs.draw(seed)
    assert program == fuzz_programs.draw(seed) == json.loads(json.dumps(program))
    weights = fuzz_programs.weights_of(program)
    for case in fuzz.cases(seed, range(4)):
      sizes = case.layout["mesh"]
      for name, spec in case.layout["specs"].items():
        used = [axis for axes in spec for axis in axes]
        assert len(used) == len(set(used)), (seed, name)
        for length, axes in zip(weights[name].shape, spec, strict=True):
          assert length % np.prod([sizes[axis] for axis in axes], dtype=int) == 0, (seed, name)
