"""Each public call under a mesh that a script left active: `jax.set_mesh(mesh)` at its top."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import traceback, os, sys
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.nodes import is_key, path_str, value_of, variables
from nnx_parallel.errors import MeshError
from tests.decode import test_generate as decoder
from training import placed

KINDS = {"auto": False, "explicit": True}
LEFT = {
  "explicit": lambda own: nxp.make_mesh(other=4, third=2, explicit=True),
  "auto": lambda own: nxp.make_mesh(other=4, third=2),
  "fewer, explicit": lambda own: nxp.make_mesh(other=2, devices=jax.devices()[:2], explicit=True),
  "fewer, auto": lambda own: nxp.make_mesh(data=2, devices=jax.devices()[:2]),
  "other devices": lambda own: nxp.make_mesh(dict(own.shape), devices=jax.devices()[::-1]),
  "own": lambda own: own,
}


class Block(nnx.Module):
  """A named kernel, a constrained activation, batch statistics and random state."""

  def __init__(self, rngs):
    names = {"out_sharding": ("embed", "mlp")}
    self.up = nnx.Linear(16, 32, rngs=rngs, kernel_metadata=names)
    self.norm = nnx.BatchNorm(32, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(32, 16, rngs=rngs)

  def __call__(self, x):
    x = nxp.constrain(self.norm(self.up(x)), "batch", "mlp")
    return self.down(self.dropout(nnx.relu(x)))


class Net(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.blocks = nnx.List([Block(rngs), Block(rngs)])

  def __call__(self, x):
    for block in self.blocks:
      x = x + block(x)
    return x


def loss(model, x):
  return ((model(x) - x) ** 2).mean()


TX = nxp.with_ema(optax.adam(1e-2), 0.9)
RULES = nxp.LogicalRules(batch="fsdp", embed="fsdp", mlp="tensor")
HOST = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
OPTIONS = {"optimizer": TX, "uneven": "pad"}


@functools.cache
def plan_on(kind):
  mesh = nxp.make_mesh(fsdp=2, tensor=4, explicit=KINDS[kind])
  return nxp.plan(Net, mesh, [RULES, nxp.replicate()], **OPTIONS)


@functools.cache
def other_plan():
  """Of the same model, on another mesh."""
  mesh = nxp.make_mesh(tensor=3, devices=jax.devices()[:3])  # pads 32 features
  rules = nxp.LogicalRules(batch=(), embed=(), mlp="tensor")
  return nxp.plan(Net, mesh, [rules, nxp.replicate()], **OPTIONS)


@functools.cache
def objects_on(kind):
  return placed(plan_on(kind))


@functools.cache
def decoder_on(kind):
  mesh = nxp.make_mesh(fsdp=4, tensor=2, explicit=KINDS[kind])
  return placed(nxp.plan(decoder.Model, mesh, decoder.rules_for({"fsdp": 4, "tensor": 2})))


class Given:
  """What a call may use: objects of its own, made before the mesh was left active."""

  def __init__(self, kind, folder):
    self.kind, self.folder = kind, folder
    self.plan, self.other = plan_on(kind), other_plan()
    self.mesh = self.plan.mesh
    self.model, self.optimizer = nnx.clone(objects_on(kind))
    self.grads = jax.tree.map(jnp.zeros_like, nnx.state(self.model, nnx.Param))
    self.batch = nxp.shard_batch(HOST, self.plan)


STEP, EVAL = nxp.train_step(loss, microbatches=2), nxp.eval_step(loss)
GENERATE = nxp.generator(3)


def steps(on):
  found = [float(STEP(on.model, on.optimizer, x)["loss"]) for x in (HOST, on.batch)]
  return found, f"{STEP(on.model, on.optimizer, HOST)}", on.model, on.optimizer


def restored(on):
  with nxp.Checkpointer(on.folder / "ckpt") as checkpointer:
    checkpointer.save(1, on.model, on.optimizer, plan=on.plan, extra={"x": on.batch})
    model, optimizer = checkpointer.restore(on.plan)
    found = [STEP(model, optimizer, HOST)["loss"]]
    elsewhere = checkpointer.restore(on.other)
    found += [STEP(*elsewhere, HOST)["loss"]]
    extra = checkpointer.restore_extra("x", on.batch)
    into = checkpointer.restore((on.model, on.optimizer))
    numpy = checkpointer.restore(on.plan, as_numpy=True)
    return found, model, extra, into, numpy, str(checkpointer.diff(on.plan)), checkpointer.verify()


def fitted(on):
  with nxp.Checkpointer(on.folder / "ckpt") as checkpointer:
    held_out = lambda: nxp.evaluate(EVAL, on.model, [HOST])
    options = {"evaluate": held_out, "eval_every": 1, "checkpointer": checkpointer, "progress": False}
    options |= {"peak_flops": 1e9, "save_every": 2, "check_gradients": True}
    options |= {"nonfinite": "error"}
    source = lambda samples: [HOST] * (3 - samples // 16)
    found = nxp.fit(STEP, on.model, on.optimizer, source, steps=3, plan=on.plan, **options)
    timed = {"seconds", "samples_per_second", "mfu"}
  return [{k: v for k, v in record.items() if k not in timed} for record in found.history]


def scoped(on):
  with on.plan.scope():
    x = nxp.constrain(on.batch, "batch", None)
    return jax.jit(lambda x: nxp.constrain(x * 2, "batch", "mlp"))(x)


def in_rules(on):
  with nxp.use_rules(RULES, on.mesh):
    return jax.jit(lambda x: nxp.constrain(x * 2, "batch", "mlp"))(on.batch)


def updated(on):
  on.optimizer.update(on.model, on.grads)
  return on.model, on.optimizer


def exported(on):
  file = on.folder / "program.zip"
  nxp.interop.export_program(file, lambda model, x: model(x), on.model, on.batch)
  served = nxp.interop.load_program(file).load(nnx.state(on.model))
  return served(HOST)


def tensors(on):
  nxp.interop.export_safetensors(on.folder / "w", on.model)
  return nxp.interop.import_safetensors(on.folder / "w", on.plan.without_optimizer())


def linen(on):
  found = nxp.interop.export_linen(on.model)
  return found, nxp.interop.import_linen(found, on.plan.without_optimizer())


def lora(on):
  def init():
    model = Net()
    nxp.interop.add_lora(model, "blocks.*.up", rank=2, rngs=nnx.Rngs(1))
    return model

  plan = nxp.plan(init, on.mesh, [RULES, nxp.replicate()], uneven="pad")
  adapted = nxp.create_sharded_model(plan)
  return nxp.interop.merge_adapters(on.model, adapted), on.model


def a_task(on):
  made = nxp.task(Net, on.mesh, [RULES, nxp.replicate()], loss=loss, optimizer=TX, plan={"uneven": "pad"})
  return made.train_step(made.model, made.optimizer, HOST), str(made)


def job(on):
  recipe = nxp.recipes.load_recipe("starter")
  plan = nxp.recipes.plan_recipe(recipe, nxp.make_mesh(fsdp=8, explicit=KINDS[on.kind]))
  job = nxp.recipes.Job.start(recipe, plan)
  history = [record["loss"] for record in job.train(2).history]
  with nxp.Checkpointer(on.folder / "ckpt") as checkpointer:
    job.save(checkpointer)
    again = nxp.recipes.Job.restore(recipe, plan, checkpointer)
  return history, again.step, again.evaluate(), bool(again.check_gradients())


def from_numpy(on):
  plan = on.plan.without_optimizer()
  shapes = {leaf.path: jax.eval_shape(jax.random.key_data, leaf.struct) if is_key(leaf.dtype) else leaf for leaf in plan.leaves}
  return nxp.from_arrays({path: np.ones(x.shape, x.dtype) for path, x in shapes.items()}, plan)


def searched(on):
  batch = jax.ShapeDtypeStruct(HOST.shape, HOST.dtype)
  options = {"batch": batch, "rules": [RULES, nxp.replicate()], "optimizer": TX, "compile_best": 1}
  return nxp.search(Net, loss, "cpu:8", **options).code()


def reported(on):
  report = nxp.compile_report(STEP, on.plan, batch=HOST, verify=True)
  return report.need_bytes, report.bytes_by("kind"), report.faults


def topology(on):
  return nxp.compile_report(STEP, on.plan, batch=HOST, topology="cpu:8").need_bytes


def memory(on):
  return str(nxp.memory_plan(on.plan, loss, HOST, microbatches=2))


def sent(on):
  target = nxp.create_sharded_model(on.other)[0]
  found = nxp.parallel.send(on.model, target)
  return found.value, nxp.parallel.send(on.batch, on.other).value


def generated(on):
  model = decoder_on(on.kind)
  tokens = GENERATE(model, decoder.PROMPTS, lengths=decoder.LENGTHS).tokens
  parts = [x for _, x in GENERATE.stream(model, decoder.PROMPTS)]
  return tokens, parts


def shards(on):
  plan = on.plan.without_optimizer()
  mean = lambda model, x: jax.lax.pmean(x.mean() + model.blocks[0].up.kernel.size, "fsdp")
  return nnx.jit(nxp.parallel.map_shards(mean, plan))(on.model, on.batch)


def steps_without_a_plan(on):
  """A model of the user's own making, on the mesh of the plan."""
  model = nxp.unsharded(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
  replicated = jax.NamedSharding(on.mesh, jax.P())
  nnx.update(model, jax.device_put(nnx.state(model), replicated))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  return lambda: [float(nxp.train_step(loss)(model, optimizer, on.batch)["loss"]) for _ in range(2)]


def audited(on):
  plan = on.plan
  parts = [plan, plan.audit(), plan.explain("blocks.0.up.kernel"), plan.diff(on.other), plan.to_json()]
  parts += [nxp.describe_mesh(plan.mesh), nxp.report.plan_page(plan)]
  again = nxp.Plan.from_json(plan.to_json(), init=Net, optimizer=TX)
  nxp.testing.assert_golden_plan(plan, on.folder / "golden", update=True)
  return [*map(str, parts), again.num_parameters()]


CALLS = {
  "train_step": steps,
  "eval_step": lambda on: [EVAL(on.model, x) for x in (HOST, on.batch)],
  "create_sharded_model": lambda on: nxp.create_sharded_model(on.plan),
  "create_sharded_model, jit": lambda on: nxp.create_sharded_model(on.plan, compile="jit"),
  "reshard": lambda on: [
    nxp.reshard(on.model, plan, optimizer=on.optimizer) for plan in (on.plan, on.other)
  ],
  "Checkpointer": restored,
  "fit": fitted,
  "plan": lambda on: nxp.plan(Net, on.mesh, [RULES, nxp.replicate()], **OPTIONS).to_json(),
  "plan's methods": audited,
  "scope": scoped,
  "use_rules": in_rules,
  "constrain": lambda on: nxp.constrain(on.batch, "fsdp", None),
  "check_step": lambda on: bool(nxp.check_step(on.plan, None, loss, HOST, microbatches=2)),
  "check_step, other": lambda on: bool(nxp.check_step(on.plan, on.other, loss, HOST)),
  "check_gradients": lambda on: bool(nxp.check_gradients(on.model, on.batch, loss)),
  "step.check_gradients": lambda on: bool(STEP.check_gradients(on.model, on.optimizer, HOST)),
  "check_layout": lambda on: nxp.check_layout(on.model, on.plan, optimizer=on.optimizer),
  "compiled": lambda on: STEP.compiled(on.model, on.optimizer, on.batch).cost_analysis()["flops"],
  "lower": lambda on: STEP.lower(on.plan, batch=HOST).compile().cost_analysis()["flops"],
  "compile_report": reported,
  "compile_report, topology": topology,
  "memory_plan": memory,
  "predict_time": lambda on: nxp.report.predict_time(on.plan, loss, HOST, chip="h100").seconds,
  "search": searched,
  "generator": generated,
  "generator.lower": lambda on: GENERATE.lower(decoder_on(on.kind), decoder.PROMPTS).compile().cost_analysis()["flops"],
  "from_arrays": from_numpy,
  "batches": lambda on: [*nxp.batches([HOST] * 3, on.plan), *nxp.batches([*HOST], on.plan, batch=8)],
  "shard_batch": lambda on: nxp.shard_batch(HOST, on.plan),
  "shard_batch, device": lambda on: [nxp.shard_batch(on.batch, plan) for plan in (on.plan, on.other)],
  "evaluate": lambda on: nxp.evaluate(EVAL, on.model, [HOST, on.batch]),
  "task": a_task,
  "Job": job,
  "infer_rules": lambda on: str(nxp.infer_rules(Net, on.mesh, HOST)),
  "with_layers": lambda on: nxp.train_step(nxp.with_layers(loss, remat="full"))(on.model, on.optimizer, HOST),
  "unsharded": lambda on: nxp.unsharded(Net),
  "ema_of": lambda on: nxp.ema_of(on.optimizer, on.model),
  "ShardedOptimizer": updated,
  "send": sent,
  "map_shards": shards,
  "hosts": lambda on: [nxp.hosts.broadcast(on.batch), nxp.hosts.to_host(on.batch), nxp.hosts.barrier("x")],
  "export_program": exported,
  "safetensors": tensors,
  "linen": linen,
  "lora": lora,
  "run_training": lambda on: nxp.testing.run_training(on.plan, loss, [HOST]).losses,
  "verify": lambda on: nxp.verify.with_correct_convolutions(lambda x: x * 2, on.mesh)(on.batch),
}


def numbers(result):
  """A result as numpy arrays and text."""
  if isinstance(result, nnx.Pytree):
    return {path_str(path): numbers(value_of(x)) for path, x in variables(result).items()}
  if isinstance(result, (dict, nnx.State)):
    return {str(name): numbers(x) for name, x in result.items()}
  if isinstance(result, (list, tuple)):
    return [numbers(x) for x in result]
  if isinstance(result, nnx.Variable):
    return numbers(value_of(result))
  if isinstance(result, jax.Array) and is_key(result.dtype):
    result = jax.random.key_data(result)
  return np.asarray(result) if isinstance(result, (jax.Array, np.ndarray)) else result


@functools.cache
def wanted(call, kind):
  import tempfile, pathlib

  return numbers(CALLS[call](Given(kind, pathlib.Path(tempfile.mkdtemp()))))


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_under_a_mesh(call, kind, left, tmp_path):
  on, expected = Given(kind, tmp_path), wanted(call, kind)
  mesh = LEFT[left](on.mesh)
  with jax.set_mesh(mesh):
    try:
      result = CALLS[call](on)
    except MeshError as error:
      said = str(error)
      assert re.search("set_mesh", said), said
      assert str(dict(mesh.shape)) in said and str(dict(on.mesh.shape)) in said
      return
    assert jax.sharding.get_mesh() == mesh
    if not isinstance(result, (nnx.Pytree, tuple, list)):
      print(result)
  assert jax.tree.structure(numbers(result)) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(numbers(result)), jax.tree.leaves(expected), strict=True):
    if isinstance(b, (np.ndarray, float)):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    else:
      assert a == b
