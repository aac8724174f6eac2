"""Activations that every device holds for the examples of all: found where they are, and not elsewhere."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders, others
from nnx_parallel.report.program.replicated import SHARE, Batch
from training import plain_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_have_it")]

ROWS = 16
SMALL = decoders.Config(depth=2)


def entropy(model, batch):
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def ints(*shape):
  return jax.ShapeDtypeStruct((ROWS, *shape), jnp.int32)


IMAGES = {"x": jax.ShapeDtypeStruct((ROWS, 8, 8, 3), "float32"), "y": ints()}
MODELS = {
  "Llama": (lambda rngs: decoders.Decoder(SMALL, rngs), decoders.loss, ints(17)),
  "ConvNet": (lambda rngs: others.ConvNet(rngs, depths=(2, 2)), entropy, IMAGES),
}
MESHES = {"fsdp": {"fsdp": 8}, "tensor": {"data": 2, "fsdp": 2, "tensor": 2}}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "mesh"), [("Llama", "tensor"), ("Llama", "fsdp"), ("ConvNet", "tensor")])
@pytest.mark.slow
def test_a_plain_model_has_none(name, mesh):
  """Except depthwise convolutions with channels over `tensor`: XLA gathers examples and channels for them."""
  init, loss, batch = MODELS[name]
  rules = nxp.fsdp(min_size=0) if mesh == "fsdp" else nxp.presets.fsdp_tensor(min_size=0)
  plan = nxp.plan(lambda: init(nnx.Rngs(0)), nxp.make_mesh(MESHES[mesh]), rules, optimizer=optax.adam(1e-3))
  step = nxp.train_step(loss, remat="full", scan_layers=True)
  found = nxp.compile_report(step, plan, batch=batch).replicated_activations
  if (name, mesh) == ("ConvNet", "tensor"):
    copies = {"batch['x']"} if jax.__version_info__ >= (0, 12) else set()  # without a name before
    assert {one.op.rpartition("/")[2] for one in found} == {"conv_general_dilated", *copies}
    assert all(one.shape[one.batch_dim] == ROWS for one in found)
  else:
    assert found == ()


class Net(nnx.Module):
  """A table that is far larger than what is looked up in it, and a head; between them, what a test does."""

  def __init__(self, rngs, between=jnp.sin):
    self.table, self.head = nnx.Embed(8192, 64, rngs=rngs), nnx.Linear(64, 256, rngs=rngs)
    self.between = between

  def __call__(self, tokens):
    x = self.table(tokens)
    return self.head(self.between(x))


TABLE_LINE = Net.__call__.__code__.co_firstlineno + 1


def loss(model, tokens):
  return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:] % 256).mean()


def report(step, between=jnp.sin, rules=None, length=65, **axes):
  mesh = nxp.make_mesh(axes or {"fsdp": 8})
  rules = nxp.fsdp(min_size=0) if rules is None else rules
  plan = nxp.plan(lambda: Net(nnx.Rngs(0), between), mesh, rules, optimizer=optax.sgd(0.1))
  return nxp.compile_report(step, plan, batch=ints(length))


def test_a_look_up_of_all_examples_is_found_where_nothing_is_held():
  found = report(plain_step(loss))
  one = min(found.replicated_activations, key=lambda one: one.place)
  assert (one.dtype, one.shape) == ("f32", (ROWS, 64, 64))
  assert (one.bytes, one.batch_dim) == (4 * ROWS * 64 * 64, 0)
  assert one.source.endswith(f"test_replicated.py:{TABLE_LINE}")
  assert one.bytes > SHARE * found.need_bytes
  assert one.source in {row["source"] for row in json.loads(found.to_json())["replicated_activations"]}
  assert report(nxp.train_step(loss)).replicated_activations == ()


def test_a_parameter_as_long_as_a_row_hides_no_activation():
  """A bias, and a table of positions, have the dims of an activation without its examples."""
  known = Batch(ROWS, 1, {(64,), (64, 32), (ROWS, 8)})
  assert [known.dim_of(dims) for dims in ((ROWS, 64), (ROWS, 64, 32), (2, ROWS, 64))] == [0, 0, 1]
  for dims in ((8, ROWS), (2, 8, ROWS), (ROWS, ROWS), (64, 32)):  # a parameter, two such dims, no examples
    assert known.dim_of(dims) is None


def whole(x):
  return jnp.sin(jax.lax.with_sharding_constraint(x, jax.P()))


def test_a_constraint_that_asks_for_it_is_named():
  found = report(nxp.train_step(loss), whole)
  first = min(found.replicated_activations, key=lambda one: one.place)
  line = whole.__code__.co_firstlineno + 1
  text = " ".join(str(found).split())
  assert "Activations replicated over the batch axes" in text
  made = first.source.rpartition("/")[2]
  assert made in (f"test_replicated.py:{TABLE_LINE}", f"test_replicated.py:{line}")
  assert f'f32[16,64,64] at {made}: nxp.constrain(x, "batch", None, None).' in text
  assert made in found.to_html()


@pytest.mark.nightly
def test_the_call_that_it_names_splits_the_activation():
  found = report(plain_step(loss), lambda x: jnp.sin(nxp.constrain(x, "batch", None, None)))
  assert not [one for one in found.replicated_activations if one.op.endswith("sin")]
  fixed = report(nxp.train_step(loss), lambda x: jnp.sin(nxp.constrain(x, "batch", None, None)))
  assert fixed.replicated_activations == ()
  assert "or more is replicated over the batch axes." in str(fixed)


def test_the_parts_of_a_batch_are_compared_with_a_part():
  step = nxp.train_step(loss, microbatches=2)
  assert report(step).replicated_activations == ()
  found = report(step, whole).replicated_activations
  assert {one.shape[0] for one in found} == {ROWS // 2}


def columns(x):
  return jnp.sin(jax.lax.with_sharding_constraint(x, jax.P(None, None, "tensor")))


def test_an_array_that_another_axis_splits_is_whole_along_the_batch():
  rules = [nxp.LogicalRules(batch="fsdp"), nxp.fsdp(min_size=0)]
  found = report(nxp.train_step(loss), columns, rules, fsdp=4, tensor=2).replicated_activations
  assert {one.shape for one in found if one.shape[-1] == 32} == {(ROWS, 64, 32)}


def test_what_the_batchs_own_axis_splits_otherwise_is_not_whole():
  features = lambda x: jnp.sin(jax.lax.with_sharding_constraint(x, jax.P(None, None, "fsdp")))
  found = report(nxp.train_step(loss), features).replicated_activations
  assert all(one.shape == (ROWS, 64, 64) for one in found)  # what is gathered again for the head


def test_a_gradient_with_a_dim_as_long_as_the_batch_is_no_activation():
  mesh = nxp.make_mesh(data=8)
  init = lambda: nnx.Linear(ROWS, 4096, use_bias=False, rngs=nnx.Rngs(0))
  plan = nxp.plan(init, mesh, optimizer=optax.sgd(0.1))
  batch = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
  found = nxp.compile_report(nxp.train_step(lambda model, x: (model(x) ** 2).mean()), plan, batch=batch)
  assert found.replicated_activations == ()


def test_without_a_plan_or_a_split_nothing_is_said():
  rules = [nxp.LogicalRules(batch=None), nxp.fsdp(min_size=0)]
  found = report(nxp.train_step(loss), rules=rules)
  assert found.replicated_activations is None
  assert "along the batch" not in str(found)
  x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(nxp.make_mesh(fsdp=8), jax.P()))
  assert nxp.compile_report(jax.jit(jnp.sin).lower(x)).replicated_activations is None
