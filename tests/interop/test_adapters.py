"""Adapters of Qwix and of flax beside the weights of unedited models: trained, saved alone, merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.adapters import merge_adapters

pytestmark = pytest.mark.usefixtures("as_users_have_it")
AXES = {"fsdp": 4, "tensor": 2}


class Two(nnx.Module):
  def __init__(self, linear):
    self.up, self.down = linear(8, 32, rngs=nnx.Rngs(0)), linear(32, 8, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_merged_adapters_of_flax(explicit):
  with_adapters = lambda *sizes, rngs: nnx.LoRALinear(*sizes, lora_rank=3, rngs=rngs)
  mesh, rules = nxp.make_mesh(AXES, explicit=explicit), [nxp.fsdp(min_size=64)]
  model = nxp.create_sharded_model(lambda: Two(with_adapters), mesh, rules)
  base = nxp.create_sharded_model(lambda: Two(nnx.Linear), mesh, rules)
  nnx.update(base, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.LoRAParam))))
  for n, layer in enumerate((model.up, model.down)):
    second = layer.lora.lora_b
    drawn = jax.random.normal(jax.random.key(n), second.shape)
    second[...] = jax.device_put(drawn, second.get_value().sharding)
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
