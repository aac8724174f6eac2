"""Padding is real and nobody sees it: modules, gradients, optimizers and norms are those of one device."""

import copy
import functools
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.core.padding import crop, pad_variable
from nnx_parallel.errors import ShardingError
from nnx_parallel.testing import assert_same_training
from training import plain_step

VOCAB, STORED = 50257, 50264
RULES = nxp.LogicalRules(vocab="tensor", batch="tensor")


class TiedLM(nnx.Module):
  """Tied embedding over a vocabulary that 8 devices cannot split, and a layer of an odd width."""

  def __init__(self, rngs, vocab=VOCAB):
    self.embed = nnx.Embed(vocab, 8, rngs=rngs, embedding_metadata=named("vocab", None))
    self.head = self.embed.embedding
    self.up = nnx.Linear(8, 30, rngs=rngs, kernel_metadata=named(None, "vocab"), bias_metadata=named("vocab"))
    self.down = nnx.Linear(30, 8, rngs=rngs, kernel_metadata=named("vocab", None))

  def __call__(self, tokens):
    x = self.embed(tokens)
    return (x + self.down(nnx.gelu(self.up(x)))) @ self.head[...].T


def loss_fn(model, batch):
  logits = model(batch["x"])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def data():
  tokens = np.random.default_rng(0).integers(0, VOCAB, (8, 9))
  tokens[0, 0] = VOCAB - 1  # the last real row stands next to the padding
  return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


def create(mesh, tx, **kwargs):
  plan = nxp.plan(lambda: TiedLM(nnx.Rngs(0)), mesh, RULES, optimizer=tx, uneven="pad", **kwargs)
  return plan, *nxp.create_sharded_model(plan)


def train(mesh, tx, step, steps=4):
  plan, model, optimizer = create(mesh, tx)
  batch = nxp.shard_batch(data(), plan)
  losses = [float(step(model, optimizer, batch)) for _ in range(steps)]
  return losses, model, optimizer


def make_ours():
  step = nxp.train_step(loss_fn)
  return lambda model, optimizer, batch: step(model, optimizer, batch)["loss"]


OPTIMIZERS = {
  "adamw and clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
  "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


@pytest.fixture(scope="module")
def one_device():
  """Losses and trained modules of one device, where nothing is padded, by the name of an optimizer."""
  mesh = nxp.make_mesh(tensor=1, devices=jax.devices()[:1])
  return functools.cache(lambda name: train(mesh, OPTIMIZERS[name](), make_ours()))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "make_step"), [
  ("adamw and clip", make_ours), ("adamw and clip", lambda: plain_step(loss_fn)), ("adafactor", make_ours),
])  # fmt: skip
def test_a_vocabulary_of_50257_on_8_devices_trains_as_on_one(one_device, name, make_step):
  expected, reference, _ = one_device(name)
  losses, model, optimizer = train(nxp.make_mesh(tensor=8), OPTIMIZERS[name](), make_step())
  np.testing.assert_allclose(losses, expected, rtol=2e-6)
  table = model.embed.embedding
  assert table.shape == (VOCAB, 8)
  np.testing.assert_allclose(jax.device_get(table[...]), jax.device_get(reference.head[...]), atol=2e-6)
  # Storage: split for good, and zero in the padding, in the model and in the optimizer.
  assert table.get_raw_value().shape == (STORED, 8)
  assert table.get_raw_value().addressable_shards[0].data.shape == (STORED // 8, 8)
  is_variable = lambda x: isinstance(x, nnx.Variable)
  for variable in jax.tree.leaves(nnx.state((model, optimizer)), is_leaf=is_variable):
    raw = variable.get_raw_value()
    if raw.shape[:1] == (STORED,):
      assert not jax.device_get(raw)[VOCAB:].any()


def test_slicing_adds_no_collective():
  """The compiled step of a padded table is the one of a table that divides, but for its sizes."""

  def collectives(vocab):
    init = lambda: nnx.Embed(vocab, 8, rngs=nnx.Rngs(0), embedding_metadata=named("vocab", None))
    model = nxp.create_sharded_model(init, nxp.make_mesh(tensor=8), RULES, uneven="pad")
    loss = lambda model, tokens: jax.nn.log_softmax(model(tokens) @ model.embedding[...].T).mean()
    graphdef, state = nnx.split(model)

    def step(state, tokens):
      grads = jax.grad(lambda s: loss(nnx.merge(graphdef, s), tokens))(state)
      return jax.tree.map(lambda p, g: p - g, state, grads)

    shardings = jax.tree.map(lambda x: x.sharding, state)
    text = jax.jit(step, out_shardings=shardings).lower(state, jnp.zeros((4,), jnp.int32)).compile().as_text()
    kinds = ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute(", "reduce-scatter(")
    return {kind: text.count(f" {kind}") for kind in kinds}

  assert collectives(61) == collectives(64)
  assert collectives(61)["all-gather("] == 0


def linear(**kwargs):
  init = lambda: nnx.Linear(8, 30, rngs=nnx.Rngs(0), kernel_metadata=named(None, "tensor"))
  return nxp.create_sharded_model(init, nxp.make_mesh(tensor=8, **kwargs), uneven="pad")


def test_a_padded_variable_is_its_own_kind_at_its_own_shape():
  model = linear()
  kernel = model.kernel
  assert isinstance(kernel, nnx.Param)
  assert list(nnx.to_flat_state(nnx.state(model, nnx.Param)).paths) == [("bias",), ("kernel",)]
  assert (kernel.shape, kernel.ndim, kernel.size, kernel.T.shape) == ((8, 30), 2, 240, (30, 8))
  assert kernel[1].shape == (30,)
  assert kernel[:, 29:].shape == (8, 1)
  assert (kernel + 1.0).shape == (1.0 - kernel).shape == jnp.sin(kernel).shape == (8, 30)
  assert len(kernel) == 8
  assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "tensor")
  assert "PaddedParam" in repr(kernel)
  assert "shape=(8, 30)" in repr(model)


def test_reads_of_an_unchanged_variable_give_one_array():
  """Qwix and others find the Variable of an operand by the identity of its array, as flax lets them."""
  model = linear()
  kernel = model.kernel
  held = kernel[...]
  assert kernel.get_value() is held

  @nnx.jit
  def read(model):
    one = model.kernel[...]
    assert model.kernel.get_value() is one
    inner = jax.jit(lambda: model.kernel[...] + 1.0)()  # another trace: an array of its own
    model.kernel[...] = one * 2.0
    assert model.kernel[...] is not one
    return model.kernel[...] + inner

  np.testing.assert_allclose(read(model), 3 * held + 1, atol=1e-6)
  np.testing.assert_array_equal(kernel[...], 2 * held)
  jax.make_jaxpr(lambda: kernel[...])()
  assert not isinstance(kernel[...], jax.core.Tracer)
  kept = weakref.ref(kernel[...])
  assert kept() is None  # who reads keeps it alive, the Variable does not hold a second copy


def test_values_are_set_at_the_logical_shape_and_stay_sharded():
  kernel = linear().kernel
  before = kernel.sharding
  kernel[...] = jnp.ones((8, 30))
  assert (kernel.sharding, kernel.get_raw_value().shape) == (before, (8, 32))
  assert float(kernel.get_raw_value().sum()) == 240
  kernel[0, 29] = 5.0
  assert float(kernel[0, 29]) == 5.0
  kernel.set_value(jnp.zeros((8, 30)))
  assert float(kernel.get_raw_value().sum()) == 0
  message = r"cannot set a padded Param to .* \(8, 32\).\n  its shape is \(8, 30\), stored as \(8, 32\)"
  with pytest.raises(ShardingError, match=message):
    kernel.set_value(jnp.zeros((8, 32)))


def test_statistics_that_a_module_writes_stay_padded_and_right():
  init = lambda: nnx.BatchNorm(30, rngs=nnx.Rngs(0))
  names = nxp.PathRules([(".*", ("tensor",))])
  model = nxp.create_sharded_model(init, nxp.make_mesh(tensor=8), names, uneven="pad")
  alone, x = init(), jax.random.normal(jax.random.key(1), (16, 30))
  call = nnx.jit(lambda m, x: m(x))
  np.testing.assert_allclose(call(model, x), call(alone, x), atol=1e-6)
  np.testing.assert_allclose(model.mean[...], alone.mean[...], atol=1e-7)
  assert model.mean.get_raw_value().shape == (32,)
  assert type(model.mean).__bases__ == (nnx.BatchStat,)


def test_own_variable_types_with_overrides_and_slots_are_padded():
  class Scaled(nnx.Param):
    def get_value(self, **index):
      return super().get_value(**index) * 2.0

  padded = pad_variable(Scaled(jnp.ones(3)), jnp.array([1.0, 1.0, 1.0, 0.0]), (4,))
  np.testing.assert_array_equal(padded[...], [2.0, 2.0, 2.0])
  assert isinstance(padded, Scaled)


def test_stacked_padded_layers_run_under_vmap_and_scan():
  names = {"transform_metadata": {nnx.PARTITION_NAME: None}}
  make = lambda key: nnx.Linear(6, 6, rngs=nnx.Rngs(key), kernel_metadata=named(None, "tensor"))
  init = lambda: nnx.vmap(make, **names)(jax.random.split(jax.random.key(0), 3))
  model = nxp.create_sharded_model(init, nxp.make_mesh(tensor=8), nxp.replicate(), uneven="pad")
  with nnx.use_eager_sharding(False):
    alone = init()
  x = jax.random.normal(jax.random.key(1), (4, 6))

  scanned = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **names)
  mapped = nnx.vmap(lambda x, layer: layer(x), in_axes=(None, 0), **names)
  for run in (nnx.jit(lambda x, model: scanned(x, model)), nnx.jit(lambda x, model: mapped(x, model))):
    np.testing.assert_allclose(run(x, model), run(x, alone), atol=1e-6)


def test_cloned_copied_merged_and_pickled_variables_stay_padded():
  model = linear()
  graphdef, state = nnx.split(model)
  for other in (nnx.clone(model), nnx.merge(graphdef, state), copy.deepcopy(model)):
    assert (other.kernel.shape, other.kernel.get_raw_value().shape) == ((8, 30), (8, 32))
  padded = pad_variable(nnx.Param(np.ones(3, np.float32)), np.array([1, 1, 1, 0], np.float32), (4,))
  again = pickle.loads(pickle.dumps(padded))
  assert (type(again), again.shape) == (type(padded), (3,))


def test_an_explicit_mesh_gathers_what_it_cannot_split_and_agrees():
  mesh = nxp.make_mesh(tensor=8, explicit=True)
  init = lambda: nnx.Linear(8, 30, rngs=nnx.Rngs(0), kernel_metadata=named(None, "tensor"))
  tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
  with jax.set_mesh(mesh):
    plan = nxp.plan(init, mesh, nxp.LogicalRules(batch=None), optimizer=tx, uneven="pad")
    model, optimizer = nxp.create_sharded_model(plan)
    step = nxp.train_step(lambda m, x: (m(x) ** 2).mean())
    explicit = [float(step(model, optimizer, jnp.ones((8, 8)))["loss"]) for _ in range(3)]
  with nnx.use_eager_sharding(False):
    alone = nnx.Linear(8, 30, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(alone, plan.tx, wrt=nnx.Param)
  plain = [float(step(alone, optimizer, jnp.ones((8, 8)))["loss"]) for _ in range(3)]
  np.testing.assert_allclose(explicit, plain, rtol=1e-6)
  assert model.kernel.get_raw_value().sharding == plan["kernel"].sharding


def test_dims_that_transforms_take_or_add_are_found():
  logical, storage = (3, 30, 5), (3, 32, 5)
  assert crop(jnp.zeros((32, 5)), logical, storage).shape == (30, 5)
  assert crop(jnp.zeros((3, 32)), logical, storage).shape == (3, 30)
  assert crop(jnp.zeros((7, 3, 32, 5)), logical, storage).shape == (7, 3, 30, 5)
  assert crop(jnp.zeros(logical), logical, storage).shape == logical
  assert crop(None, logical, storage) is None


def test_a_shape_that_does_not_tell_where_the_padding_is_is_an_error():
  with pytest.raises(ShardingError, match=r"shape \(8, 8\) \(logical \(6, 7\)\) has the shape \(8,\) here"):
    crop(jnp.zeros(8), (6, 7), (8, 8))
  with pytest.raises(ShardingError, match="which is neither of the two"):
    crop(jnp.zeros((4, 4)), (6, 7), (8, 8))


class Raw(nnx.Module):  # An array in a Variable, and one that the module holds as it is
  def __init__(self, rngs):
    self.table = nnx.data(jnp.ones((5, 6)))
    self.weight = nnx.Param(jnp.ones((5, 6)))

  def __call__(self, x):
    return x @ self.table + x @ self.weight


def test_an_array_without_a_variable_is_not_padded():
  names = nxp.PathRules([("table|weight", (None, "tensor"))])
  plan = nxp.plan(lambda: Raw(nnx.Rngs(0)), nxp.make_mesh(tensor=8), names, uneven="pad")
  assert (plan["table"].padding, plan["weight"].padding) == ((0, 0), (0, 2))
  why = "'tensor' -> replicated: 6 would be padded, which only an nnx.Variable hides"
  assert why in plan.explain("table")
  model = nxp.create_sharded_model(plan)
  assert model(jnp.ones((2, 5))).shape == (2, 6)


def test_the_plan_shows_the_padding():
  plan = nxp.plan(lambda: TiedLM(nnx.Rngs(0)), nxp.make_mesh(tensor=8), RULES, uneven="pad")
  leaf = plan["embed.embedding"]
  assert (leaf.shape, leaf.storage_shape, leaf.padding) == ((VOCAB, 8), (STORED, 8), (7, 0))
  assert "'vocab' -> 'tensor': 50257 is padded to 50264" in plan.explain("embed.embedding")
  assert "stored as [50264,8]" in " ".join(str(plan).split())


def test_one_name_may_be_padded_and_the_rest_be_errors():
  rules = nxp.LogicalRules(vocab="tensor", heads="tensor", uneven={"vocab": "pad"})
  names = {"kernel_metadata": named("vocab", None), "bias_metadata": named("heads")}
  init = lambda: nnx.Linear(30, 6, rngs=nnx.Rngs(0), **names)
  with pytest.raises(ShardingError, match=r"cannot shard bias: dim 0 \('heads'\) has length 6, which 8"):
    nxp.plan(init, nxp.make_mesh(tensor=8), rules)
  plan = nxp.plan(init, nxp.make_mesh(tensor=8), rules.replace(heads=None))
  assert plan["kernel"].storage_shape == (32, 6)


class OddNet(nnx.Module):  # Nothing here divides by 8, one array is no Variable, and the table has odd rows
  def __init__(self, rngs):
    self.embed, self.up = nnx.Embed(13, 6, rngs=rngs), nnx.Linear(6, 15, rngs=rngs)
    self.raw = nnx.data(jnp.ones((1, 1, 15)))

  def __call__(self, tokens):
    return self.up(self.embed(tokens)) * self.raw


@pytest.mark.slow
def test_the_fallback_pads_what_nothing_divides():
  init = lambda: OddNet(nnx.Rngs(0))
  rules, tx = nxp.fsdp(min_size=0), optax.adam(1e-2)
  plan = nxp.plan(init, nxp.make_mesh(fsdp=8), rules, optimizer=tx, uneven="pad")
  found = {leaf.name: leaf.padding for leaf in plan.of("model").values()}
  assert found == {"embed.embedding": (3, 0), "raw": (0, 0, 0), "up.bias": (1,), "up.kernel": (0, 1)}
  assert all(leaf.copies == 1 for leaf in plan.leaves if leaf.padding and any(leaf.padding))
  assert plan["up.kernel"].decision.reason == "fsdp on the largest dim, padded"
  batches = [np.arange(i, i + 16).reshape(8, 2) % 13 for i in range(3)]
  loss = lambda model, x: (model(x) ** 2).mean()
  assert_same_training(loss, {"fsdp": plan}, batches)
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)


def test_padding_of_names_and_of_the_fallback_add_up():
  init = lambda: nnx.Linear(9, 7, rngs=nnx.Rngs(0), kernel_metadata=named(None, "mlp"))
  rules = [nxp.LogicalRules(mlp="tensor"), nxp.fsdp(min_size=0)]
  leaf = nxp.plan(init, nxp.make_mesh(fsdp=2, tensor=4), rules, uneven="pad")["kernel"]
  assert (leaf.spec, leaf.padding) == (jax.P(None, ("tensor", "fsdp")), (0, 1))
  leaf = nxp.plan(init, nxp.make_mesh(fsdp=4, tensor=2), rules, uneven="pad")["kernel"]
  assert (leaf.spec, leaf.padding) == (jax.P(None, ("tensor", "fsdp")), (0, 1))
