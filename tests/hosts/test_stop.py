"""SIGTERM and Ctrl-C end a loop between two steps, once; the process then ends as it would have."""

import os
import signal

import pytest

import nnx_parallel as nxp


def send(number):
  os.kill(os.getpid(), number)


def loop(*, at, number, steps=5):
  """Counts steps; the signal comes in the middle of one of them."""
  made = 0
  with nxp.hosts.StopSignals() as stop:
    for step in range(1, steps + 1):
      if step == at:
        send(number)
      made = step
      if stop.asked(step):
        break
  return made


@pytest.fixture
def former():
  """A handler that only notes the signal, in place of one that ends the process."""
  came = []
  before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
  yield came
  signal.signal(signal.SIGTERM, before)


def test_the_step_is_finished_and_the_former_handler_called_once(former):
  assert loop(at=3, number=signal.SIGTERM) == 3
  assert former == [signal.SIGTERM]
  send(signal.SIGTERM)  # nobody listens any more
  assert len(former) == 2
  assert loop(at=9, number=signal.SIGTERM) == 5


def test_sigterm_ends_the_process_with_its_exit_code():
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  try:
    with pytest.raises(SystemExit) as caught:
      loop(at=3, number=signal.SIGTERM)
  finally:
    signal.signal(signal.SIGTERM, before)
  assert caught.value.code == 75


def test_the_second_interrupt_ends_at_once(capfd):
  with pytest.raises(KeyboardInterrupt):
    loop(at=5, number=signal.SIGINT)
  done = []

  def impatient():
    with nxp.hosts.StopSignals():
      for number in (1, 2):
        send(signal.SIGINT)
        done.append(number)

  with pytest.raises(KeyboardInterrupt):
    impatient()
  assert done == [1]
  assert "interrupted: stopping after this step; again to end at once" in capfd.readouterr().err
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_set_within_the_block_stay_and_none_swallows_a_signal(former):
  came = []
  with nxp.hosts.StopSignals():
    kept = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: (came.append("mine"), kept(*arguments)))
  send(signal.SIGTERM)
  assert (came, former) == (["mine"], [signal.SIGTERM])
  signal.signal(signal.SIGTERM, kept)
  send(signal.SIGTERM)
  assert len(former) == 2


def test_an_error_goes_before_the_signal(former):
  def failing():
    with nxp.hosts.StopSignals():
      send(signal.SIGTERM)
      raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    failing()
  assert former == []


def test_what_is_ignored_stays_ignored():
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    assert loop(at=2, number=signal.SIGINT) == 5
  finally:
    signal.signal(signal.SIGINT, before)
