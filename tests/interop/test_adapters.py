"""Adapters of Qwix and of flax beside the weights of unedited models: trained, saved alone, merged."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain.decoders import Config, Decoder
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.adapters import merge_adapters

pytestmark = pytest.mark.usefixtures("as_users_have_it")
needs_qwix = pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="qwix is optional")
AXES = {"fsdp": 4, "tensor": 2}
RULES = [
  nxp.LogicalRules(batch="fsdp"),
  nxp.PathRules([(r".*\.kernel_lora_b", (None, "tensor"))]),
  nxp.fsdp(min_size=256),
]
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)


def base_init(config=None):
  return Decoder(config or Config(), nnx.Rngs(0))


def adapted_init(config=None, **options):
  import qwix

  provider = qwix.LoraProvider(module_path=r"layers/.*", rank=4, alpha=8.0, **options)
  tokens = jnp.zeros((1, 8), jnp.int32)
  return qwix.apply_lora_to_model(base_init(config), provider, tokens, rngs=nnx.Rngs(1))


def loss_fn(model, tokens):
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def logits(model):
  return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS)))


def trained(plan, model, optimizer):
  step = nxp.train_step(loss_fn, remat="full", scan_layers=True)
  tokens = nxp.shard_batch(TOKENS, plan)
  losses = [float(step(model, optimizer, tokens)["loss"]) for _ in range(5)]
  assert "one scan of 4" in str(step.layers)
  return losses


@pytest.mark.nightly
@pytest.mark.slow
@needs_qwix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("weights", [None, "int8"], ids=["float", "int8"])
def test_adapters_by_path_of_an_unedited_model(weights, tmp_path):
  import qwix

  def init():
    return adapted_init(**({} if weights is None else {"weight_qtype": weights}))

  base = nxp.create_sharded_model(base_init, nxp.make_mesh(AXES), RULES)
  plan = nxp.plan(init, nxp.make_mesh(AXES), RULES, optimizer=optax.adam(1e-2), wrt=nnx.LoRAParam)
  assert plan["layers.0.mlp.up.kernel_lora_b"].spec == jax.P(None, "tensor")
  assert not [x for x in plan.leaves if x.root == "optimizer" and "lora" not in x.name and x.shape]
  model, optimizer = nxp.create_sharded_model(plan)
  # Weights from elsewhere: those of the base, rounded where it is to be int8.
  if weights is None:
    given = nnx.to_pure_dict(nnx.state(base))
  else:
    given = jax.jit(lambda x: qwix.quantize_params(x, model))(nnx.to_pure_dict(nnx.state(base)))
  nnx.update(model, given)
  model, optimizer = nxp.reshard(model, plan, optimizer=optimizer)
  before = nxp.hosts.to_host(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  losses = trained(plan, model, optimizer)
  assert losses[-1] < losses[0] - 1
  after = nxp.hosts.to_host(nnx.state(model, nnx.Not(nnx.LoRAParam)))
  assert jax.tree.all(jax.tree.map(np.array_equal, before, after))

  with nxp.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(5, model, optimizer, only=nnx.LoRAParam)
    assert len(checkpointer.metadata().items["model"].leaves) == 2 * 7 * 4
  found = logits(model)
  nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.LoRAParam)))
  assert np.abs(logits(model) - found).max() > 0.1
  again, _ = nxp.Checkpointer(tmp_path).restore((model, optimizer), only=nnx.LoRAParam)
  np.testing.assert_array_equal(logits(again), found)

  names = merge_adapters(base, again, scale=8.0 / 4)
  assert len(names) == 7 * 4
  # An int8 weight is within 1/254 of the largest of its column.
  np.testing.assert_allclose(logits(base), found, atol=1e-4 if weights is None else 0.3)
  if weights is not None:
    assert np.abs(logits(base) - found).mean() < 0.04


class Two(nnx.Module):
  def __init__(self, linear):
    self.up, self.down = linear(8, 32, rngs=nnx.Rngs(0)), linear(32, 8, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_merged_adapters_of_flax(explicit):
  def with_adapters(*sizes, rngs):
    return nnx.LoRALinear(*sizes, lora_rank=3, rngs=rngs)

  mesh, rules = nxp.make_mesh(AXES, explicit=explicit), [nxp.fsdp(min_size=64)]
  model = nxp.create_sharded_model(lambda: Two(with_adapters), mesh, rules)
  base = nxp.create_sharded_model(lambda: Two(nnx.Linear), mesh, rules)
  nnx.update(base, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.LoRAParam))))
  for n, layer in enumerate((model.up, model.down)):
    second = layer.lora.lora_b
    second[...] = jax.device_put(
      jax.random.normal(jax.random.key(n), second.shape), second.get_value().sharding
    )
  sharding = base.up.kernel.get_value().sharding
  assert merge_adapters(base, model) == ["down.kernel", "up.kernel"]
  assert base.up.kernel.get_value().sharding == sharding
  x = jnp.ones((4, 8))
  merged, beside = (nnx.merge(nnx.graphdef(m), nxp.hosts.to_host(nnx.state(m)))(x) for m in (base, model))
  np.testing.assert_allclose(merged, beside, rtol=1e-5)


def test_errors():
  base, adapted = Two(nnx.Linear), Two(lambda *n, rngs: nnx.LoRALinear(*n, lora_rank=2, rngs=rngs))
  with pytest.raises(CheckpointError, match="Two has no adapter"):
    merge_adapters(adapted, base)
  with pytest.raises(CheckpointError, match=r"the base has no kernel"):
    merge_adapters(base, nnx.LoRALinear(8, 32, lora_rank=2, rngs=nnx.Rngs(0)))


@pytest.mark.nightly
@pytest.mark.slow
@needs_qwix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_70b_base_with_adapters_on_8_chips():
  config = Config(
    vocab=128256, width=8192, heads=64, kv_heads=8, head_dim=128, hidden=28672, depth=80, dtype="bfloat16"
  )
  mesh, rules = nxp.abstract_mesh(fsdp=8), [nxp.LogicalRules(batch="fsdp"), nxp.fsdp()]
  plan = nxp.plan(
    lambda: adapted_init(config, weight_qtype="int8"),
    mesh,
    rules,
    optimizer=optax.adam(1e-4),
    wrt=nnx.LoRAParam,
  )
  assert plan.num_parameters() > 70e9
  trainable = sum(x.bytes for x in plan.leaves if "lora" in x.name and x.root == "model")
  state = sum(x.bytes for x in plan.leaves if x.root == "optimizer" and x.shape)
  assert state == pytest.approx(2 * trainable, rel=1e-3)
  assert sum(x.bytes_per_device for x in plan.leaves) < 10 * 2**30
