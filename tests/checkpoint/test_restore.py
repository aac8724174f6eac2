import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from checkpoint.runs import MESHES, Net, arrays, assert_same, batch_of, loss_fn, make_plan, target_of
from nnx_parallel.checkpoint.checkpointer import Checkpointer
from nnx_parallel.core.nodes import value_of, variables
from nnx_parallel.errors import CheckpointError


@pytest.mark.cases(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, asynchronous):
  plan = make_plan("8")
  step, losses = nxp.train_step(loss_fn), []
  model, optimizer = nxp.create_sharded_model(plan)
  with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
    for i in range(6):
      if i == 3:
        # The next step donates these very buffers while a background save still reads them.
        checkpointer.save(i, model, optimizer)
      losses.append(float(step(model, optimizer, batch_of(i))["loss"]))
    model, optimizer = checkpointer.restore(plan)
  again = nxp.train_step(loss_fn)
  assert [float(again(model, optimizer, batch_of(i))["loss"]) for i in range(3, 6)] == losses[3:]


@pytest.mark.slow
def test_wrapped_and_offloaded_optimizers_go_on_where_they_were(tmp_path):
  tx = nxp.with_loss_scale(nxp.with_ema(optax.adam(1e-2), 0.9), growth_interval=2)
  rules = nxp.fsdp(min_size=16)
  plan = nxp.plan(Net, MESHES["8"](), rules, optimizer=tx)
  away = nxp.plan(Net, MESHES["8"](), rules, optimizer=tx, optimizer_memory="pinned_host")
  step, losses = nxp.train_step(loss_fn), []
  model, optimizer = nxp.create_sharded_model(plan)
  for i in range(4):
    if i == 2:
      Checkpointer(tmp_path).save(i, model, optimizer)
      saved = {path: np.asarray(value_of(leaf)) for path, leaf in variables(optimizer).items()}
    losses.append(float(step(model, optimizer, batch_of(i))["loss"]))
  again, moved = Checkpointer(tmp_path).restore(away)
  assert float(nxp.loss_scale_of(moved)) == 2.0**16
  kinds = {path: value_of(leaf).sharding.memory_kind for path, leaf in variables(moved).items()}
  assert kinds == {path: leaf.sharding.memory_kind for path, leaf in away.of("optimizer").items()}
  assert "pinned_host" in kinds.values()
  for path, leaf in variables(moved).items():
    np.testing.assert_array_equal(value_of(leaf), saved[path])
  onward = nxp.train_step(loss_fn)
  model, optimizer = Checkpointer(tmp_path).restore(plan)
  assert [float(onward(model, optimizer, batch_of(i))["loss"]) for i in (2, 3)] == losses[2:]
  assert_same(nxp.ema_of(moved, again), nxp.ema_of(*reversed(Checkpointer(tmp_path).restore(plan))))


@pytest.mark.slow
def test_live_modules_are_filled_in_place(tmp_path):
  model, optimizer = nxp.create_sharded_model(make_plan("8"))
  other, other_optimizer = nxp.create_sharded_model(make_plan("2x4"))
  other.head.kernel.set_value(other.head.kernel.get_value() * 0)
  kernel = other.head.kernel
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer)
  assert checkpointer.restore((other, other_optimizer))[0] is other
  assert other.head.kernel is kernel
  assert_same(model, other)
  assert_same(optimizer, other_optimizer)


@pytest.mark.slow
def test_the_optimizer_is_kept_dropped_or_fresh_by_name(tmp_path):
  plan = make_plan("8")
  model, optimizer = nxp.create_sharded_model(plan)
  fresh = {path: np.asarray(value_of(leaf)) for path, leaf in variables(optimizer).items()}
  nxp.train_step(loss_fn)(model, optimizer, batch_of(0))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer)
  assert_same(checkpointer.restore(plan)[1], optimizer)
  assert_same(checkpointer.restore(plan, optimizer="drop"), model)
  restored, made = checkpointer.restore(plan, optimizer="fresh")
  assert_same(restored, model)
  for path, leaf in variables(made).items():
    np.testing.assert_array_equal(value_of(leaf), fresh[path])
  with pytest.raises(CheckpointError, match=r"optimizer='new' is unknown\.\n  Fix: pass \"restore\""):
    checkpointer.restore(plan, optimizer="new")


def test_a_checkpoint_without_optimizer_says_so(tmp_path):
  plan = make_plan("8")
  model, _ = nxp.create_sharded_model(plan)
  Checkpointer(tmp_path).save(1, model)
  with pytest.raises(CheckpointError, match=r'(?s)missing  optimizer/.*Fix: .*optimizer="fresh"'):
    Checkpointer(tmp_path).restore(plan)


@pytest.mark.slow
def test_padding_is_not_stored(tmp_path):
  init = lambda: nnx.Linear(6, 10, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("embed", "mlp")})
  rules = nxp.LogicalRules(embed=None, mlp="x")
  padded = nxp.plan(init, nxp.make_mesh(x=8), rules, uneven="pad", optimizer=optax.adam(1e-3))
  mesh = lambda n: nxp.make_mesh(x=n, devices=jax.devices()[:n])
  other = nxp.plan(init, mesh(4), rules, uneven="pad", optimizer=optax.adam(1e-3))
  whole = nxp.plan(init, mesh(1), rules, optimizer=optax.adam(1e-3))
  model, optimizer = nxp.create_sharded_model(padded)
  reference, _ = nxp.create_sharded_model(whole)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, model, optimizer)
  live, live_optimizer = nxp.create_sharded_model(other)
  checkpointer.restore((live, live_optimizer))
  assert_same(checkpointer.restore(other)[1], live_optimizer)
  assert checkpointer.metadata().items["model"].leaves["kernel"].shape == (6, 10)
  assert_same(checkpointer.restore(padded)[0], model)
  assert checkpointer.restore(other)[0].kernel.get_raw_value().shape == (6, 12)
  assert_same(checkpointer.restore(whole)[0], reference)


def test_everything_a_run_is(tmp_path):
  tree = arrays()
  many, split = jax.random.split(jax.random.key(2, impl="rbg"), 8), NamedSharding(nxp.make_mesh(a=8), P("a"))
  keys = {"one": jax.random.key(1), "many": jax.device_put(many, split)}
  data = {"cursor": 12, "files": ["a", "b"], "scale": float("inf")}
  extra = {"ema": {"w": tree["w"] * 2}, "keys": keys, "data": data}
  checkpointer = Checkpointer(tmp_path, best="loss")
  checkpointer.save(3, tree, extra=extra, metrics={"loss": jnp.float32(0.5), "bad": float("nan")})
  record = checkpointer.metadata()
  assert record.step == 3
  assert record.metrics["loss"] == 0.5
  assert record.versions["orbax-checkpoint"]
  assert checkpointer.restore_extra("data") == extra["data"]
  assert_same(checkpointer.restore_extra("ema", target_of(extra["ema"])), extra["ema"])
  again = checkpointer.restore_extra("keys", keys)
  assert_same(again, keys)
  assert again["many"].dtype == keys["many"].dtype
  assert again["many"].sharding == keys["many"].sharding
  with pytest.raises(CheckpointError, match=r"has no 'emma'.\n  it has \['data', 'ema', 'keys', 'model'\]"):
    checkpointer.restore_extra("emma")


ODD = {
  "empty": lambda: jnp.zeros((0, 3), jnp.float32),
  "empty keys": lambda: jax.random.split(jax.random.key(0), 2)[:0],
  "int4": lambda: jnp.arange(-4, 4, dtype=jnp.int4),
  "uint2": lambda: jnp.arange(4, dtype=jnp.int32).astype(jnp.uint2),
  "float8_e4m3": lambda: jnp.arange(4, dtype=jnp.float32).astype(jnp.float8_e4m3),
  "float4": lambda: jnp.arange(4, dtype=jnp.float32).astype(jnp.float4_e2m1fn),
  "complex": lambda: jnp.arange(4, dtype=jnp.float32).astype(jnp.complex64) * jnp.complex64(1 + 2j),
  "bool": lambda: jnp.array([True, False]), "numpy scalar": lambda: np.int64(2**40),
  "numpy float": lambda: np.float64(0.1), "numpy": lambda: np.arange(3, dtype=np.int64),
  "scalar": lambda: jnp.float32(3),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_leaves_come_back_as_they_were(tmp_path, name):
  leaf = ODD[name]()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, {"x": leaf, "python": 3, "text": "a", "none": None})
  again = checkpointer.restore({"x": leaf, "python": 0, "text": "", "none": None})
  assert again["python"] == 3
  assert again["text"] == "a"
  assert again["x"].dtype == leaf.dtype
  assert_same({"x": again["x"]}, {"x": leaf})
  assert checkpointer.verify() == {}


def test_numpy_only_on_request(tmp_path):
  tree = arrays()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  with pytest.raises(CheckpointError, match=r"without a target.*\n  Fix: pass a plan, a live model"):
    checkpointer.restore()
  found = checkpointer.restore(as_numpy=True)["model"]
  assert all(isinstance(leaf, np.ndarray) for leaf in found.values())
  assert_same(found, tree)
  bare = {"w": jax.ShapeDtypeStruct((8, 16), np.float32)}
  with pytest.raises(CheckpointError, match="cannot restore model/w: the target has no sharding for it"):
    checkpointer.restore(bare)
  assert_same(checkpointer.restore(bare, only=["w"], as_numpy=True), {"w": tree["w"]})


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_memory_kinds_are_the_targets(tmp_path, kind):
  mesh = nxp.make_mesh(a=2, b=4)
  tree = arrays() | {"key": jax.random.split(jax.random.key(3), 8), "none": jnp.zeros((0, 4))}
  there = lambda x: NamedSharding(mesh, P("b") if x.ndim else P(), memory_kind=kind)
  on_host = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there(x)) for name, x in tree.items()}
  device, host = Checkpointer(tmp_path / "device"), Checkpointer(tmp_path / "host")
  device.save(1, tree)
  moved = device.restore(on_host)
  assert {x.sharding.memory_kind for x in moved.values()} == {kind}
  assert_same(moved, tree)
  host.save(1, moved)
  back = host.restore(tree)
  assert {x.sharding.memory_kind for x in back.values()} == {"device"}
  assert_same(back, tree)


def test_float_types_are_the_targets(tmp_path):
  tree = arrays()
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, tree)
  mesh = nxp.make_mesh(a=2, b=4)
  target = target_of(tree)
  target["w"] = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=NamedSharding(mesh, P("b")))
  assert_same(checkpointer.restore(target, cast=True)["w"], tree["w"].astype(jnp.bfloat16))


def test_a_donated_array_is_named(tmp_path):
  tree = arrays()
  tree["w"].delete()
  with pytest.raises(CheckpointError, match="cannot save model/w: its array was donated"):
    Checkpointer(tmp_path).save(1, tree)


def test_orbax_alone_can_read_it(tmp_path):
  tree = arrays()
  Checkpointer(tmp_path).save(4, tree)
  assert_same(ocp.load(tmp_path / "4", target_of(tree), checkpointable_name="model"), tree)


def test_json_values_come_back_as_they_were(tmp_path):
  value = {"z": (1, (2, [3])), "a": [float("inf"), -0.0, None, True, "é", 2**70]}
  value["nested"] = {"shape": (), "b": {"__tuple": 1}, "a": {}}
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, {"w": jnp.ones(2)}, extra={"data": value, "number": 3})
  found = checkpointer.restore_extra("data")
  assert repr(found) == repr(value)  # types and order too
  for mark in ("__float__", "__tuple__"):
    with pytest.raises(CheckpointError, match=rf"(?s)cannot save extra\['data'\]\.a: .*'{mark}'.*\n.*Fix:"):
      checkpointer.save(2, {"w": jnp.ones(2)}, extra={"data": {"a": {mark: "x"}}})
