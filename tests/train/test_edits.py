"""Edits of live modules are noticed at the next step, whatever way they were made."""

from __future__ import annotations

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.train.binding import Watch


class Block(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(2, 2, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
    self.table = {"a": 1}
    self.sizes = [1, 2]


def swap(model):
  model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def past_setattr(model):
  vars(model.linear)["kernel"] = nnx.Param(model.linear.kernel.get_value())


def renamed(model):
  model.table["b"] = model.table.pop("a")


EDITS = {
  "flag": lambda m: m.eval(),
  "number of another type": lambda m: setattr(m.drop, "rate", 1),
  "Variable with the same value": lambda m: setattr(m.linear, "bias", nnx.Param(m.linear.bias.get_value())),
  "submodule": lambda m: setattr(m, "linear", nnx.clone(m.linear)),
  "added": lambda m: setattr(m, "extra", 1),
  "deleted": lambda m: delattr(m.linear, "bias"),
  "two items change places": swap,
  "appended": lambda m: m.layers.append(nnx.clone(m.layers[0])),
  "popped": lambda m: m.layers.pop(),
  "item of a dict": lambda m: m.table.update(a=2),
  "item of a list": lambda m: m.sizes.append(3),
  "key of a dict": renamed,
  "nnx.pop": lambda m: nnx.pop(m, nnx.RngCount),
  "past the module": past_setattr,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_is_noticed_at_once(edit):
  model = Block(nnx.Rngs(0))
  watch = Watch({"model": model})
  assert watch.same()
  edit(model)
  assert not watch.same()
  assert watch.changes()[0]
  watch.look()
  assert watch.same()


class Scaled(nnx.Module):
  def __init__(self):
    self.weight = nnx.Param(jnp.ones(4))
    self.scale = 1.0


def set_past(model):
  vars(model)["scale"] = 2.0


@pytest.mark.parametrize("edit", [lambda m: setattr(m, "scale", 2.0), set_past], ids=["assigned", "past"])
def test_the_next_step_trains_what_is_there(edit):
  model = Scaled()
  optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
  step = nxp.train_step(lambda m, x: m.scale * (m.weight[...] * x).sum())
  losses = [float(step(model, optimizer, jnp.ones(4))["loss"]) for _ in range(2)]
  edit(model)
  losses.append(float(step(model, optimizer, jnp.ones(4))["loss"]))
  assert losses == [4.0, 4.0, 8.0]
  assert [str(compiled) for compiled in step.compiles] == [
    "call 0: first call",
    "call 2: model.scale: 1.0 -> 2.0",
  ]


def test_a_step_puts_nothing_into_a_module():
  model, untouched = Scaled(), Scaled()
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = nxp.train_step(lambda m, x: m.scale * (m.weight[...] * x).sum())
  before = dict(vars(model))
  step(model, optimizer, jnp.ones(4))
  assert all(vars(model)[name] is value for name, value in before.items())
  assert {name: type(value) for name, value in vars(model).items()} == {
    name: type(value) for name, value in vars(untouched).items()
  }
  assert jax.tree.structure(model) == jax.tree.structure(untouched)


def test_a_program_asked_for_between_steps_does_not_mix_up_the_models():
  one, other = Scaled(), Scaled()
  optimizers = {id(m): nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in (one, other)}
  step = nxp.train_step(lambda m, x: m.scale * (m.weight[...] * x).sum())
  for _ in range(3):
    step(one, optimizers[id(one)], jnp.ones(4))
  step.compiled(other, optimizers[id(other)], jnp.ones(4))
  step(one, optimizers[id(one)], jnp.ones(()))  # compiles, which is noted for the right one
  assert [compiled.step for compiled in step.compiles] == [0, 3]
  assert int(optimizers[id(one)].step[...]) == 4
  assert int(optimizers[id(other)].step[...]) == 0


def test_a_model_collected_during_anothers_call_does_not_disturb_it():
  def loss(model, x):
    gc.collect()  # while it is traced, as the collector may at any time
    return model.scale * (model.weight[...] * x).sum()

  step = nxp.train_step(loss)
  for number in range(2):
    model = Scaled()
    cycle: list = [model]
    cycle.append(cycle)  # only the collector finds the model
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
      step(model, optimizer, jnp.ones(4))
    assert (step.calls, len(step.compiles)) == (2 * number + 2, number + 1)
    del model, optimizer, cycle


def test_only_the_array_that_somebody_holds_is_copied():
  model = Scaled()
  model.bias = nnx.Param(jnp.ones(4))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = nxp.train_step(lambda m, x: (m.weight[...] * x + m.bias[...]).sum())
  for _ in range(3):
    step(model, optimizer, jnp.ones(4))
  where = {name: getattr(model, name).get_raw_value().unsafe_buffer_pointer() for name in ("weight", "bias")}
  held = model.weight.get_raw_value()
  before = float(held.sum())
  step(model, optimizer, jnp.ones(4))
  assert float(held.sum()) == before
  assert model.weight.get_raw_value().unsafe_buffer_pointer() != where["weight"]
  assert model.bias.get_raw_value().unsafe_buffer_pointer() == where["bias"]


def test_nothing_is_not_taken_for_the_last_models():
  models = (Scaled(),)
  optimizers = tuple(nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in models)
  step = nxp.train_step(lambda models, x: (models[0].weight[...] * x).sum())
  step(models, optimizers, jnp.ones(4))
  with pytest.raises(nxp.TrainError, match="the step's model is a NoneType"):
    step(None, None, jnp.ones(4))


def test_a_class_that_assigns_in_its_own_way_is_watched_too():
  class Own(nnx.Module):
    def __init__(self):
      self.flag = False

    def __setattr__(self, name, value):
      object.__setattr__(self, name, value)

  model = Own()
  watch = Watch({"model": model})
  model.flag = True
  assert not watch.same()


def test_a_step_ends_quietly_with_its_interpreter():
  code = (
    "import jax, optax, nnx_parallel as nxp; from flax import nnx;"
    "init = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0));"
    "plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1));"
    "model, optimizer = nxp.create_sharded_model(plan); step = nxp.train_step(lambda m, x: m(x).sum());"
    "step(model, optimizer, nxp.shard_batch(jax.numpy.ones((8, 2)), plan))"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
  assert (done.returncode, done.stderr) == (0, "")
