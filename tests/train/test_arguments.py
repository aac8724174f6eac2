"""What a call of a step may be given besides the model, the optimizer and the batch."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import ShardingError, TrainError
from nnx_parallel.testing import assert_same_training

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def made():
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  return model, nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)


def loss_fn(model, x, relu, power=2):
  y = model(x)
  return ((nnx.relu(y) if relu else y) ** power).mean()


def plain(**options):
  return float(loss_fn(made()[0], X, **options))


def test_keyword_arguments_are_constants_of_the_program():
  model, optimizer = made()
  step, evaluate = nxp.train_step(loss_fn), nxp.eval_step(loss_fn)
  for options in ({"relu": True}, {"relu": False}, {"relu": True, "power": 4}, {"relu": True}):
    expected = pytest.approx(plain(**options), rel=1e-5)
    assert float(step(model, optimizer, X, **options)["loss"]) == expected
    assert float(evaluate(model, X, **options)["loss"]) == expected
  reasons = [list(compiled.reasons) for compiled in step.compiles]
  assert reasons == [["first call"], ["relu=False"], ["relu=True, power=4"]]
  assert step.calls == 4


def test_true_and_one_are_two_constants():
  loss_fn = lambda model, x, scale: (model(x) ** 2).mean() * (5 if scale is True else scale)
  model, optimizer = made()
  step = nxp.train_step(loss_fn, microbatches=2)
  losses = [float(step(model, optimizer, X, scale=scale)["loss"]) for scale in (1, True, 1.0)]
  assert losses[1] == pytest.approx(5 * losses[0])
  assert losses[2] == losses[0]
  assert len(step.compiles) == 3


def test_several_arrays_and_a_constant():
  model, optimizer = made()
  step = nxp.train_step(lambda model, x, y, train: ((model(x) - y) ** 2).mean() * (1 if train else 3))
  losses = [float(step(model, optimizer, X, X, train=train)["loss"]) for train in (True, False)]
  assert losses[1] == pytest.approx(3 * losses[0])


def planned(mesh, **options):
  return nxp.plan(lambda: made()[0], mesh, optimizer=optax.sgd(0.1), **options)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_keyword_arguments_wherever_a_step_or_a_loss_is_given(microbatches):
  plan, step = planned(nxp.make_mesh(data=8)), nxp.train_step(loss_fn, microbatches=microbatches)
  model, optimizer = nxp.create_sharded_model(plan)
  nodes = lambda lowered: lowered.as_text().count("maximum")
  for given in ((model, optimizer, X), (plan, None, X)):
    assert nodes(step.lower(*given, relu=True)) > nodes(step.lower(*given, relu=False))
  step(model, optimizer, X, relu=True, power=4)
  assert step.compiled(model, optimizer, X, relu=True, power=4).as_text()
  assert step.calls == len(step.compiles) == 1
  for check in (
    step.check_gradients(model, optimizer, X, relu=True, power=4, seed=1),
    nxp.check_gradients(model, nxp.shard_batch(X, plan), loss_fn, relu=True, power=4),
  ):
    assert check.losses["with the gradient"] == pytest.approx(float(loss_fn(model, X, True, 4)), rel=1e-5)
    assert check
  assert nxp.check_step(plan, None, loss_fn, X, microbatches=microbatches, relu=True)
  found = assert_same_training(loss_fn, {"data": plan}, [X] * 2, relu=False, power=4)
  assert found["data"].losses[0] == pytest.approx(plain(relu=False, power=4), rel=1e-5)
  with pytest.raises(TrainError, match="did you mean microbatches="):
    nxp.check_step(plan, None, loss_fn, X, micro_batches=2, relu=True)


@pytest.mark.parametrize("kind", ["both", "one"])
def test_keyword_arguments_of_a_dict_of_losses(kind):
  """Each loss gets the keywords that it takes."""
  losses = {
    "a": lambda models, x, relu: loss_fn(models["a"], x, relu),
    "b": lambda models, x, relu=True: loss_fn(models["b"], x, relu),
  }
  if kind == "one":
    losses["b"] = lambda models, x: loss_fn(models["b"], x, True)
  step, (a, tx_a), (b, tx_b) = nxp.train_step(losses), made(), made()
  given = {"a": a, "b": b}, {"a": tx_a, "b": tx_b}, X
  metrics = step(*given, relu=False)
  assert float(metrics["a/loss"]) == pytest.approx(plain(relu=False))
  assert float(metrics["b/loss"]) == pytest.approx(plain(relu=kind == "one"))
  step.compiled(*given, relu=False)
  assert step.lower(*given, relu=False).as_text()
  assert step.check_gradients(*given, relu=False)
  with pytest.raises(TrainError, match="none of 2 loss functions takes rleu="):
    step(*given, rleu=True)


WRONG = {
  "unknown": (
    {"rleu": True},
    r"takes no rleu=, which the step got\.\n  def loss_fn\(model, x, relu, power=2\)",
  ),
  "an option of the step": ({"relu": True, "microbatches": 2}, r"options of a step belong to nxp.train_step"),
  "an array": ({"relu": jnp.ones(())}, r'constants of the program[\s\S]*"relu": relu\}'),
  "a list": ({"relu": [1]}, r"relu= is a list, and keywords are constants"),
  "a module": ({"relu": nnx.Rngs(0)}, r'relu= is an? Rngs[\s\S]*"relu": relu\}, \{"model": optimizer\}'),
}


@pytest.mark.each_case
@pytest.mark.parametrize(("constants", "text"), WRONG.values(), ids=WRONG)
def test_other_keyword_arguments_are_errors(constants, text):
  with pytest.raises(TrainError, match=text):
    nxp.train_step(loss_fn)(*made(), X, **constants)


@pytest.mark.parametrize("batch", [(X, True), {"x": X, "relu": True}], ids=["tuple", "dict"])
def test_a_flag_in_the_batch_is_an_array_and_the_error_says_where_it_belongs(batch):
  loss = loss_fn if isinstance(batch, tuple) else lambda model, b: loss_fn(model, b["x"], b["relu"])
  if isinstance(batch, tuple):
    loss = lambda model, x, relu: loss_fn(model, x, relu)
  with pytest.raises(jax.errors.TracerBoolConversionError) as found:
    nxp.train_step(loss)(*made(), batch)
  assert "step(model, optimizer, batch, train=True)" in "".join(found.value.__notes__)


class Noisy(nnx.Module):
  def __init__(self, rngs):
    self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5)

  def __call__(self, x, rngs):
    return self.dropout(self.linear(x), rngs=rngs)


def test_random_state_as_an_argument_goes_beside_the_model():
  """Its counters change, and a step writes the Variables of its models back."""
  model, rngs = Noisy(nnx.Rngs(0)), nnx.Rngs(1)
  optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
  with pytest.raises(TrainError, match=r"Rngs that is a part of the batch[\s\S]*\"rngs\": rngs\}"):
    nxp.train_step(lambda model, x, rngs: model(x, rngs).mean())(model, optimizer, X, rngs)
  step = nxp.train_step(lambda models, x: (models["model"](x, models["rngs"]) ** 2).mean())
  losses = [float(step({"model": model, "rngs": rngs}, {"model": optimizer}, X)["loss"]) for _ in range(2)]
  own = nnx.Rngs(1)
  assert losses == pytest.approx([float((Noisy(nnx.Rngs(0))(X, own) ** 2).mean()) for _ in range(2)])
  assert losses[0] != losses[1]


def test_a_model_and_optimizer_is_an_error_with_the_lines_that_work():
  model, _ = made()
  both = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
  step = nxp.train_step(functools.partial(loss_fn, relu=True))
  with pytest.raises(TrainError, match=r"nnx\.Optimizer\(model, tx, wrt=nnx\.Param\)\n\s*step\(model, opt"):
    step(model, both, X)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_without_arrays(microbatches):
  model, optimizer = made()
  step = nxp.train_step(lambda model, batch: (model.kernel[...] ** 2).sum(), microbatches=microbatches)
  loss = float(step(model, optimizer, None)["loss"])
  assert loss == pytest.approx(float((made()[0].kernel[...] ** 2).sum()))


def test_an_array_of_the_batch_without_examples_belongs_to_the_model():
  plan = nxp.plan(lambda: made()[0], nxp.make_mesh(data=8), optimizer=optax.sgd(0.1))
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(lambda model, batch: (model(batch["x"]) ** 2).mean() * batch["class_weights"].sum())
  with pytest.raises(ShardingError, match=r"class weights, belongs to the model, in an nnx\.Variable"):
    step(model, optimizer, {"x": X, "class_weights": np.ones(10, np.float32)})


def distances(model, other, x):
  return ((model(x) - other(x)) ** 2).mean()


class Distilled:
  def __init__(self, teacher):
    self.teacher = teacher

  def loss(self, model, x):
    return distances(model, self.teacher, x)


def beside(other):
  """A helper that a loss calls, which reads another module."""
  return lambda x: other(x)


READS = {
  "closure": (lambda _, other: lambda model, x: distances(model, other, x), "other.bias"),
  "variable": (
    lambda _, other: (lambda bias: lambda model, x: model(x).mean() + bias[...].sum())(other.bias),
    "bias",
  ),
  "partial": (
    lambda _, other: functools.partial(lambda t, m, x: distances(m, t, x), other),
    "an argument[0]",
  ),
  "method": (lambda _, other: Distilled(other).loss, "self['teacher'].bias"),
  "list": (lambda _, *others: lambda m, x: distances(m, others[0], x), "others[0].bias"),
  "helper": (lambda _, other: (lambda ask: lambda m, x: distances(m, ask, x))(beside(other)), "other.bias"),
  "own": (lambda own, _: lambda model, x: distances(model, own, x), "bias, model.kernel"),
  "own, unseen": (lambda own, _: lambda m, x: distances(m, HELD["own"].model, x), "bias, model.kernel"),
}
HELD = {}


@pytest.mark.each_case
@pytest.mark.parametrize(("loss_of", "name"), READS.values(), ids=READS)
def test_a_loss_that_reads_the_live_model_or_another_is_an_error(loss_of, name):
  (model, optimizer), (other, _) = made(), made()
  HELD["own"] = types.SimpleNamespace(model=model)
  loss = loss_of(model, other)
  calls = [
    lambda: nxp.train_step(loss)(model, optimizer, X),
    lambda: nxp.train_step(loss, microbatches=2).lower(model, optimizer, X),
    lambda: nxp.eval_step(loss)(model, X),
  ]
  for call in calls:
    with pytest.raises(TrainError, match=r"reads .*" + re.escape(name)):
      call()


@pytest.mark.parametrize("explicit", [False, True])
def test_a_dict_of_losses_on_a_mesh_that_reads_a_live_model_is_an_error(explicit):
  mesh = nxp.make_mesh(fsdp=8, explicit=explicit)
  plan = nxp.plan(
    lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1)
  )
  (model, optimizer), (other, _) = nxp.create_sharded_model(plan), nxp.create_sharded_model(plan)
  step = nxp.train_step({"a": lambda models, x: distances(models["a"], other, x)}, microbatches=2)
  with pytest.raises(TrainError, match=r"reads other[\s\S]*and not from its arguments"):
    step({"a": model}, {"a": optimizer}, np.ones((16, 8), np.float32))


def test_a_loss_may_know_a_module_whose_arrays_it_does_not_read():
  model, optimizer = made()
  step = nxp.train_step(lambda student, x: (student(x) ** 2).mean() / model.in_features)
  step(model, optimizer, X)


def test_a_loss_may_hold_arrays_of_the_live_model():
  """As they are now: a penalty for leaving the start, for example."""
  model, optimizer = made()
  start = nnx.to_pure_dict(nnx.state(model))
  step = nxp.train_step(lambda model, x: ((model.kernel - start["kernel"]) ** 2).mean() + 0 * x.mean())
  assert float(step(model, optimizer, X)["loss"]) == 0
