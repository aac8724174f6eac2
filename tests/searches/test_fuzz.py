"""Programs that the search found wrong, through the step that users get; and the search itself."""

import json
import pathlib

import jax
import numpy as np
import pytest

import nnx_parallel as nxp
from searches import driver, fuzz, programs
from searches.fuzz import Numbers, differences

GIVEN = driver.arguments(fuzz, [])
name = lambda case: "-".join(case.ops).replace(" ", "_")
FOUND = fuzz.found_in(pathlib.Path(__file__).with_name("fuzz_found.jsonl"))

pytestmark = pytest.mark.usefixtures("as_users_have_it")


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", FOUND, ids=name)
def test_a_step_trains_right_where_the_compiler_alone_does_not(case: fuzz.Case):
  found = fuzz.check(case, GIVEN)
  assert found == {"verdict": "right"}


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", FOUND[:6], ids=name)  # the others were wrong in the step of the toolkit
def test_xla_still_computes_it_wrong(case: fuzz.Case):
  found = fuzz.check(case, driver.arguments(fuzz, ["--step", "plain"]))
  assert found["verdict"] == "wrong", f"it is mended in jax {jax.__version__}: the record can say so"


def test_an_error_of_the_toolkit_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
  def refuse(*_: object, **__: object):
    raise nxp.errors.ShardingError("no such layout.")

  monkeypatch.setattr(nxp, "plan", refuse)
  found = fuzz.check(FOUND[0], GIVEN)
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
  given = driver.arguments(fuzz, ["--layouts", "4"])
  for seed in range(12):
    cases = fuzz.cases(seed, given)
    assert cases == fuzz.cases(seed, given)
    assert {case.seed for case in cases} == {seed, seed + programs.SMALL}
    for case in cases:
      assert case.program == json.loads(json.dumps(case.program))
      sizes, weights = case.layout["mesh"], programs.weights_of(case.program)
      for name, spec in case.layout["specs"].items():
        used = [axis for axes in spec for axis in axes]
        assert len(used) == len(set(used)), (seed, name)
        for length, axes in zip(weights[name].shape, spec, strict=True):
          assert length % np.prod([sizes[axis] for axis in axes], dtype=int) == 0, (seed, name)


def test_a_smaller_program_has_a_layout_that_fits():
  case = fuzz.cases(3, GIVEN)[0]
  made = list(fuzz.smaller(case))
  assert len(made) > 5
  assert min(len(one.program["blocks"]) for one in made) < len(case.program["blocks"])
  for one in made:
    assert one.layout["specs"].keys() == programs.weights_of(one.program).keys()
