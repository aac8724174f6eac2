"""One transformer over products of mesh axes, against one device; `benchmarks/together.py` runs them all."""

import dataclasses
import functools

import pytest

from benchmarks import together
from benchmarks.parity import differences
from benchmarks.together import DENSE, SPARSE, Runs

pytestmark = [pytest.mark.usefixtures("compiled_here"), pytest.mark.slow]
STEPS = 4
PART = (
  (True, {"data": 2, "expert": 2, "stage": 2}),  # the case of CI: experts in a pipeline were wrong
  (False, {"fsdp": 2, "context": 2, "tensor": 2}),
  (False, {"fsdp": 2, "tensor": 2, "stage": 2}),
  (True, {"context": 2, "tensor": 2, "expert": 2}),
  (False, {"data": 2, "context": 2, "stage": 2}),
  (True, {"data": 2, "expert": 4}),
)

runs = functools.cache(Runs)


@pytest.fixture(autouse=True)
def two_layers(monkeypatch):
  """One on each stage: the benchmark has four."""
  monkeypatch.setattr(together, "CONFIG", dataclasses.replace(together.CONFIG, depth=2))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("sparse", "sizes"), PART, ids=str)
def test_steps_equal_one_device(sparse, sizes):
  assert sizes in (SPARSE if sparse else DENSE)
  one = runs(sparse, STEPS)
  assert max(differences(one.one, one.run(sizes))) <= 1e-5
