"""Each public call under a mesh that a script has left active: `jax.set_mesh(mesh)` at its top."""

import functools
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from nnx_parallel.core.nodes import is_key, path_str, value_of, variables
from nnx_parallel.errors import MeshError, TrainError
from tests.decode import test_generate as decoder
from training import placed

TESTS = Path(__file__).parents[1]
LLAMA = TESTS / "interop" / "references" / "llama"
LEFT = {
  "explicit": lambda own: nxp.make_mesh(other=4, third=2, explicit=True),
  "auto": lambda own: nxp.make_mesh(other=4, third=2),
  "fewer, auto": lambda own: nxp.make_mesh(fsdp=2, devices=jax.devices()[:2]),
  "fewer, explicit": lambda own: nxp.make_mesh(other=2, devices=jax.devices()[:2], explicit=True),
  "own": lambda own: own,
  "in another order": lambda own: nxp.make_mesh(dict(own.shape), devices=jax.devices()[::-1]),
}
PAIRS = [
  (kind, left)
  for left in LEFT
  for kind in ("auto", "explicit")
  if left not in ("own", "in another order") or kind == "explicit"
]
"""The axes of the plan's mesh, and the mesh that is left."""

TX = nxp.with_loss_scale(nxp.with_ema(optax.adam(1e-2), 0.9))
RULES = nxp.LogicalRules(batch="fsdp", embed="fsdp", mlp="tensor")
LAYOUT = [RULES, nxp.replicate()]
HOST = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


class Block(nnx.Module):  # Annotated parameters, an activation with names, batch statistics and random state
  def __init__(self, rngs):
    names = {"out_sharding": ("embed", "mlp")}
    self.up = nnx.Linear(16, 32, rngs=rngs, kernel_metadata=names)
    self.norm = nnx.BatchNorm(32, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(32, 16, rngs=rngs)

  def __call__(self, x):
    y = nxp.constrain(self.norm(self.up(x)), "batch", "mlp")
    return x + self.down(self.dropout(nnx.relu(y)))


def init():
  rngs = nnx.Rngs(0)
  return nnx.Sequential(Block(rngs), Block(rngs))


loss = lambda model, x: ((model(x) - x) ** 2).mean()
STEP, HAND, EVAL = nxp.train_step(loss, microbatches=2), nxp.train_step(loss), nxp.eval_step(loss)
GENERATE = nxp.generator(3)


@functools.cache
def plan_on(kind):
  mesh = nxp.make_mesh(fsdp=2, tensor=4, explicit=kind == "explicit")
  return nxp.plan(init, mesh, LAYOUT, optimizer=TX)


@functools.cache
def other_plan():
  """Of the same model, padded, on some of the devices."""
  mesh = nxp.make_mesh(tensor=3, devices=jax.devices()[:3])
  rules = [RULES.replace(batch=(), embed=()), nxp.replicate()]
  return nxp.plan(init, mesh, rules, optimizer=TX, uneven="pad")


@functools.cache
def objects_on(kind):
  return placed(plan_on(kind))


@functools.cache
def decoder_on(kind):
  axes = {"fsdp": 4, "tensor": 2}
  mesh = nxp.make_mesh(axes, explicit=kind == "explicit")
  return placed(nxp.plan(decoder.Model, mesh, decoder.rules_for(axes)))


class Given:  # What a call gets: objects of its own, made before the mesh was left active
  def __init__(self, kind, folder):
    self.kind, self.folder, self.plan, self.other = kind, folder, plan_on(kind), other_plan()
    self.mesh = self.plan.mesh
    self.model, self.optimizer = nnx.clone(objects_on(kind))
    self.grads = jax.tree.map(jnp.zeros_like, nnx.state(self.model, nnx.Param))
    self.state = jax.tree.map(jnp.copy, nnx.state(self.model))
    self.batch = nxp.shard_batch(HOST, self.plan)
    model = nxp.unsharded(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(self.mesh, jax.P())))
    self.by_hand = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def train(on):
  metrics = [STEP(on.model, on.optimizer, x) for x in (HOST, on.batch)]
  print(metrics)
  return [float(found["loss"]) for found in metrics], on.model, on.optimizer


def evaluate_a_batch_made_there(on):
  """A batch on the mesh that is active: an error that shows the call that works, or the same numbers."""
  x = jnp.asarray(HOST)
  try:
    return EVAL(on.model, x)
  except TrainError as error:
    said = str(error)
  assert re.search(r"batch is not on the model's mesh[\s\S]*nxp.shard_batch", said)
  return EVAL(on.model, nxp.shard_batch(x, on.plan))


def train_without_a_plan(on):
  model, optimizer = on.by_hand
  return [float(HAND(model, optimizer, on.batch)["loss"]) for _ in range(2)], model


def save_and_restore(on):
  with nxp.Checkpointer(on.folder / "ckpt") as checkpointer:
    checkpointer.save(1, on.model, on.optimizer, plan=on.plan, extra={"x": on.batch})
    model, optimizer = checkpointer.restore(on.plan)
    found = [STEP(model, optimizer, HOST), STEP(*checkpointer.restore(on.other), HOST)]
    into = checkpointer.restore((on.model, on.optimizer))
    numpy = checkpointer.restore(as_numpy=True)
    extra = checkpointer.restore_extra("x", on.batch)
    return found, into, numpy, extra, str(checkpointer.diff(on.plan)), checkpointer.verify()


def restore_from_orbax(on):
  ocp.save(on.folder / "orbax", nnx.to_pure_dict(jax.device_get(nnx.state(on.model, nnx.Param))))
  small = nxp.plan(lambda: nnx.state(init(), nnx.Param) and init(), on.mesh, LAYOUT)
  skip = [leaf.name for leaf in small.leaves if not leaf.is_parameter]
  return nxp.interop.restore_orbax(on.folder / "orbax", small, skip=skip)


def fit(on):
  with nxp.Checkpointer(on.folder / "ckpt") as checkpointer:
    held_out = lambda: nxp.evaluate(EVAL, on.model, [HOST, on.batch])
    options = {"evaluate": held_out, "eval_every": 1, "checkpointer": checkpointer, "save_every": 2}
    options |= {"peak_flops": 1e9, "progress": False}
    found = nxp.fit(STEP, on.model, on.optimizer, [HOST] * 3, steps=3, plan=on.plan, **options)
  return [{name: x for name, x in record.items() if "loss" in name} for record in found.history]


def job(on):
  recipe = nxp.recipes.load_recipe("starter")
  plan = nxp.recipes.plan_recipe(recipe, nxp.make_mesh(fsdp=8, explicit=on.kind == "explicit"))
  run = nxp.recipes.start(recipe, plan)
  history = [record["loss"] for record in run.train(2, check_gradients=True).history]
  with nxp.Checkpointer(on.folder / "ckpt") as checkpointer:
    run.save(checkpointer)
    again = nxp.recipes.restore(recipe, plan, checkpointer).run
  return history, again.at.step, again.evaluate()


def whole_task(on):
  made = nxp.task(init, on.mesh, LAYOUT, loss=loss, optimizer=TX)
  return made.train_step(made.model, made.optimizer, HOST), str(made)


def scopes(on):
  with on.plan.scope():
    x = nxp.constrain(on.batch, "batch", None)
    found = [x, jax.jit(lambda x: nxp.constrain(x * 2, "batch", "mlp"))(x)]
  with nxp.use_rules(RULES, on.mesh):
    return [*found, jax.jit(lambda x: nxp.constrain(x * 2, "batch", "mlp"))(on.batch)]


def update(on):
  on.optimizer.update(on.model, on.grads)
  return on.model, on.optimizer


def from_numpy(on):
  plan = on.plan.without_optimizer()
  keys = {
    leaf.path: jax.eval_shape(jax.random.key_data, leaf.struct) for leaf in plan.leaves if is_key(leaf.dtype)
  }
  arrays = {leaf.path: keys.get(leaf.path, leaf) for leaf in plan.leaves}
  return nxp.from_arrays({path: np.ones(x.shape, x.dtype) for path, x in arrays.items()}, plan)


def send(on):
  target = nxp.create_sharded_model(on.other)[0]
  return nxp.parallel.send(on.model, target), nxp.parallel.send(on.batch, on.other)


def map_shards(on):
  mean = lambda model, x: jax.lax.pmean(x.mean() + model.layers[0].up.kernel.size, "fsdp")
  return nxp.parallel.map_shards(mean, on.plan.without_optimizer())(on.model, on.batch)


def generate(on):
  model = decoder_on(on.kind)
  tokens = GENERATE(model, decoder.PROMPTS, lengths=decoder.LENGTHS).tokens
  return tokens, [x for _, x in GENERATE.stream(model, decoder.PROMPTS)]


def exported(on):
  nxp.interop.export_program(on.folder / "program.zip", lambda model, x: model(x), on.model, on.batch)
  return nxp.interop.load_program(on.folder / "program.zip").load(on.state)(HOST)


def safetensors(on):
  plan, file = on.plan.without_optimizer(), on.folder / "weights"
  nxp.interop.export_safetensors(file, on.model)
  shown = str(nxp.interop.dry_run_import(file, plan)), str(nxp.interop.dry_run_export(plan))
  return nxp.interop.import_safetensors(file, plan), shown


def linen(on):
  found = nxp.interop.export_linen(on.model, nxp.interop.linen_names(on.model))
  return found, nxp.interop.import_linen(found, on.plan.without_optimizer())


def lora(on):
  def with_adapters():
    model = init()
    nxp.interop.add_lora(model, "layers.*.up", rank=2, rngs=nnx.Rngs(1))
    return model

  adapted = nxp.create_sharded_model(with_adapters, on.mesh, LAYOUT)
  return nxp.interop.merge_adapters(on.model, adapted), on.model


def searched(on):
  batch = jax.ShapeDtypeStruct(HOST.shape, HOST.dtype)
  options = {"batch": batch, "rules": LAYOUT, "optimizer": TX, "compile_best": 1}
  return nxp.search(init, loss, "cpu:8", **options).code()


def report(on):
  here = nxp.compile_report(STEP, on.plan, batch=HOST)
  there = nxp.compile_report(STEP, on.plan, batch=HOST, topology="cpu:8")
  return here.need_bytes, there.need_bytes, here.bytes_by("kind")


def shown(on):
  plan = on.plan
  parts = [plan, plan.audit(), plan.explain("layers.0.up.kernel"), plan.diff(on.other), plan.to_json()]
  parts += [nxp.describe_mesh(plan.mesh), nxp.report.plan_page(plan)]
  again = nxp.Plan.from_json(plan.to_json())
  nxp.testing.assert_golden_plan(plan, on.folder / "golden", update=True)
  return [*map(str, parts), str(again)]


def same_training(on):
  return nxp.testing.assert_same_training(loss, {"one": on.plan, "two": on.other}, [HOST])["one"].losses


CALLS = {
  "train_step": train, "create_sharded_model": lambda on: nxp.create_sharded_model(on.plan),
  "reshard": lambda on: nxp.reshard(on.model, on.plan, optimizer=on.optimizer),
  "reshard, to other devices": lambda on: nxp.reshard(on.model, on.other, optimizer=on.optimizer),
  "Checkpointer": save_and_restore, "eval_step": lambda on: [EVAL(on.model, x) for x in (HOST, on.batch)],
  "a batch on the active mesh": evaluate_a_batch_made_there,
  "train_step, without a plan": train_without_a_plan,
  "check_step": lambda on: bool(nxp.check_step(on.plan, None, loss, HOST, microbatches=2)),
  "check_step, of two plans": lambda on: bool(nxp.check_step(on.plan, on.other, loss, HOST)),
  "check_gradients": lambda on: bool(nxp.check_gradients(on.model, on.batch, loss)),
  "step.check_gradients": lambda on: bool(STEP.check_gradients(on.model, on.optimizer, HOST)), "fit": fit,
  "evaluate": lambda on: nxp.evaluate(EVAL, on.model, [HOST, on.batch]), "generator": generate,
  "generator.lower": lambda on: GENERATE.lower(decoder_on(on.kind), decoder.PROMPTS).compile() and None,
  "plan": lambda on: nxp.plan(init, on.mesh, LAYOUT, optimizer=TX).to_json(), "a plan's methods": shown,
  "plan.scope": scopes,
  "compiled": lambda on: STEP.compiled(on.model, on.optimizer, on.batch).memory_analysis() and None,
  "lower": lambda on: STEP.lower(on.plan, batch=HOST).compile() and None, "compile_report": report,
  "memory_plan": lambda on: str(nxp.memory_plan(on.plan, loss, HOST, microbatches=2)), "search": searched,
  "batches": lambda on: [*nxp.batches([HOST] * 3, on.plan), *nxp.batches([*HOST], on.plan, batch=8)],
  "shard_batch": lambda on: [nxp.shard_batch(x, on.plan) for x in (HOST, on.batch, jnp.asarray(HOST))],
  "with_layers": lambda on: nxp.eval_step(nxp.with_layers(loss, remat="full"))(on.model, HOST),
  "create_sharded_model, jit": lambda on: nxp.create_sharded_model(on.plan, compile="jit"),
  "from_arrays": from_numpy, "unsharded": lambda on: nxp.unsharded(init),
  "check_layout": lambda on: nxp.check_layout(on.model, on.plan, optimizer=on.optimizer),
  "infer_rules": lambda on: str(nxp.infer_rules(init, on.mesh, HOST)),
  "ema_of": lambda on: nxp.ema_of(on.optimizer, on.model),
  "loss_scale_of": lambda on: nxp.loss_scale_of(on.optimizer), "ShardedOptimizer": update, "task": whole_task,
  "Job": job, "send": send, "map_shards": map_shards, "hosts": lambda on: nxp.hosts.to_host(on.model),
  "export_program": exported, "safetensors": safetensors, "linen": linen, "lora": lora,
  "load_huggingface": lambda on: nxp.interop.load_huggingface(LLAMA, on.mesh, nxp.fsdp(min_size=16)),
  "restore_orbax": restore_from_orbax, "assert_same_training": same_training,
}  # fmt: skip


def plain(result):
  """A result as a tree of numpy arrays, numbers and text."""
  if isinstance(result, (nnx.Module, nnx.Optimizer)):
    return {path_str(path): plain(value_of(x)) for path, x in variables(result).items()}
  if isinstance(result, dict):
    return {str(name): plain(x) for name, x in result.items()}
  if isinstance(result, (list, tuple)):
    return [plain(x) for x in result]
  if isinstance(result, jax.Array):
    return np.asarray(jax.random.key_data(result) if is_key(result.dtype) else result)
  return result


@functools.cache
def wanted(call, kind):
  """The result where no mesh is active."""
  with tempfile.TemporaryDirectory() as folder:
    return plain(CALLS[call](Given(kind, Path(folder))))


# Each call once, under the meshes in turn; then again under further meshes.
TURNS = range(0, len(PAIRS), 3)
CASES = [(call, *PAIRS[(turn + n) % len(PAIRS)]) for turn in TURNS for n, call in enumerate(CALLS)]


@pytest.mark.slow
@pytest.mark.cases(12)
@pytest.mark.parametrize(("call", "kind", "left"), CASES)
def test_a_call_under_a_mesh_that_a_script_left_active(call, kind, left, tmp_path):
  on, expected = Given(kind, tmp_path), wanted(call, kind)
  mesh = LEFT[left](on.mesh)
  with jax.set_mesh(mesh):
    result = plain(CALLS[call](on))
    assert jax.sharding.get_mesh() == mesh
  assert jax.tree.structure(result) == jax.tree.structure(expected)
  for found, one in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
    if isinstance(one, str):
      assert found == one
    else:
      np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)


def cross_entropy(on, head):
  hidden, labels = nxp.shard_batch(HOST, on.plan), nxp.shard_batch(np.zeros(16, np.int32), on.plan)
  return nxp.parallel.vocabulary_cross_entropy(hidden, head, labels)


def experts(on):
  routing = nxp.parallel.route(np.zeros((16, 4), np.float32), 2)
  product = lambda w, x, n: nxp.parallel.ragged_dot(x, w, n)
  return nxp.parallel.experts(product, np.ones((4, 16, 16), np.float32), on.batch, routing, axis="tensor")


SCHEMES = {
  "arrays": lambda on: cross_entropy(on, nxp.shard_batch(HOST.T, on.plan)),
  "plan": lambda on: cross_entropy(on, on.model.layers[0].up.kernel),
  "embedding": lambda on: nxp.parallel.vocabulary_embedding(on.batch, np.zeros(4, np.int32)),
  "experts": experts,
  "attention": lambda on: nxp.parallel.context_attention("fsdp")(
    *[nxp.shard_batch(HOST.reshape(16, 4, 2, 2), on.plan)] * 3
  ),
  "pipeline": lambda on: nxp.parallel.pipeline(jnp.multiply, on.batch, on.batch, microbatches=2, axis="fsdp"),
  "constrain": lambda on: nxp.constrain(on.batch, "tensor", None),
}


@pytest.mark.cases(7)
@pytest.mark.parametrize("left", ["explicit", "auto", "fewer, auto", "fewer, explicit"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_computes_on_the_active_mesh_refuses_arrays_of_another_mesh(scheme, left, tmp_path):
  on = Given("auto", tmp_path)
  mesh = LEFT[left](on.mesh)
  with jax.set_mesh(mesh), pytest.raises(MeshError) as caught:
    SCHEMES[scheme](on)
  said = rf"{re.escape(str(dict(on.mesh.shape)))}, active {re.escape(str(dict(mesh.shape)))}"
  assert re.search(rf"{said}[\s\S]*jax\.set_mesh\(None\) clears", str(caught.value))
