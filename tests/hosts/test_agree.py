"""All wait for each other, and whoever does not come is named."""

import pytest

import nnx_parallel as nxp
from processes import run_two

HostError = nxp.errors.HostError


@pytest.mark.slow
def test_two_processes_agree():
  body = """
    import time

    assert nxp.hosts.main_process() == (process == 0)
    nxp.hosts.barrier("both", timeout=30)
    if process == 1:
      time.sleep(2)
    try:
      nxp.hosts.barrier("late", timeout=0.3)
    except nxp.errors.HostError as error:
      print(error)
    nxp.hosts.barrier("late", timeout=30)

    whole = put(np.arange(8), nxp.make_mesh(data=8), "data")

    if process == 1:
      time.sleep(2)
    try:
      nxp.hosts.to_host(whole, timeout=0.3)
    except nxp.errors.HostError as error:
      print(error)
    assert nxp.hosts.to_host({"x": whole})["x"].tolist() == list(range(8))
  """
  first, second = run_two(body)
  for text in (first, second):
    assert "processes [1] did not come to 'late' within 0.3 s." in text
    assert "processes [1] did not come to 'to_host' within 0.3 s." in text
