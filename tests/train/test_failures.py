"""A step returns, or leaves the state that it found, or says that the state is gone."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P

import nnx_parallel as nxp


class Scaled(nnx.Module):
  def __init__(self):
    self.weight = nnx.Param(jnp.zeros(4))
    self.bias = nnx.Param(jnp.zeros(4))


loss_fn = lambda model, x: ((model.weight[...] + model.bias[...]) * x).sum()


def made():
  model = Scaled()
  return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)


def steps_in(model, optimizer):
  """How many steps the state holds; each of them takes 1 from every parameter."""
  count = int(optimizer.step[...])
  for parameter in (model.weight, model.bias):
    assert np.asarray(parameter.get_value()).tolist() == [-count] * 4
  return count


def interrupted_at(number, call):
  """Raises `KeyboardInterrupt` before an instruction of the package in `call`; whether it got that far."""
  seen = 0

  def trace(frame, event, _):
    nonlocal seen
    if "/nnx_parallel/train/" not in frame.f_code.co_filename:
      return None
    frame.f_trace_opcodes = True
    if event == "opcode":
      seen += 1
      if seen == number:
        raise KeyboardInterrupt
    return trace

  sys.settrace(trace)
  try:
    call()
  except KeyboardInterrupt:
    assert seen == number
    return True
  finally:
    sys.settrace(None)
  return False


@pytest.mark.parametrize("held", [False, True], ids=["donated", "copied"])
def test_an_interrupt_at_any_instruction_leaves_the_state_before_or_after_the_step(held):
  model, optimizer = made()
  step, x = nxp.train_step(loss_fn), jnp.ones(4)
  step(model, optimizer, x)
  before, number = 1, 1
  outcomes = set()
  while True:
    keep = model.weight.get_raw_value() if held else None
    happened = interrupted_at(number, lambda: step(model, optimizer, x))
    del keep
    after = steps_in(model, optimizer)
    outcomes.add((happened, after - before))
    before, number = after, number + 1
    if not happened:
      break
  assert outcomes == {(True, 0), (True, 1), (False, 1)}
  assert len(step.compiles) == 1
  step(model, optimizer, x)
  assert steps_in(model, optimizer) == before + 1


def test_an_interrupt_inside_jax_after_the_run_says_that_the_state_is_gone():
  model, optimizer = made()
  step, x = nxp.train_step(loss_fn), jnp.ones(4)

  def profile(frame, event, _):
    if event == "return" and frame.f_code.co_qualname == "ExecuteReplicated.__call__":
      raise KeyboardInterrupt

  sys.setprofile(profile)
  try:
    with pytest.raises(KeyboardInterrupt) as interrupt:
      step(model, optimizer, x)
  finally:
    sys.setprofile(None)
  (note,) = interrupt.value.__notes__
  assert "taken over its arrays: model.bias, model.weight, optimizer.step of 3 arrays are lost" in note
  assert "Fix: restore the last checkpoint" in note
  with pytest.raises(nxp.errors.TrainError, match=r"model\.bias was deleted") as error:
    step(model, optimizer, x)
  assert "gone: model.bias, model.weight, optimizer.step of 3 arrays" in str(error.value)
  assert "nxp.Checkpointer(directory).restore(plan)" in str(error.value)


def test_a_failure_of_the_program_is_raised_as_it_is_with_a_note():
  down = False

  def fetch(x):
    if down:
      raise OSError("data server is down")
    return x

  loss = lambda model, x: loss_fn(model, jax.pure_callback(fetch, jax.ShapeDtypeStruct((4,), jnp.float32), x))
  model, optimizer = made()
  step = nxp.train_step(loss)
  step(model, optimizer, jnp.ones(4))
  held = model.weight.get_raw_value()
  down = True
  with pytest.raises((ValueError, RuntimeError), match="data server is down") as error:
    step(model, optimizer, jnp.ones(4))
  assert not isinstance(error.value, nxp.errors.TrainError)
  # Of the held array, a copy was taken over.
  assert "model.bias, optimizer.step of 3 arrays are lost" in error.value.__notes__[0]
  for _ in range(2):
    with pytest.raises(nxp.errors.TrainError, match=r"model\.bias was deleted: .* a step that failed, or"):
      step(model, optimizer, jnp.ones(4))
  held.delete()
  keep = model.bias.get_raw_value()
  with pytest.raises(nxp.errors.TrainError, match=r"model\.bias was deleted"):
    step(model, optimizer, jnp.ones(4))
  with pytest.raises(nxp.errors.TrainError, match=r"model\.bias was deleted"):
    nxp.train_step(loss_fn)(model, optimizer, jnp.ones(4))
  del keep


@pytest.mark.timeout(60)
def test_what_fails_after_the_step_has_returned_is_said_by_the_next_one():
  mesh = nxp.make_mesh(data=8)

  def fetch(x):
    if x[0] > 1:
      raise OSError("data server is down")
    return x

  def loss(model, x):
    own = lambda x: jax.pure_callback(fetch, jax.ShapeDtypeStruct((1,), jnp.float32), x)
    found = jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)
    return model.weight.sum() + jax.lax.stop_gradient(found)[0]

  model, optimizer = made()
  nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), NamedSharding(mesh, P())))
  step, x = nxp.train_step(loss), jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
  step(model, optimizer, x)
  metrics = step(model, optimizer, 2 * x)
  with pytest.raises(jax.errors.JaxRuntimeError, match="data server is down"):
    metrics["loss"].block_until_ready()
  with pytest.raises(nxp.errors.TrainError, match="the last step failed on the devices after it") as error:
    step(model, optimizer, x)
  assert "data server is down" in str(error.value)
  assert "nxp.Checkpointer(directory).restore(plan)" in str(error.value)


def test_a_deleted_batch_is_named_and_the_state_stays():
  model, optimizer = made()
  step, batch = nxp.train_step(lambda model, batch: loss_fn(model, batch["x"])), {"x": jnp.ones(4)}
  step(model, optimizer, batch)
  batch["x"].delete()
  with pytest.raises(nxp.errors.TrainError, match=r"batch\['x'\] was deleted: its memory was donated or"):
    step(model, optimizer, batch)
  assert steps_in(model, optimizer) == 1
