"""Small runs to save, and ways to compare what comes back."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore as ts
from flax import nnx
from jax import NamedSharding, P

import nnx_parallel as nxp
from nnx_parallel.core.nodes import value_of, variables

MESHES = {
  "8": lambda: nxp.make_mesh(fsdp=8),
  "2x4": lambda: nxp.make_mesh(data=2, fsdp=4),
  "4 explicit": lambda: nxp.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4], explicit=True),
  "1": lambda: nxp.make_mesh(fsdp=1, devices=jax.devices()[:1]),
}


class Net(nnx.Module):
  """Every kind of state that a module has: parameters, statistics, keys, counters, lists, raw arrays."""

  def __init__(self, width=32):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
    self.norm = nnx.BatchNorm(width, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(7))
    self.head = nnx.Linear(width, 6, rngs=rngs)
    self.table = nnx.Cache(jnp.arange(4, dtype=jnp.bfloat16))

  def __call__(self, x):
    for layer in self.layers:
      x = self.dropout(nnx.relu(self.norm(layer(x))))
    return self.head(x)


def make_plan(mesh="8", *, width=32, optimizer=True):
  tx = optax.adam(1e-2) if optimizer else None
  return nxp.plan(lambda: Net(width), MESHES[mesh](), nxp.fsdp(min_size=16), optimizer=tx)


loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(step):
  rng = np.random.default_rng(step)
  return {"x": rng.standard_normal((16, 32), np.float32), "y": rng.standard_normal((16, 6), np.float32)}


def host(tree):
  """The leaves of a module, optimizer or pytree as numpy arrays; keys as their data."""
  if isinstance(tree, (nnx.Module, nnx.Optimizer)):
    tree = {str(path): value_of(leaf) for path, leaf in variables(tree).items()}
  is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  leaves = [(path, jax.random.key_data(x) if is_key(x) else x) for path, x in jax.tree.leaves_with_path(tree)]
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(a, b):
  a, b = host(a), host(b)
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == b[name].dtype, name
    assert a[name].tobytes() == b[name].tobytes(), f"{name}: {a[name]} against {b[name]}"


def arrays(seed=0, mesh=None):
  """A small flat tree on 8 devices."""
  mesh = mesh or nxp.make_mesh(a=2, b=4)
  rng = np.random.default_rng(seed)

  def put(shape, spec, dtype=np.float32):
    return jax.device_put(rng.standard_normal(shape).astype(dtype), NamedSharding(mesh, P(*spec)))

  half = lambda: put((4, 4), (None, "a"), jnp.bfloat16)
  return {"w": put((8, 16), ("a", "b")), "b": put((16,), ("b",)), "half": half(), "step": put((), ())}


def target_of(tree, mesh=None):
  """Abstract arrays like a tree's, in the same layout or replicated on another mesh."""
  layout = lambda x: NamedSharding(mesh, P()) if mesh else x.sharding
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout(x)), tree)


def data_of(directory, step, item="model"):
  """The file of an item's names and small arrays, merged of those of all processes."""
  files = (directory / str(step) / item / "d").iterdir()
  return max(files, key=lambda path: path.stat().st_size)


def file_with(directory, step, values, item="model"):
  """The file with these bytes of an array."""
  files = (directory / str(step) / item).rglob("d/*")
  return next(path for path in files if values in path.read_bytes())


def flip(path, bit=137):
  data = bytearray(path.read_bytes())
  data[bit // 8 % len(data)] ^= 1 << bit % 8
  path.write_bytes(data)


def broken(number):
  """What fails with this number of an error of the operating system."""

  def fail(*_, **__):
    raise OSError(number, os.strerror(number))

  return fail


def chunks_of(directory, step, name, item="model"):
  """The bytes of each chunk of an array, with its checksum of four."""
  folder = f"{directory}/{step}/{item}/"
  store = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": folder}}).result()
  keys = [key for key in store.list().result() if key.startswith(f"{name}/c".encode())]
  return [len(store[key]) for key in keys]
