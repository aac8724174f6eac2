"""Edits of live modules: what is heard, what is looked for, and that both say the same."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import nnx_parallel as nxp
from nnx_parallel.train import edits
from nnx_parallel.train.binding import Watch
from nnx_parallel.train.edits import hear, heard


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
  "nnx.pop": lambda m: nnx.pop(m, nnx.RngCount),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_is_noticed_at_once_by_hearing_as_by_looking(edit):
  model = Block(nnx.Rngs(0))
  watch = Watch({"model": model})
  assert watch.same()
  assert watch.looks_same()
  edit(model)
  assert not watch.same()
  assert not watch.looks_same()
  watch.look()
  assert watch.same()


def test_what_goes_past_setattr_is_noticed_within_256_steps():
  model = Block(nnx.Rngs(0))
  watch = Watch({"model": model})
  past_setattr(model)
  assert [watch.same() for _ in range(257)].index(False) == 256
  assert not watch.same()


def test_a_change_that_a_look_found_is_not_lost():
  model = Block(nnx.Rngs(0))
  watch = Watch({"model": model})
  past_setattr(model)
  assert not watch.looks_same()
  assert not watch.same()


class Scaled(nnx.Module):
  """All of it is heard, so that steps only listen."""

  def __init__(self):
    self.weight = nnx.Param(jnp.ones(4))
    self.scale = 1.0


@pytest.mark.parametrize("tables", [False, True], ids=["all heard", "with a list that is not"])
def test_a_step_looks_at_everything_within_256_calls(tables):
  model = Scaled()
  if tables:
    model.sizes = [1, 2]
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = nxp.train_step(lambda m, x: m.scale * (m.weight[...] * x).sum())
  batch = jnp.ones(4)
  for _ in range(3):
    step(model, optimizer, batch)
  assert len(step.compiles) == 1
  vars(model)["scale"] = 2.0
  for _ in range(257):
    step(model, optimizer, batch)
  assert len(step.compiles) == 2
  assert "scale: 1.0 -> 2.0" in str(step.compiles[1])


def test_compilations_of_others_are_heard_and_not_taken_for_the_steps_own():
  model = Scaled()
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = nxp.train_step(lambda m, x: m.scale * (m.weight[...] * x).sum())
  for _ in range(3):
    step(model, optimizer, jnp.ones(4))
  before = heard[0]
  jax.jit(lambda x: jnp.sin(x) * 0.123)(jnp.ones(3))
  assert heard[0] > before
  step(model, optimizer, jnp.ones(4))
  assert len(step.compiles) == 1
  step(model, optimizer, jnp.ones(()))
  assert len(step.compiles) == 2


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


def test_a_deletion_is_heard_and_not_only_looked_for():
  model = Block(nnx.Rngs(0))
  assert hear(model.linear)
  before = heard[0]
  del model.linear.bias
  assert heard[0] > before


def test_a_module_with_names_that_flax_does_not_list_is_looked_at_each_time():
  model = Block(nnx.Rngs(0))
  object.__setattr__(model.linear, "extra", 1)
  assert not hear(model.linear)
  watch = Watch({"model": model})
  del model.linear.extra
  assert not watch.same()


def test_a_class_that_assigns_in_its_own_way_is_looked_at_each_time():
  class Own(nnx.Module):
    def __init__(self):
      self.flag = False

    def __setattr__(self, name, value):
      object.__setattr__(self, name, value)

  model = Own()
  assert not hear(model)
  watch = Watch({"model": model})
  model.flag = True
  assert not watch.same()


def test_where_flax_asks_no_more_every_step_looks(monkeypatch):
  monkeypatch.setattr(nnx.Pytree, "_check_valid_context", lambda self, message: None)
  edits._flax_asks.cache_clear()
  try:
    model = Block(nnx.Rngs(0))
    assert not hear(model)
    watch = Watch({"model": model})
    model.linear.bias = None
    assert not watch.same()
  finally:
    monkeypatch.undo()
    edits._flax_asks.cache_clear()
  assert hear(Block(nnx.Rngs(0)))


@pytest.mark.parametrize(
  ("name", "without"),
  [("nnx", types.SimpleNamespace(Pytree=object, List=nnx.List)), ("TraceState", object)],
)
def test_where_flax_has_other_methods_nothing_is_heard(monkeypatch, name, without):
  model = Block(nnx.Rngs(0))
  monkeypatch.setattr(edits, name, without)
  edits._flax_asks.cache_clear()
  edits._plain.cache_clear()
  try:
    assert not hear(model)
  finally:
    edits._flax_asks.cache_clear()
    edits._plain.cache_clear()


def test_watched_modules_behave_as_before():
  plain, model = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
  model.drop.rngs, plain.drop.rngs = None, None
  hear(model)
  assert hear(model)
  for other in (
    copy.deepcopy(model.linear),
    pickle.loads(pickle.dumps(model.linear)),
    nnx.clone(model.linear),
  ):
    assert jax.tree.structure(other) == jax.tree.structure(plain.linear)
    before = heard[0]
    other.bias = None
    assert heard[0] == before
  with pytest.raises(TraceContextError, match="Cannot mutate"):
    jax.jit(lambda x: setattr(model, "table", x))(1.0)


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
