"""Generated combinations of features, options, meshes and losses: a fixed sample of `searches/seams.py`."""

import pytest

from searches.seams import LOSSES, Case, check, smaller

pytestmark = pytest.mark.usefixtures("as_users_have_it")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 12, 18, 20, 29, 40, 366, 1047])
def test_a_combination_equals_one_device_or_is_refused_for_a_true_reason(seed):
  assert check(Case.draw(seed))["verdict"] in ("right", "refused")


def test_seeds_draw_the_same_cases_and_every_loss():
  assert [Case.draw(n) for n in range(9)] == [Case.draw(n) for n in range(9)]
  assert {Case.draw(n).loss for n in range(200)} == {*LOSSES}


def test_a_smaller_case_has_one_thing_less():
  case = Case.draw(3)
  for one in smaller(case):
    changed = [name for name in vars(case) if getattr(one, name) != getattr(case, name)]
    assert len(changed) == 1
