"""Models with the traits that creation must handle, small enough for eight simulated devices."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

NAMES = {"kernel_metadata": {"out_sharding": ("embed", "mlp")}, "bias_metadata": {"out_sharding": ("mlp",)}}


class Block(nnx.Module):  # A residual block with names on its kernels and none on its norm
  def __init__(self, width: int, rngs: nnx.Rngs):
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs, **NAMES)
    names = {"out_sharding": ("mlp", "embed")}
    self.down = nnx.Linear(4 * width, width, rngs=rngs, kernel_metadata=names, use_bias=False)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x + self.dropout(self.down(nnx.relu(self.up(self.norm(x)))))


class Stack(nnx.Module):  # Blocks, a tied embedding, batch statistics and a constant
  def __init__(self, depth: int, width: int, rngs: nnx.Rngs):
    self.embed = nnx.Embed(32, width, rngs=rngs)
    self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
    self.statistics = nnx.BatchNorm(width, rngs=rngs)
    self.table = nnx.Variable(jnp.asarray(np.linspace(0, 1, 32 * width, dtype=np.float32).reshape(32, width)))
    self.head = self.embed

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens) + self.table[...][tokens]
    for block in self.blocks:
      x = block(x)
    return self.head.attend(self.statistics(x))


stack = lambda: Stack(2, 16, nnx.Rngs(0, dropout=1))


def loss(model: Stack, tokens: jax.Array) -> jax.Array:
  logits = model(tokens[:, :-1])
  labels = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
  return -(jax.nn.log_softmax(logits) * labels).sum(-1).mean()


def arrays_of(node: object) -> dict[str, np.ndarray]:
  """Every array of a module on the host, by dotted path; keys as numbers."""
  found = {}
  for path, leaf in nnx.to_flat_state(nnx.state(node)):
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
      value = jax.random.key_data(value)
    found[".".join(map(str, path))] = np.asarray(value)
  return found


def assert_same_arrays(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], *, atol=0.0) -> None:
  """Bit for bit; floats within `atol`."""
  assert left.keys() == right.keys()
  for name, value in left.items():
    if atol and value.dtype == np.float32:
      np.testing.assert_allclose(value, right[name], rtol=0, atol=atol, err_msg=name, strict=True)
    else:
      np.testing.assert_array_equal(value, right[name], err_msg=name, strict=True)
