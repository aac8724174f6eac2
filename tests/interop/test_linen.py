"""Linen modules, planned and trained as they are; their checkpoints, there and back."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.core import meta
from flax.nnx import bridge
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from nnx_parallel.core.nodes import path_str
from nnx_parallel.errors import CheckpointError
from nnx_parallel.interop.linen import export_linen, import_linen, linen_names
from nnx_parallel.interop.orbax import restore_orbax

RULES = nxp.LogicalRules(batch="data", hidden="model", embed=None, layer=None)
DEPTH, BATCH = 64, 8


class DotReluDot(nn.Module):  # The layer of Linen's guide to several devices
  depth: int
  logical: bool

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.xavier_normal()
    boxed = nn.with_logical_partitioning if self.logical else nn.with_partitioning
    names = ("embed", "hidden") if self.logical else (None, "model")
    y = nn.Dense(self.depth, kernel_init=boxed(init, names), use_bias=False)(x)
    w2 = self.param("W2", boxed(init, names[::-1]), (self.depth, x.shape[-1]))
    y = jnp.dot(nn.relu(y), w2)
    return nn.with_logical_constraint(y, ("batch", "embed")) if self.logical else y, None


class MLP(nn.Module):
  layers: int = 4
  scan: bool = False
  logical: bool = False

  @nn.compact
  def __call__(self, x):
    if not self.scan:
      for _ in range(self.layers):
        x, _ = DotReluDot(DEPTH, self.logical)(x)
      return x
    layers = nn.scan(
      DotReluDot, length=self.layers, variable_axes={"params": 0}, split_rngs={"params": True},
      metadata_params={nn.PARTITION_NAME: "layer" if self.logical else None},
    )  # fmt: skip
    return layers(DEPTH, self.logical)(x)[0]


class Net(nn.Module):  # Everything that has state: statistics, dropout; rematerialised
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.remat(nn.Dense)(16, name="up")(x)
    x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
    return nn.Dense(8, kernel_init=init, name="down")(x)


def inputs(width=DEPTH):
  return np.random.default_rng(0).normal(size=(BATCH, width)).astype(np.float32)


def planned(net, x, optimizer=None, mesh=None, rules=RULES):
  init = lambda: bridge.lazy_init(bridge.ToNNX(net, rngs=nnx.Rngs(0, dropout=1)), x)
  return nxp.plan(init, mesh or nxp.make_mesh(data=2, model=4), rules, optimizer=optimizer)


loss_fn = lambda model, x: (model(x) ** 2).mean()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("logical", [False, True])
def test_layouts_are_those_of_the_linen_guide(scan, logical):
  """`(-, model)` and `(model, -)`, after the dim of scanned layers; logical names give the same."""
  net, x = MLP(scan=scan, logical=logical), inputs()
  plan = planned(net, x)
  ahead = (None,) if scan else ()
  specs = {"kernel": P(*ahead, None, "model"), "W2": P(*ahead, "model", None)}
  found = {path_str(leaf.path): leaf.spec for leaf in plan.leaves if leaf.is_parameter}
  assert len(found) == (2 if scan else 8)
  assert all(spec == specs[path.rpartition(".")[2]] for path, spec in found.items())
  model = nxp.create_sharded_model(plan)
  for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
    assert leaf.sharding.shard_shape(leaf.shape)[len(ahead) :] in {(DEPTH, DEPTH // 4), (DEPTH // 4, DEPTH)}


@pytest.mark.parametrize("scan", [False, True])
def test_steps_compute_what_linen_computes(scan):
  net, x, tx = MLP(scan=scan, logical=True), inputs(), optax.sgd(1.0, momentum=0.9)
  params = meta.unbox(net.init(jax.random.key(3), x))
  plan = planned(net, x, tx)
  model, optimizer = import_linen(params, plan)
  step, state = nxp.train_step(loss_fn), tx.init(params)

  @jax.jit
  def linen_step(params, state):
    loss, grads = jax.value_and_grad(lambda p: (net.apply(p, x) ** 2).mean())(params)
    updates, state = tx.update(grads, state, params)
    return loss, optax.apply_updates(params, updates), state

  batch = nxp.shard_batch(x, plan)
  for _ in range(4):
    loss, params, state = linen_step(params, state)
    np.testing.assert_allclose(step(model, optimizer, batch)["loss"], loss, rtol=1e-5)
  close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, nxp.hosts.to_host(export_linen(model)), params)


def test_logical_constraints_of_linen_follow_the_rules_in_scope():
  mesh, x = nxp.make_mesh(data=2, model=4), np.ones((8, 8), np.float32)

  def spec(rules):
    with nxp.use_rules(rules, mesh):
      return jax.jit(lambda x: nn.with_logical_constraint(x * 2, ("batch", "hidden")))(x).sharding.spec

  assert spec(RULES) == P("data", "model")
  assert spec(nxp.LogicalRules(batch=nxp.LogicalRules.first("replica", "model"), hidden=None)) == P("model")
  with nn.logical_axis_rules([("hidden", "data")]):
    assert spec(RULES) == P(None, "data")


def saved(tmp_path, kind, variables):
  """Variables of Linen as programs of Linen save them."""
  match kind:
    case "variables":
      return variables
    case "bytes":
      return serialization.to_bytes(variables)
    case "train state":
      path = tmp_path / "state.msgpack"
      path.write_bytes(serialization.to_bytes({**variables, "step": 7, "opt_state": {"mu": np.ones(3)}}))
      return path


@pytest.mark.cases(3)
@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("kind", ["variables", "bytes", "train state"])
def test_variables_go_into_their_shards(tmp_path, kind, boxed):
  x = inputs()
  plan = planned(Net(), x)
  variables = Net().init(jax.random.key(5), x)
  plain = meta.unbox(variables)
  model = import_linen(saved(tmp_path, kind, variables if boxed else plain), plan)
  jax.tree.map(np.testing.assert_array_equal, export_linen(model), plain)
  assert model.down["kernel"].sharding.spec == P("model", None)
  # Put back into boxes: what Linen's own tools take.
  again = meta.replace_boxed(variables, export_linen(model))
  assert jax.tree.structure(again) == jax.tree.structure(variables)


@pytest.mark.parametrize("boxed", [False, True])
def test_a_checkpoint_of_orbax(tmp_path, boxed):
  x = inputs()
  variables = Net().init(jax.random.key(5), x)
  plain = meta.unbox(variables)
  ocp.save(tmp_path / "step", variables if boxed else plain)
  plan = planned(Net(), x)
  model = restore_orbax(tmp_path / "step", plan, weight_map=linen_names(plan), skip=["to_nnx__rngs*"])
  jax.tree.map(np.testing.assert_array_equal, export_linen(model), plain)


@pytest.mark.parametrize(("source", "message"), [
  (b"\xc1 no msgpack", r"cannot read these bytes as msgpack"),
  ("nowhere.msgpack", r"cannot read nowhere.msgpack as msgpack(.|\n)*restore_orbax"),
  (serialization.msgpack_serialize(np.ones(3)), r"expected variables of Linen, but got a ndarray"),
  ({"params": {"up": {"kernel": np.ones((3, 4), np.float32)}}}, r"missing  down.kernel: needs params.down"),
])  # fmt: skip
def test_what_cannot_be_read(source, message):
  with pytest.raises(CheckpointError, match=message):
    import_linen(source, planned(Net(), inputs()))
