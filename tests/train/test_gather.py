"""Parameters are gathered where a loss reads them, and tables looked up by columns; positions are split."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import nnx_parallel as nxp
from benchmarks.plain import decoders
from nnx_parallel.layers.gather import Gather
from nnx_parallel.testing import assert_same_training
from nnx_parallel.train.mend import mend
from train.models import Normed
from training import DECODER_RULES, run_steps

SIZES = decoders.Config(vocab=512, width=64, hidden=128, head_dim=16, depth=2)
LAYOUTS = {
  "fsdp and tensor": ({"fsdp": 4, "tensor": 2}, [nxp.LogicalRules(batch="fsdp"), DECODER_RULES]),
  "fsdp": ({"fsdp": 8}, [nxp.LogicalRules(batch="fsdp"), nxp.fsdp("fsdp", min_size=0)]),
}

pytestmark = pytest.mark.usefixtures("as_users_have_it")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_activation_of_a_plain_decoder_is_gathered(layout):
  sizes, rules = LAYOUTS[layout]
  mesh, batch = nxp.make_mesh(sizes), jax.ShapeDtypeStruct((8, 129), jnp.int32)
  plan = nxp.plan(lambda: decoders.Decoder(SIZES, nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(0.1))
  step = nxp.train_step(decoders.loss, remat="full", scan_layers=True)
  sent = nxp.compile_report(step, plan, batch=batch).collectives
  whole = 8 * 128 * SIZES.width * 4  # the residual stream of the batch, in float32
  assert max(one.bytes for one in sent if {"fsdp"} <= {*one.axes}) < whole
  assert not [one for one in sent if set(one.axes) == {"fsdp", "tensor"} and one.kind == "all-gather"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", [jax.P("fsdp"), jax.P(None, "fsdp"), jax.P(("fsdp", "tensor"))])
@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_a_table_is_looked_up_by_columns_with_the_same_values(spec):
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  rng = np.random.default_rng(0)
  table, tokens = rng.normal(size=(16, 8)).astype(np.float32), rng.integers(-16, 16, (8, 5))
  loss = lambda table, batch: jnp.sin(table[batch]).sum()
  where, batch = NamedSharding(mesh, spec), ("data", "fsdp")
  gather = Gather.of({("table",): where}, batch, mesh)
  run = jax.jit(jax.value_and_grad(gather.on(loss, lambda *_: [("table",), None])))
  placed = jax.device_put(table, where), jax.device_put(tokens, NamedSharding(mesh, jax.P(batch)))
  text = run.lower(*placed).compile().as_text()
  assert "all-to-all" in text
  assert not re.search(r"f32\[16,8\]\S* all-(gather|reduce)", text)  # neither the table nor its gradient
  found = run(*placed)
  for a, b in zip(found, jax.jit(jax.value_and_grad(loss))(table, tokens), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [[[0, 4, 2], [1, -1, 3]], [[7, 4, 2], [1, -9, 3]]])
@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_the_logit_of_a_target_is_read_without_an_array_of_logits(targets):
  """Out of bounds it is NaN, and has no gradient, as in `jnp.take_along_axis`."""
  mesh = nxp.make_mesh(fsdp=2, devices=jax.devices()[:2])
  logits, targets = jnp.arange(30.0).reshape(2, 3, 5), jnp.asarray(targets)

  def run(arrays, batch):
    x, targets = batch
    value = jax.vmap(jax.value_and_grad(lambda x, t: jnp.take_along_axis(x, t[:, None], axis=-1).sum()))
    return (*value(x * arrays[0][0], targets),)

  where = NamedSharding(mesh, jax.P("fsdp"))
  arrays = [jax.device_put(jnp.ones(2), where)]
  batch = jax.device_put((logits, targets), where)
  changed = jax.jit(mend(run, mesh, picks=True))
  text = changed.lower(arrays, batch).as_text()
  assert "stablehlo.gather" not in text
  assert "stablehlo.scatter" not in text
  for a, b in zip(changed(arrays, batch), run([jnp.ones(2)], (logits, targets)), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_loop_that_swaps_what_it_carries_settles():
  class Swaps(nnx.Module):
    def __init__(self):
      self.layer, self.t = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(()))

    def __call__(self, x):
      carry = jnp.float32(0), self.t[...] * 1.0
      (_, t), _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), carry, length=4)
      return self.layer(x) * t

  plan = nxp.plan(Swaps, nxp.make_mesh(data=2, fsdp=4), nxp.fsdp(min_size=16), optimizer=optax.sgd(0.1))
  loss, x = lambda model, x: (model(x) ** 2).mean(), np.ones((8, 8), np.float32)
  assert run_steps(plan, loss, [x]).losses == pytest.approx([float(loss(Swaps(), x))], rel=1e-5)


def test_a_product_with_a_constant_gradient_gathers_its_kernel_like_other_products():
  # Else XLA ends the process: "ReplicateOnLastTileDim should not be called for HloShardingV3".
  class Block(nnx.Module):
    def __init__(self, rngs):
      self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
      self.table = jnp.ones((4, 8))

    def __call__(self, x):
      x = x * jnp.broadcast_to(self.table, x.shape)
      return x + self.down(jax.nn.gelu(self.up(x)))

  def loss(model, x):
    slope = jax.grad(lambda s: (s * model(x)).mean())(jnp.float32(1.0))
    return (model(x) ** 2).mean() + slope**2

  x = np.random.default_rng(0).normal(size=(16, 4, 8)).astype(np.float32)
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  rules = [nxp.LogicalRules(batch=("data", "fsdp")), nxp.fsdp(("tensor", "fsdp"), min_size=16)]
  plan = nxp.plan(lambda: Block(nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(0.1))
  assert_same_training(loss, {"gathered": plan}, [x] * 2)


squares = lambda model, batch: ((model(batch["x"]) * batch["factor"]) ** 2).mean()


def test_a_model_that_was_sharded_by_hand_has_the_gradients_of_one_device():
  """Without a plan: the step reads the shardings of the arrays and of the batch, which also has a number."""
  mesh, model = nxp.make_mesh(data=2, fsdp=2, tensor=2), nxp.unsharded(lambda: Normed(nnx.Rngs(0)))
  batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32), "factor": np.float32(2)}
  expected = nnx.jit(nnx.grad(squares))(model, batch)
  for path, leaf in nnx.to_flat_state(nnx.state(model)):
    spec = {"scale": jax.P("tensor"), "kernel": jax.P("fsdp", "tensor")}.get(path[-1], jax.P())
    leaf.set_value(jax.device_put(leaf.get_value(), NamedSharding(mesh, spec)))
  optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
  before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
  placed = batch | {"x": jax.device_put(batch["x"], NamedSharding(mesh, jax.P(("data", "fsdp"))))}
  step = nxp.train_step(squares)
  step(model, optimizer, placed)
  assert "leaves" not in str(step.layers)
  after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
  found = jax.tree.map(np.subtract, before, after)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, nnx.to_pure_dict(expected)
  )


def test_a_batch_on_no_mesh_is_left_to_xla_and_the_step_says_so(caplog):
  mesh, model = nxp.make_mesh(data=2, fsdp=2, tensor=2), nxp.unsharded(lambda: Normed(nnx.Rngs(0)))
  for path, leaf in nnx.to_flat_state(nnx.state(model)):
    spec = jax.P("fsdp", "tensor") if path[-1] == "kernel" else jax.P()
    leaf.set_value(jax.device_put(leaf.get_value(), NamedSharding(mesh, spec)))
  batch = {"x": np.ones((16, 16), np.float32), "factor": np.float32(2)}
  optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
  train, evaluate = nxp.train_step(squares), nxp.eval_step(squares)
  train(model, optimizer, batch)
  evaluate(model, batch)
  for step in (train, evaluate):
    assert "leaves the layout of the batch to XLA" in str(step.layers)
    assert "put the batch on their mesh" in str(step.layers)
  assert "leaves the layout of the batch to XLA" in caplog.text


decoder = lambda: decoders.Decoder(SIZES, nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
  ("axes", "positions", "options"),
  [
    ({"fsdp": 2, "tensor": 4}, 65, {}),
    ({"fsdp": 2, "tensor": 4}, 65, {"remat": "full", "scan_layers": True, "microbatches": 2}),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 65, {"scan_layers": True}),
    ({"fsdp": 1, "tensor": 8}, 65, {}),
    ({"fsdp": 2, "tensor": 4}, 64, {"remat": "full"}),  # 63 positions, which 4 does not divide
  ],
  ids=["as written", "rolled, microbatches", "three axes", "one axis", "63 positions"],
)
def test_positions_are_split_between_layers(axes, positions, options):
  tokens = np.random.default_rng(0).integers(1, 64, (8, positions))
  found = []
  for seq in (None, "tensor"):
    names = nxp.LogicalRules(batch=tuple(axis for axis in axes if axis != "tensor"), seq=seq)
    init = lambda: decoders.Decoder(decoders.Config(depth=2), nnx.Rngs(0))
    plan = nxp.plan(init, nxp.make_mesh(axes), [names, DECODER_RULES], optimizer=optax.sgd(0.1))
    model, optimizer, losses, step = run_steps(plan, decoders.loss, [tokens] * 2, **options)
    assert ("positions between layers over tensor: 2 calls" in str(step.layers)) == (seq is not None)
    program = step.compiled(model, optimizer, nxp.shard_batch(tokens, plan))
    memory = program.memory_analysis().temp_size_in_bytes
    found.append((losses, nxp.hosts.to_host(nnx.state(model)), memory))
  (losses, state, whole), (split_losses, split_state, parts) = found
  np.testing.assert_allclose(split_losses, losses, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), split_state, state)
  if positions == 65:
    assert parts < whole


def test_weights_over_the_axis_of_the_positions_are_not_gathered():
  mesh = nxp.make_mesh(data=2, tensor=4)
  rules = [nxp.LogicalRules(batch="data", seq="tensor", fsdp=None), DECODER_RULES]
  plan = nxp.plan(decoder, mesh, rules, optimizer=optax.sgd(0.1))
  batch = jax.ShapeDtypeStruct((8, 65), jnp.int32)
  lowered = nxp.train_step(decoders.loss).lower(plan, batch=batch)
  # What each layer takes and gives, and their gradients.
  assert lowered.as_text().count('[{"data"}, {"tensor"}, {}]>') == 4 * SIZES.depth
  gathered = set(re.findall(r"= f32\[([\d,]+)\]\S* all-gather", lowered.compile().as_text()))
  assert "4,64,64" in gathered  # activations
  assert not gathered & {"64,128", "128,64", "64,4,16", "4,16,64", "64,64"}  # kernels


@pytest.mark.slow
def test_a_stage_of_a_pipeline_gathers_one_layer_at_a_time():
  sizes = decoders.Config(vocab=512, width=64, hidden=128, head_dim=16, depth=4)
  init, mesh = lambda: decoders.Decoder(sizes, nnx.Rngs(0)), nxp.make_mesh(fsdp=4, stage=2)
  plan = nxp.plan(init, mesh, nxp.presets.fsdp(min_size=0), optimizer=optax.sgd(0.1))
  step = nxp.train_step(decoders.loss, microbatches=4, pipeline="stage", remat="full")
  text = step.lower(plan, batch=jax.ShapeDtypeStruct((16, 17), jnp.int32)).compile().as_text()
  found = re.findall(r"= f32\[((?:\d+,)*)(?:64,128|128,64)\]\S* all-gather", text)  # gate, up or down
  assert found
  assert all(math.prod(map(int, dims.split(",")[:-1])) == 1 for dims in found)
