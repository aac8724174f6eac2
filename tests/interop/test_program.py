"""Programs in a file run as before in a process that has not the source of the model."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.program import export_program, load_program

ROOT = Path(__file__).resolve().parents[2]
AXES = {"fsdp": 4, "tensor": 2}

RULES = [nxp.LogicalRules(batch="fsdp", embed=None, mlp="tensor"), nxp.replicate()]


class Net(nnx.Module):  # Has a Variable that a call changes, a list, and bfloat16
  def __init__(self):
    rngs = nnx.Rngs(0)
    names = {"out_sharding": ("embed", "mlp")}
    self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs, kernel_metadata=names, param_dtype="bfloat16")])
    self.calls = nnx.BatchStat(jnp.zeros((16,)))
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, batch, key):
    self.calls[...] += 1
    x = nxp.constrain(self.layers[0](batch["x"]), "batch", None)
    return {"y": (x, self.calls[...] + 0), "drawn": jax.random.normal(key, (8,))}


def made(explicit):
  mesh = nxp.make_mesh(AXES, explicit=explicit)
  return nxp.create_sharded_model(Net, mesh, RULES)


SERVE = """
import sys
import jax, numpy as np
import nnx_parallel as nxp
from nnx_parallel.interop.program import load_program

folder = sys.argv[1]
served = load_program(folder + "/program.zip")
print(dict(served.mesh.shape), served.weights["layers"][0]["kernel"].sharding.spec)
served.load(nxp.Checkpointer(folder + "/weights").restore(served.weights))
x = np.load(folder + "/x.npy").astype(served.args[0]["x"].dtype)
for n in range(2):
  found = served({"x": x}, jax.random.key(3))
  y, calls = found["y"]
  np.savez(f"{folder}/{n}.npz", y=np.asarray(y, np.float32), calls=calls, drawn=found["drawn"])
assert not [name for name in sys.modules if name.startswith("tests")]
"""


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_another_process_computes_the_same(tmp_path, explicit):
  model = made(explicit)
  x = np.asarray(jax.random.normal(jax.random.key(0), (8, 16)))
  mesh = nxp.make_mesh(AXES, explicit=explicit)
  where = jax.NamedSharding(mesh, jax.P("fsdp"))
  batch, key = {"x": jax.device_put(jnp.asarray(x, "bfloat16"), where)}, jax.random.key(3)
  export_program(tmp_path / "program.zip", Net.__call__, model, batch, key)
  with nxp.Checkpointer(tmp_path / "weights") as checkpointer:
    checkpointer.save(0, model)
  np.save(tmp_path / "x.npy", x)
  variables = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", SERVE, str(tmp_path)]
  done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "'fsdp': 4, 'tensor': 2" in done.stdout
  assert "P(None, 'tensor')" in done.stdout
  for n in range(2):
    with nxp.use_rules(RULES, mesh):
      expected = nnx.jit(Net.__call__)(model, batch, key)
    found = np.load(tmp_path / f"{n}.npz")
    np.testing.assert_array_equal(found["y"], np.asarray(expected["y"][0], np.float32))
    np.testing.assert_array_equal(found["calls"], np.full(16, n + 1))
    np.testing.assert_array_equal(found["drawn"], expected["drawn"])


def test_errors(tmp_path):
  model = made(False)
  args = {"x": jnp.ones((8, 16), "bfloat16")}, jax.random.key(0)
  export_program(tmp_path / "program.zip", Net.__call__, model, *args)
  served = load_program(tmp_path / "program.zip")
  with pytest.raises(CheckpointError, match="no weights yet"):
    served(*args)
  with pytest.raises(CheckpointError, match=r"lack calls \(float32\[16\]\)"):
    served.load({"layers": served.weights["layers"], "dropout": served.weights["dropout"]})
  with pytest.raises(CheckpointError, match="for 8 devices, and there are 4"):
    load_program(tmp_path / "program.zip", devices=jax.devices()[:4])
