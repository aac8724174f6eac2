"""The train step: live modules, one compilation, safe donation, edits noticed, exact weights."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from train import models
from train.models import RULES, Noisy
from training import placed


class Plain(models.Net):  # No statistics, no random state
  def __init__(self, rngs):
    super().__init__(rngs, 8, 16)


CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
loss_fn = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make(net=Plain, tx=None, mesh=None, rules=RULES, explicit=None, **options):
  kinds = {} if explicit is None else {"explicit": explicit}
  where = nxp.make_mesh(mesh or CUBE, **kinds)
  plan = nxp.plan(lambda: net(nnx.Rngs(0)), where, rules, optimizer=tx or optax.adam(1e-2), **options)
  return plan, *placed(plan)


def data(plan, size=16, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(size, 8)).astype(np.float32)
  return nxp.shard_batch({"x": x, "y": np.roll(x, 1, 1)}, plan)


def kernel(model):
  return np.asarray(model.up.kernel.get_value())


def test_the_module_is_live_and_one_compilation_serves_all_steps():
  plan, model, optimizer = make(Noisy)
  step = nxp.train_step(loss_fn)
  before, batch = kernel(model), data(plan)
  losses = [step(model, optimizer, batch)["loss"] for _ in range(6)]
  assert [str(c) for c in step.compiles] == ["call 0: first call"]
  assert float(losses[-1]) < float(losses[0])
  assert not np.array_equal(before, kernel(model))
  assert int(optimizer.step.get_value()) == 6
  assert float(jnp.abs(model.norm.mean.get_value()).sum()) > 0
  assert int(model.drop.rngs.count.get_value()) == 6
  nxp.check_layout(model, plan, optimizer=optimizer)


def pointers(*objects):
  flat = [leaf for obj in objects for _, leaf in nnx.to_flat_state(nnx.state(obj))]
  return [leaf.get_raw_value().addressable_shards[0].data.unsafe_buffer_pointer() for leaf in flat]


def test_the_buffers_of_the_next_step_are_those_of_the_last_and_the_old_arrays_are_gone():
  plan, model, optimizer = make()
  step, batch = nxp.train_step(loss_fn), data(plan)
  step(model, optimizer, batch)
  held = [leaf.get_raw_value() for _, leaf in nnx.to_flat_state(nnx.state((model, optimizer)))]
  # The list above holds each array too, so the step works on copies and none of its arrays is donated.
  step(model, optimizer, batch)
  assert not any(array.is_deleted() for array in held)
  del held
  before = pointers(model, optimizer)
  step(model, optimizer, batch)
  assert sorted(pointers(model, optimizer)) == sorted(before)


def test_a_step_does_not_wait_for_its_metrics(monkeypatch):
  plan, model, optimizer = make()
  step, batch = nxp.train_step(loss_fn), data(plan)
  metrics = step(model, optimizer, batch)
  waited = []
  array = type(metrics["loss"])
  ready = array.block_until_ready

  def block(x):
    if not x.is_ready():
      waited.append("block_until_ready")
    return ready(x)

  monkeypatch.setattr(array, "block_until_ready", block)
  for name in ("__array__", "__float__", "__bool__", "item", "tolist"):
    monkeypatch.setattr(array, name, lambda self, *args, name=name: waited.append(name))
  for _ in range(3):
    metrics = step(model, optimizer, batch)
  assert waited == []
  assert isinstance(metrics["loss"], jax.Array)
  metrics["loss"].item()
  assert waited == ["item"]


def test_a_step_lowers_from_a_plan_without_arrays():
  mesh = nxp.abstract_mesh(data=4, fsdp=16, tensor=8)
  init = lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  plan = nxp.plan(init, mesh, nxp.fsdp(min_size=1), optimizer=optax.adam(1e-3))
  batch = jax.ShapeDtypeStruct((128, 64), jnp.float32)
  for remat in (None, "as written", "none"):  # which need no layers
    lowered = nxp.train_step(lambda m, x: (m(x) ** 2).mean(), remat=remat).lower(plan, None, batch)
    assert "sharding" in lowered.as_text()
  bare = nxp.plan(init, mesh, nxp.fsdp(min_size=1))
  with pytest.raises(nxp.errors.TrainError, match="no optimizer, so there is no train step"):
    nxp.train_step(loss_fn).lower(bare, None, batch)


@pytest.mark.parametrize("value", [np.zeros((16, 8), np.float32), jnp.zeros((16, 8))], ids=["numpy", "jax"])
def test_on_explicit_axes_an_array_without_a_mesh_returns_to_the_plan(value):
  plan, model, optimizer = make(tx=optax.sgd(0.0), explicit=True)
  step, evaluate, batch = nxp.train_step(loss_fn), nxp.eval_step(loss_fn), data(plan)
  step(model, optimizer, batch)
  model.down.kernel.set_value(value)
  model.down.bias.set_value(np.zeros(8, np.float32))
  wanted = float((np.asarray(batch["y"]) ** 2).mean())
  assert np.isclose(float(evaluate(model, batch)["loss"]), wanted)
  assert np.isclose(float(step(model, optimizer, batch)["loss"]), wanted)
  nxp.check_layout(model, plan, optimizer=optimizer)


def laid_out_whole(model, batch):
  whole = jax.NamedSharding(model.up.kernel.get_value().sharding.mesh, jax.P())
  return {**batch, "x": jax.device_put(batch["x"], whole)}


def renamed(model, batch):
  return {"x": batch["x"], "y": batch["y"], "weight": batch["x"]}


def added(model, batch):
  model.seen = nnx.Variable(jnp.zeros((), jnp.int32))
  return batch


def static(model, batch):
  model.up.precision = "highest"
  return batch


@pytest.mark.cases(4)
@pytest.mark.parametrize(("change", "reason"), [
  (lambda model, batch: jax.tree.map(lambda x: x[:8], batch), "batch['x']: float32[16,8]"),
  (lambda model, batch: {**batch, "x": batch["x"].astype(jnp.bfloat16)}, "-> bfloat16[16,8]"),
  (laid_out_whole, "-> float32[16,8] P()"),
  (renamed, "batch['weight']: absent -> float32[16,8]"), (static, "model.up.precision: None -> 'highest'"),
  (added, "model.seen was added"),
], ids=["shape", "dtype", "layout", "argument", "static value", "Variable"])  # fmt: skip
@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_recompile_says_what_changed(change, reason, caplog):
  plan, model, optimizer = make(tx=optax.sgd(0.1))
  step, batch = nxp.train_step(in_float32), data(plan)
  step(model, optimizer, batch)
  with caplog.at_level(logging.INFO, "nnx_parallel"):
    step(model, optimizer, change(model, batch))
  assert len(step.compiles) == 2
  assert reason in str(step.compiles[1])
  assert reason in caplog.text


def in_float32(model, batch):
  x, y = (batch[name].astype(jnp.float32) for name in "xy")
  return ((model(x) - y) ** 2).mean()


@functools.cache
def small():
  """A step that has run, with its plan, model and optimizer."""
  init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))
  model, optimizer = placed(plan)
  step = nxp.train_step(lambda m, b: (m(b["x"]) ** 2).mean())
  step(model, optimizer, nxp.shard_batch({"x": np.ones((8, 8), np.float32)}, plan))
  return step, plan, model, optimizer


def elsewhere():
  plan = nxp.plan(small()[1].init, nxp.make_mesh(fsdp=4, devices=jax.devices()[:4]))
  return nxp.shard_batch({"x": np.ones((8, 8), np.float32)}, plan)


X = np.ones((8, 8), np.float32)
MISTAKES = {
  "swapped": (lambda step, model, optimizer: step(optimizer, model, {"x": X}),
    "the step's model is a ShardedOptimizer, not a live module",
    "step(model, optimizer, batch), in this order"),
  "batch for the optimizer": (lambda step, model, optimizer: step(model, X, optimizer),
    "the step's optimizer is a ndarray, not a live optimizer",
    "step(model, optimizer, batch), in this order, with an nnx.Optimizer"),
  "a text in the batch": (lambda step, model, optimizer: step(model, optimizer, {"x": X, "id": "abc"}),
    r"batch\['id'\] is a str, which no program can take", "arrays of numbers only"),
  "texts in the batch": (
    lambda step, model, optimizer: step(model, optimizer, {"x": X, "id": np.array(["a"] * 8)}),
    r"batch\['id'\] is a ndarray of <U1, which no program can take", "arrays of numbers only"),
  "no optimizer": (lambda step, model, optimizer: step(model, {"x": X}),
    "a train step needs the model, its optimizer and a batch", "step(model, optimizer, batch)"),
  "two batches": (lambda step, model, optimizer: step(model, optimizer, X, X),
    "the step got 2 arrays after its objects, and its loss function takes one batch",
    "step(model, optimizer, (x, y))"),
  "no examples": (lambda step, model, optimizer: step(model, optimizer, {"x": X[:0]}),
    r"batch\['x'\] holds no examples", "skip empty batches"),
  "another mesh": (lambda step, model, optimizer: step(model, optimizer, elsewhere()),
    r"batch\['x'\] is not on the model's mesh", "nxp.shard_batch(batch, plan) with the plan of this model"),
  "inside nnx.jit": (lambda step, model, optimizer: nnx.jit(step)(model, optimizer, {"x": X}),
    "a train step cannot run inside jax.jit, nnx.jit", "from plain Python"),
  "inside jax.jit": (lambda step, model, optimizer: jax.jit(lambda x: step(model, optimizer, {"x": x}))(X),
    "a train step cannot run inside jax.jit, nnx.jit", "from plain Python"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message", "fix"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_call_is_named_and_the_state_stays(call, message, fix):
  step, plan, model, optimizer = small()
  before = int(optimizer.step[...])
  with pytest.raises(nxp.errors.TrainError, match=message) as error:
    call(step, model, optimizer)
  assert fix in str(error.value).split("Fix: ")[1]
  step(model, optimizer, nxp.shard_batch({"x": X}, plan))
  assert int(optimizer.step[...]) == before + 1


def on_one_device(plan, model, optimizer):
  step = nxp.train_step(loss_fn)
  step(model, optimizer, data(plan))
  model.up.kernel.set_value(jax.device_put(np.zeros((8, 16), np.float32), jax.devices()[3]))
  return step(model, optimizer, data(plan))


def sows(model, batch):
  model.seen = nnx.Intermediate(batch["x"].mean())
  return loss_fn(model, batch)


def with_options(**options):
  return lambda plan, model, optimizer: nxp.train_step(loss_fn, **options)(model, optimizer, data(plan))


def with_mask(plan, model, optimizer):
  mask = jax.device_put(np.ones((6, 6)), jax.NamedSharding(plan.mesh, P()))
  batch = {"x": np.ones((8, 8)), "y": np.ones((8, 8)), "mask": mask}
  return nxp.train_step(loss_fn, microbatches=4)(model, optimizer, batch)


def without_an_optimizer(plan, model, optimizer):
  step = nxp.train_step(dict.fromkeys(("gen", "disc"), lambda m, b: m["gen"](b["x"]).mean()))
  return step({"gen": model, "disc": make()[1]}, {"gen": optimizer}, data(plan))


REFUSED = {
  "a value on one device": (on_one_device, r"model.up.kernel is on 1 device\(s\), and the model on 8"),
  "two meshes": (
    lambda plan, model, optimizer: nxp.train_step(loss_fn)(
      model, make(mesh={"data": 4, "fsdp": 1, "tensor": 2})[2], data(plan)
    ),
    "are on different meshes",
  ),
  "models without an optimizer each": (
    lambda plan, model, optimizer: nxp.train_step(loss_fn)((model, model), optimizer, data(plan)),
    "models and optimizers do not match"),
  "a loss without an optimizer": (without_an_optimizer, "there is a loss for 'disc', and no optimizer"),
  "a missing output": (with_options(outputs=("logits",)),
    "outputs names 'logits', which the loss function did not return"),
  "a wrong policy": (with_options(remat="dotz"), "remat='dotz' is not a known policy"),
  "a policy without layers": (with_options(remat="full"), "remat='full' finds no layer in the loss"),
  "the same in microbatches": (with_options(remat="full", microbatches=2), "finds no layer in the loss"),
  "no microbatches": (with_options(microbatches=0), "train_step got microbatches=0"),
  "microbatches that do not divide": (with_options(microbatches=3),
    r"batch\['x'\] has 16 examples, which 3 microbatches [\s\S]*a global batch of 24"),
  "less than one example for each shard": (with_options(microbatches=8),
    "8 microbatches of 16 examples have 2 each, which 4 sh[\\s\\S]*microbatches=4, or a global batch of 32"),
  "an array without the batch dim": (with_mask,
    r"batch\['mask'\] has 6 rows .* batch\['x'\] has 8[\s\S]*jnp.broadcast_to\(x, \(8, \*x.shape\)\)"),
  "a Variable that is added": (
    lambda plan, model, optimizer: nxp.train_step(sows)(model, optimizer, data(plan)),
    r"the step added seen, Variable type Intermediate"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_step_cannot_do_is_an_error(call, message):
  with pytest.raises(nxp.errors.TrainError, match=message):
    call(*make())


WRONG_LOSSES = {
  "swapped": (lambda batch, model: model(batch).sum(), "calls its second argument",
    "loss_fn(model, batch): ..."),
  "two arrays": (lambda model, x, y: x.sum(),
    r"the loss function takes \(model, x, y\), and the batch is one array", "step(model, optimizer, x, y)"),
  "none": (lambda model: 0.0, r"the loss function takes \(model\), [\s\S]*too many",
    "def loss_fn(model, batch)"),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "message", "fix"), WRONG_LOSSES.values(), ids=WRONG_LOSSES)
def test_a_loss_function_of_other_arguments_is_named(loss, message, fix):
  _, plan, model, optimizer = small()
  with pytest.raises(nxp.errors.TrainError, match=message) as error:
    nxp.train_step(loss)(model, optimizer, nxp.shard_batch(X, plan))
  assert fix in str(error.value).split("Fix: ")[1]


def squared(model, x, y):
  return ((model(x) - y) ** 2).mean()


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_loss_of_several_arrays_gets_the_elements_of_a_tuple():
  _, plan, model, optimizer = small()
  x, y = nxp.shard_batch((np.ones((16, 8), np.float32), np.zeros((16, 8), np.float32)), plan)
  expected = float(squared(model, x, y))
  for loss in (squared, lambda model, *batch: squared(model, *batch), functools.partial(squared)):
    evaluate = nxp.eval_step(loss)
    for found in (evaluate(model, x, y), evaluate(model, (x, y)), evaluate(model, [x, y])):
      assert float(found["loss"]) == pytest.approx(expected, rel=1e-6)
  whole = nxp.eval_step(lambda model, batch, weight=1.0: weight * squared(model, *batch))
  assert float(whole(model, (x, y))["loss"]) == pytest.approx(expected, rel=1e-6)
  steps = [nxp.train_step(squared, microbatches=2, remat=None), nxp.train_step(nxp.with_layers(squared))]
  losses = [float(step(model, optimizer, *batch)["loss"]) for step in steps for batch in ((x, y), ((x, y),))]
  assert losses[0] == pytest.approx(expected, rel=1e-6)
  assert losses == sorted(losses, reverse=True)
  assert [len(step.compiles) for step in steps] == [1, 1]


def test_an_error_inside_a_layer_names_the_layer():
  plan, model, optimizer = make()
  batch = {name: x[:, :4] for name, x in data(plan).items()}
  with pytest.raises(TypeError, match="dot_general") as error:
    nxp.train_step(loss_fn)(model, optimizer, batch)
  (note,) = [note for note in error.value.__notes__ if note.startswith("in the layer")]
  assert note.startswith("in the layer up (Linear, line")
  assert "its arrays: bias float32[16], kernel float32[8, 16]\n" in note
  assert "batch['x'] float32[16, 4], batch['y'] float32[16, 4]" in note


RETURNED = {
  "an array": (lambda x: x, r"returned float32\[16,8\]",
    "loss.mean(), or nxp.weighted(loss.sum(), loss.size)"),
  "nothing": (lambda x: None, "returned None", "return loss"),
  "a dict": (lambda x: {"loss": x.mean()}, "returned a dict", "return loss, metrics"),
  "a complex number": (lambda x: jax.lax.complex(x.mean(), x.mean()), r"returned complex64\[\]", "loss.real"),
  "a metric without a name": (lambda x: (x.mean(), x), r"returned \(float32\[\], float32\[16,8\]\)",
    "return loss, {"),
  "a loss and an accuracy": (lambda x: (x.mean(), (x > 0).mean()), r"returned \(float32\[\], float32\[\]\)",
    'return loss, {"accuracy": accuracy} for a loss with a metric'),
  "a sum and a count": (lambda x: (x.sum(), x.size), r"returned \(float32\[\], an int\)",
    "return nxp.weighted(sum, count) for a mean by weights"),
  "a metric that is a pair": (lambda x: (x.mean(), {"a": (x.sum(), x.size)}),
    r"the metric 'a' must be a scalar or nxp.weighted\(sum, count\); .* returned \(float32\[\], an int\)",
    "nxp.weighted(sum, count) for a weighted mean"),
  "a sum whose counts do not fit": (lambda x: (x.mean(), {"a": (jnp.ones(4), jnp.ones(3))}),
    r"the metric 'a' must be a scalar or .* returned \(float32\[4\], float32\[3\]\)",
    "nxp.weighted(sum, count) for a weighted mean"),
  "a text": (lambda x: "loss", "returned a str", "loss.mean()"),
  "a metric of each example": (lambda x: (x.mean(), {"a": x}),
    r"the metric 'a' must be a scalar or nxp.weighted\(sum, count\); .* returned float32\[16,8\]",
    "outputs=(...)"),
  "a metric called loss": (lambda x: (x.mean(), {"loss": x.sum()}),
    "a metric called 'loss', which would take the place of the loss", "give the metric another name"),
}  # fmt: skip


@pytest.mark.parametrize(("result", "message", "fix"), RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_what_a_loss_may_not_return(result, message, fix, kind):
  model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  loss, x = lambda m, x: result(m(x)), jnp.ones((16, 8))
  made = nxp.train_step(loss) if kind == "train" else nxp.eval_step(loss)
  with pytest.raises(nxp.errors.TrainError, match=message) as error:
    made(*((model, optimizer, x) if kind == "train" else (model, x)))
  assert fix in str(error.value).split("Fix: ")[1]
  assert "Tracer" not in str(error.value)


@pytest.mark.parametrize(("write", "message"), [
  (lambda m: setattr(m, "calls", 1), "the loss function added the attribute calls"),
  (lambda m: setattr(m.up, "use_bias", 1), "changed the attribute up.use_bias.\n.* from True to 1"),
  (lambda m: m.sizes.append(3), r"added the attribute sizes.1"),
  (lambda m: delattr(m, "sizes"), "removed the attribute sizes"),
])  # fmt: skip
def test_a_plain_attribute_that_the_loss_function_writes_is_named(write, message):
  class Listed(Plain):
    def __init__(self, rngs):
      super().__init__(rngs)
      self.sizes = [1]

  plan, model, optimizer = make(Listed)

  def loss(model, batch):
    write(model)
    return loss_fn(model, batch)

  with pytest.raises(nxp.errors.TrainError, match=message):
    nxp.train_step(loss)(model, optimizer, data(plan))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("parts", "pairs"), [(1, False), (2, True)])
def test_diagnostics_are_the_norm_of_the_gradients_and_the_rate_of_the_update(parts, pairs):
  schedule = optax.linear_schedule(0.5, 0.0, 4)
  tx = optax.chain(
    optax.clip_by_global_norm(1e-3), optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
  )
  init, mesh = lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=4, fsdp=2)
  plan = nxp.plan(init, mesh, nxp.fsdp(min_size=8), optimizer=tx)
  model, optimizer = placed(plan)
  x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
  loss = lambda m, b: jnp.square(m(b)).mean()
  norm = optax.tree.norm(nnx.state(nnx.grad(loss)(init(), x)))
  step = nxp.train_step(loss, diagnostics=True, pairs=pairs, microbatches=parts)
  found = [step(model, optimizer, nxp.shard_batch(x, plan)) for _ in range(2)]
  read = lambda value: float(value[0] / value[1]) if pairs else float(value)
  assert read(found[0]["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
  assert [read(metrics["learning_rate"]) for metrics in found] == [0.5, 0.375]
  assert len(step.compiles) == 1


def test_norms_of_complex_gradients_have_their_imaginary_part():
  class Phases(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.array([1.0 + 2.0j, 3.0j]))

  loss = lambda model, x: (jnp.abs(model.w[...][None] * x.astype(complex) - 1) ** 2).mean()
  x = np.ones((8, 2), np.float32)
  plan = nxp.plan(Phases, nxp.make_mesh(data=8), optimizer=nxp.testing.with_gradient_norms(optax.sgd(0.0)))
  model, optimizer = placed(plan)
  found = nxp.train_step(loss, diagnostics=True)(model, optimizer, x)["grad_norm"]
  wanted = optax.tree.norm(nnx.state(nnx.grad(loss)(Phases(), x)))
  assert float(found) == pytest.approx(float(wanted), rel=1e-6)
  assert float(optimizer.opt_state.norms[0]) == pytest.approx(float(wanted), rel=1e-6)


AUX = {
  "array": (lambda y: y, {"aux": (16, 3)}),
  "tuple": (lambda y: (y, y.sum(-1)), {"aux[0]": (16, 3), "aux[1]": (16,)}),
  "nested": (lambda y: {"n": [y, jnp.float32(2.0)]}, {"aux['n'][0]": (16, 3), "aux['n'][1]": ()}),
  "none": (lambda y: None, {}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("of", "shapes"), AUX.values(), ids=AUX)
def test_anything_beside_the_loss_is_returned(of, shapes, microbatches):
  def loss(model, x):
    y = model(x)
    return (y**2).mean(), of(y)

  mesh = nxp.make_mesh(data=4, fsdp=2)
  plan = nxp.plan(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)), mesh, optimizer=optax.sgd(0.1))
  x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
  model, optimizer = nxp.create_sharded_model(plan)
  wanted = loss(nxp.unsharded(plan.init), x)
  evaluated = nxp.eval_step(loss, has_aux=True)(model, x)
  found = nxp.train_step(loss, has_aux=True, microbatches=microbatches)(model, optimizer, x)
  for metrics in (evaluated, found):
    assert {name: value.shape for name, value in metrics.items() if name != "loss"} == shapes
    values = [metrics[name] for name in shapes]
    for a, b in zip(values, jax.tree.leaves(wanted[1]), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(wanted[0]), rel=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
def test_names_with_a_slash_are_those_of_one_loss_or_of_several(explicit):
  mesh = nxp.make_mesh(data=8, explicit=explicit)
  plan = nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), mesh, optimizer=optax.sgd(0.1))
  x = nxp.shard_batch(np.ones((16, 4), np.float32), plan)
  of = lambda model: lambda y: ((model(y) ** 2).mean(), {"by/row": model(y).sum(-1), "by": model(y).mean()})
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(lambda m, y: of(m)(y), outputs=["by/row"])
  assert step(model, optimizer, x)["by/row"].sharding.spec[0] == "data"
  several = {"a/b": lambda ms, y: of(ms["a/b"])(y), "a": lambda ms, y: of(ms["a"])(y)}
  made = {key: nxp.create_sharded_model(plan) for key in several}
  step = nxp.train_step(several, outputs="by/row")
  found = step({k: m for k, (m, _) in made.items()}, {k: o for k, (_, o) in made.items()}, x)
  for key in several:
    assert found[f"{key}/by/row"].shape == (16,)
    assert found[f"{key}/by/row"].sharding.spec[0] == "data"
    assert found[f"{key}/by"].shape == ()
