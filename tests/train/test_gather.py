"""Parameters are gathered where a loss reads them, and tables looked up by columns; positions are split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import nnx_parallel as nxp
from benchmarks.plain import decoders

SIZES = decoders.Config(vocab=512, width=64, hidden=128, head_dim=16, depth=2)
TENSOR = nxp.PathRules(
  {
    "embed.embedding": ("tensor", "fsdp"),
    r"(.*\.)?(q|k|v|gate|up|head)\.kernel": ("fsdp", "tensor"),
    r".*\.(o|down)\.kernel": ("tensor", "fsdp"),
    r"(.*\.)?norm\d?\.scale": (None,),
  }
)
LAYOUTS = {
  "fsdp and tensor": ({"fsdp": 4, "tensor": 2}, [nxp.LogicalRules(batch="fsdp"), TENSOR]),
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


class Normed(nnx.Module):
  """Norms over one axis before kernels over two, sharded by hand."""

  def __init__(self, rngs):
    self.norms = nnx.List([nnx.RMSNorm(16, rngs=rngs) for _ in range(2)])
    self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])

  def __call__(self, x):
    for norm, layer in zip(self.norms, self.layers, strict=True):
      x = x + jnp.sin(layer(norm(x)))
    return x


def squares(model, batch):
  return ((model(batch["x"]) * batch["factor"]) ** 2).mean()


def test_a_model_that_was_sharded_by_hand_has_the_gradients_of_one_device():
  """Without a plan: the step reads the shardings of the arrays and of the batch, which also has a number."""
  mesh, model = nxp.make_mesh(data=2, fsdp=2, tensor=2), Normed(nnx.Rngs(0))
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
  mesh, model = nxp.make_mesh(data=2, fsdp=2, tensor=2), Normed(nnx.Rngs(0))
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
