"""What a policy makes of a layer and of a unit of layers, read from the program."""

import jax
import jax.numpy as jnp
import pytest

import nnx_parallel as nxp
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.remat import AS_WRITTEN, checkpoint_layer, checkpoint_unit, is_joint

X = jnp.ones((4, 4))
DOTS = jax.checkpoint_policies.dots_saveable


def body(carry, row):
  x, count = carry
  return [jnp.sin(x @ row[0]), count + 1], []


def checkpoints(run):
  """The checkpoints of a unit: whether each may be shared with equal operations, and what it computes."""
  trace = jax.make_jaxpr(lambda x, w: run([x, 0], [w])[0])(X, X)
  return [eqn for eqn in equations(trace) if "prevent_cse" in eqn.params]


def recomputed(remat, *, in_scan=True):
  """The operations that the backward pass of a unit repeats or moves."""
  run = checkpoint_unit(body, remat, in_scan=in_scan)
  trace = jax.make_jaxpr(jax.grad(lambda x, w: run([x, 0], [w])[0][0].sum()))(X, X)
  found = [eqn.primitive.name for eqn in equations(trace)]
  return {name: found.count(name) for name in ("dot_general", "device_put")}


@pytest.mark.parametrize("remat", [nxp.Remat("full", group=2), nxp.Remat("offload")], ids=str)
@pytest.mark.parametrize("in_scan", [True, False])
def test_a_unit_is_one_checkpoint_that_a_scan_keeps_apart(remat, in_scan):
  """Outside of a scan, XLA would take the recomputed operations for those of the forward pass."""
  (found,) = checkpoints(checkpoint_unit(body, remat, in_scan=in_scan))
  assert found.params["prevent_cse"] is not in_scan


@pytest.mark.parametrize(
  "remat", [AS_WRITTEN, nxp.Remat("none"), nxp.Remat("full"), nxp.Remat("dots", every=2)], ids=str
)
def test_other_units_stay(remat):
  assert not is_joint(remat)
  assert checkpoint_unit(body, remat, in_scan=True) is body


def test_what_is_saved_and_moved():
  written, full, dots = map(recomputed, (AS_WRITTEN, nxp.Remat("full", group=2), nxp.Remat("dots", group=2)))
  assert full["dot_general"] > written["dot_general"] == dots["dot_general"]
  assert recomputed(nxp.Remat(DOTS, group=2)) == dots
  assert written["device_put"] == full["device_put"] == 0


def test_the_carry_goes_to_the_host_and_back():
  run = checkpoint_unit(body, nxp.Remat("offload"), in_scan=True)
  trace = jax.make_jaxpr(jax.grad(lambda x, w: run([x, 0], [w])[0][0].sum()))(X, X)
  puts = [eqn.outvars[0].aval for eqn in equations(trace) if eqn.primitive.name == "device_put"]
  assert [str(aval.memory_space).lower().rpartition(".")[2] for aval in puts] == ["host", "device"]


def test_every_second_layer_is_recomputed():
  taken = []

  def checkpoint(run, policy):
    taken.append(policy)
    return run

  for call in range(4):
    checkpoint_layer(body, nxp.Remat("dots", every=2), call, checkpoint)
  assert taken == 2 * [jax.checkpoint_policies.dots_with_no_batch_dims_saveable]
  taken.clear()
  for remat in (nxp.Remat("full"), nxp.Remat("offload"), nxp.Remat(DOTS), nxp.Remat("none"), AS_WRITTEN):
    checkpoint_layer(body, remat, 0, checkpoint)
  assert taken == [None, None, DOTS]


def test_policies_have_names():
  assert str(nxp.Remat("full")) == "full"
  assert str(nxp.Remat("full", every=2)) == "full in one of every 2 layers"
  assert str(nxp.Remat("dots", group=2)) == "dots in groups of 2"
  assert str(nxp.Remat(lambda *_, **__: True)) == "<lambda>"
  assert str(nxp.Remat(type("Saves", (), {"__call__": lambda *_, **__: True})())) == "a policy"


@pytest.mark.parametrize(
  "counts", [{"every": 0}, {"group": 0}, {"every": 2.0}, {"group": True}, {"every": 2, "group": 2}]
)
def test_counts_that_select_nothing_are_refused(counts):
  with pytest.raises(TrainError, match="selects no layers"):
    nxp.Remat("full", **counts)


def test_what_a_policy_asks_for():
  assert [remat.changes for remat in (AS_WRITTEN, nxp.Remat("none"), nxp.Remat("full"))] == [
    False,
    True,
    True,
  ]
  assert [remat.needs_layers for remat in (AS_WRITTEN, nxp.Remat("none"), nxp.Remat("full"))] == [
    False,
    False,
    True,
  ]
  with pytest.raises(TrainError, match="is not a known policy"):
    nxp.Remat("all")
