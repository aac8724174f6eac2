"""Edits of live modules are noticed at the next step, whatever way they were made."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.train.watch import Watch


class Block(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(2, 2, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
    self.table = {"a": 1}
    self.next_table = {"c": 3}
    self.sizes = [1, 2]
    self.next_sizes = [3]


def swap(model):
  model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def to_the_next_list(model):
  model.next_sizes.insert(0, model.sizes.pop())


def to_the_next_dict(model):
  kept = dict(model.next_table)
  model.next_table.clear()
  model.next_table.update(model.table | kept)
  model.table.clear()


def past_setattr(model):
  vars(model.linear)["kernel"] = nnx.Param(model.linear.kernel.get_value())


def renamed(model):
  model.table["b"] = model.table.pop("a")


EDITS = {
  "flag": lambda m: m.eval(), "number of another type": lambda m: setattr(m.drop, "rate", 1),
  "Variable with the same value": lambda m: setattr(m.linear, "bias", nnx.Param(m.linear.bias.get_value())),
  "submodule": lambda m: setattr(m, "linear", nnx.clone(m.linear)), "added": lambda m: setattr(m, "extra", 1),
  "deleted": lambda m: delattr(m.linear, "bias"), "two items change places": swap,
  "appended": lambda m: m.layers.append(nnx.clone(m.layers[0])), "popped": lambda m: m.layers.pop(),
  "item of a dict": lambda m: m.table.update(a=2), "item of a list": lambda m: m.sizes.append(3),
  "key of a dict": renamed, "item moved to the next list": to_the_next_list,
  "item moved to the next dict": to_the_next_dict, "nnx.pop": lambda m: nnx.pop(m, nnx.RngCount),
  "past the module": past_setattr,
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_is_noticed_at_once(edit):
  model = Block(nnx.Rngs(0))
  watch = Watch({"model": model})
  assert watch.same()
  edit(model)
  assert not watch.same()
  now = Watch({"model": model})
  assert watch.changes(now)
  assert now.same()


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
  assert [str(x) for x in step.compiles] == ["call 0: first call", "call 2: model.scale: 1.0 -> 2.0"]


def test_nothing_is_not_taken_for_the_last_models():
  models = (Scaled(),)
  optimizers = tuple(nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in models)
  step = nxp.train_step(lambda models, x: (models[0].weight[...] * x).sum())
  step(models, optimizers, jnp.ones(4))
  with pytest.raises(nxp.errors.TrainError, match="the step's model is a NoneType"):
    step(None, None, jnp.ones(4))


class Wide(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, x):
    return self.up(self.extra(x) if hasattr(self, "extra") else x)


squares = lambda model, x: (model(x) ** 2).mean()


def wide():
  init, rules = lambda: Wide(nnx.Rngs(0)), nxp.fsdp(min_size=0)
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), rules, optimizer=optax.adam(1e-2))
  return plan, *nxp.create_sharded_model(plan)


@pytest.mark.cases(1)
@pytest.mark.parametrize("evaluated", [False, True], ids=["", "evaluated first"])
def test_a_replaced_layer_is_trained_and_lies_as_planned(evaluated):
  plan, model, optimizer = wide()
  step, x = nxp.train_step(squares), nxp.shard_batch(jnp.ones((8, 8)), plan)
  step(model, optimizer, x)
  model.up = nnx.Linear(8, 16, rngs=nnx.Rngs(1))
  before = jnp.copy(model.up.kernel[...])
  if evaluated:  # which puts it whole on the mesh, knowing of no plan
    nxp.eval_step(squares)(model, x)
  step(model, optimizer, x)
  nxp.check_layout(model, plan, optimizer=optimizer)
  assert float(jnp.abs(model.up.kernel[...] - before).max()) > 0


def without_bias(model):
  model.up = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(1))


def wider(model):
  model.up = nnx.Linear(8, 32, rngs=nnx.Rngs(1))


def longer(model):
  model.extra = nnx.Linear(8, 8, rngs=nnx.Rngs(1))


@pytest.mark.cases(3)
@pytest.mark.parametrize(("edit", "line"), [
  (longer, "0.mu.extra.kernel: not in the state, but a parameter of the model needs it"),
  (without_bias, "0.nu.up.bias: in the state, but no parameter of the model needs it"),
  (wider, "0.mu.up.kernel: shape (8, 16), but its parameter needs (8, 32)"),
])  # fmt: skip
@pytest.mark.parametrize("by_hand", [False, True], ids=["planned", "by hand"])
def test_parameters_that_the_optimizer_does_not_know_are_an_error_that_says_what_to_call(edit, line, by_hand):
  plan, model, optimizer = wide()
  if by_hand:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  step, x = nxp.train_step(squares), nxp.shard_batch(jnp.ones((8, 8)), plan)
  step(model, optimizer, x)
  edit(model)
  with pytest.raises(nxp.errors.TrainError, match="state of the optimizer does not fit the param") as error:
    step(model, optimizer, x)
  assert line in str(error.value)
  fix = str(error.value).split("Fix: ")[1]
  if by_hand:
    assert "nnx.Optimizer(model, tx, wrt=nnx.Param)" in fix
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(step(model, optimizer, x)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0]
  else:
    assert "nxp.plan(edited_init, mesh, rules, optimizer=tx)" in fix
    assert ("nnx.update(new, nnx.state((model, optimizer)))" in fix) == (edit is longer)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_variable_of_none_that_the_loss_fills_is_an_error(microbatches):
  class Lazy(nnx.Module):
    def __init__(self):
      self.linear, self.seen = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Variable(None)

  def loss(model, x):
    y = model.linear(x)
    model.seen.set_value(y.mean())
    return y.mean()

  model = Lazy()
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = nxp.train_step(loss, microbatches=microbatches)
  text = r"(?s)put an array into seen, which held None.*Fix: .* of its shape: nnx.Variable\(jnp.zeros\(shape"
  with pytest.raises(nxp.errors.TrainError, match=text):
    step(model, optimizer, np.ones((4, 2), np.float32))
  assert model.seen.get_value() is None
