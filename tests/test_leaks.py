"""The check after each test, on planted leaks of each kind."""

import logging
import os
import signal
import sys
import threading

import jax
import pytest
from flax import nnx

import leaks
import nnx_parallel as nxp

GO = threading.Event()


def leave_a_rule(stack):
  rules = nxp.use_rules(nxp.LogicalRules(embed=None))
  rules.__enter__()
  stack.append(lambda: rules.__exit__(None, None, None))


def leave_an_eager_context(stack):
  context = nnx.use_eager_sharding(not nnx.using_eager_sharding())
  context.__enter__()
  stack.append(lambda: context.__exit__(None, None, None))


def leave_a_thread(stack):
  thread = threading.Thread(target=GO.wait, name="planted")
  thread.start()
  stack.append(lambda: (GO.set(), thread.join()))


PLANTED = {
  # What issued this check: a dict of contexts, of which one is entered.
  "mesh: jax.set_mesh": lambda _: jax.set_mesh(nxp.make_mesh(data=8, explicit=True)),
  "rules: use_rules": leave_a_rule,
  "rules: nnx.use_eager_sharding": leave_an_eager_context,
  "jax.config: jax_numpy_rank_promotion": lambda _: jax.config.update("jax_numpy_rank_promotion", "allow"),
  "os.environ: NXP_PLANTED": lambda _: os.environ.update(NXP_PLANTED="1"),
  "os.environ: HOME": lambda _: os.environ.pop("HOME"),
  "working folder: os.getcwd()": lambda _: os.chdir("/"),
  "signal handlers: SIGTERM": lambda _: signal.signal(signal.SIGTERM, lambda *_: None),
  "logging: nnx_parallel": lambda stack: (
    logging.getLogger("nnx_parallel").setLevel(7),
    stack.append(lambda: logging.getLogger("nnx_parallel").setLevel(logging.NOTSET)),
  ),
  "sys.path": lambda _: sys.path.append("/planted"),
  "threads: planted": leave_a_thread,
}


@pytest.mark.each_case
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_left_is_named_and_taken_back(kind, monkeypatch):
  monkeypatch.setenv("HOME", "/root")
  before, undo = leaks.read(), []
  try:
    PLANTED[kind](undo)
    left = leaks.left_since(before, patience_s=0.1)
    assert left
    assert all(line.startswith(kind.split(":")[0]) for line in left)
    assert any(kind in line for line in left)
  finally:
    for call in undo:
      call()
    leaks.take_back(before)
  assert leaks.left_since(before) == []
