"""Meshes, plans and created models, sent to another process as Ray and multiprocessing do."""

import copyreg
import functools
import pickle

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp


class Net(nnx.Module):  # A Variable with names, and one without
  def __init__(self, rngs):
    metadata = {"out_sharding": ("embed", "mlp")}
    self.named = nnx.Linear(8, 8, kernel_metadata=metadata, rngs=rngs)
    self.plain = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, x):
    return self.plain(nnx.relu(self.named(x)))


def init():
  return Net(nnx.Rngs(0))


def planned(mesh, **options):
  names = nxp.LogicalRules(batch="fsdp", embed=None, mlp="tensor")
  return nxp.plan(init, mesh, [names, nxp.fsdp(min_size=0)], **options)


@pytest.mark.parametrize("explicit", [False, True, ["tensor"]], ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_a_mesh_comes_back_on_the_same_devices(explicit, order):
  mesh = nxp.make_mesh(fsdp=2, tensor=2, explicit=explicit, devices=jax.devices()[::order][:4])
  assert pickle.loads(pickle.dumps(mesh)) == mesh
  sharding = NamedSharding(mesh, P("fsdp"))
  assert pickle.loads(pickle.dumps(sharding)) == sharding


def test_devices_that_are_not_here_are_named(monkeypatch):
  sent, here = pickle.dumps(nxp.make_mesh(fsdp=8)), jax.devices()[:4]
  monkeypatch.setattr(jax, "devices", lambda *_: here)
  with pytest.raises(nxp.errors.MeshError, match=r"'fsdp': 8(.|\n)*and 5 more(.|\n)*from_arrays"):
    pickle.loads(sent)


def test_another_kind_of_devices_is_named():
  make, (_, *rest) = copyreg.dispatch_table[jax.sharding.Mesh](nxp.make_mesh(fsdp=8))
  with pytest.raises(nxp.errors.MeshError, match="the tpu devices 0, 1, 2 and 5 more; this process has none"):
    make("tpu", *rest)


def test_a_plan_and_a_model_come_back_and_train_on():
  plan = planned(nxp.make_mesh(fsdp=2, tensor=4))
  again = pickle.loads(pickle.dumps(plan))
  assert str(again) == str(plan)
  assert again.mesh == plan.mesh
  model = nxp.create_sharded_model(plan)
  state, sent = pickle.loads(pickle.dumps((nnx.state(model), model)))
  found = nxp.reshard(sent, again)  # JAX pickles the numbers of an array, and not its layout
  assert found.named.kernel.get_value().sharding == model.named.kernel.get_value().sharding
  for a, b, c in zip(*map(jax.tree.leaves, (nnx.state(model), state, nnx.state(found))), strict=True):
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  x = np.ones((8, 8), np.float32)
  run = lambda live: float(step(live, nnx.Optimizer(live, optax.sgd(0.1), wrt=nnx.Param), x)["loss"])
  losses = [run(model), run(found)]
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_plan_with_an_optimizer_is_sent_as_ray_sends_it():
  cloudpickle = pytest.importorskip("cloudpickle")
  plan = planned(nxp.make_mesh(fsdp=2, tensor=4), optimizer=optax.adam(functools.partial(lambda _: 1e-3)))
  again = pickle.loads(cloudpickle.dumps(plan))
  assert str(again) == str(plan)
  model, optimizer = nxp.create_sharded_model(again)
  assert optimizer.opt_state is not None
  assert model.plain.kernel.get_value().sharding.spec == plan["plain.kernel"].spec
