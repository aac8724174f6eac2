"""The figures that need no compiler: memory plan, remat, step time, search."""

import dataclasses
import functools
import itertools
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders
from nnx_parallel.errors import ReportError
from nnx_parallel.layers.layers import with_layers
from nnx_parallel.report.chips import chip
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.estimate.memory import ERROR_BAND, memory_categories, memory_plan
from nnx_parallel.report.estimate.roofline import (
  EXPOSED,
  LATENCY,
  Links,
  compiled_time,
  predict_time,
  step_time,
)
from nnx_parallel.report.estimate.workload import trace_workload
from nnx_parallel.report.search.search import SAME_TIME, factorisations, meshes, search, searched_axes
from nnx_parallel.report.topology import read_machine

DEPTH, WIDTH, HIDDEN = 6, 128, 512


def parameter(rngs, shape, names):
  return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), out_sharding=names)


class Layer(nnx.Module):
  """An MLP."""

  def __init__(self, rngs):
    self.up = parameter(rngs, (WIDTH, HIDDEN), ("embed", "mlp"))
    self.down = parameter(rngs, (HIDDEN, WIDTH), ("mlp", "embed"))

  def __call__(self, x):
    return x + jax.nn.gelu(x @ self.up[...]) @ self.down[...]


class Stack(nnx.Module):
  """Scanned MLP layers and a wide head: enough to tell layers, head and remat apart."""

  def __init__(self, rngs):
    self.layers = nnx.vmap(Layer, transform_metadata={nnx.PARTITION_NAME: "layers"})(rngs.split(DEPTH))
    self.head = parameter(rngs, (WIDTH, HIDDEN), ("embed", "mlp"))

  def __call__(self, x):
    graphdef, stacked = nnx.split(self.layers)
    x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graphdef, layer)(x), None), x, stacked)
    return x @ self.head[...]


def init():
  return Stack(nnx.Rngs(0))


def loss(model, batch):
  return jnp.mean(jnp.square(model(batch)))


RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", mlp="tensor", layers=None)
BATCH = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)
PARAMS = 4 * (2 * DEPTH * WIDTH * HIDDEN + WIDTH * HIDDEN)


def plan(optimizer=None, **axes):
  sizes = {"data": 1, "fsdp": 1, "tensor": 1, **axes}
  return nxp.plan(init, nxp.abstract_mesh(sizes), RULES, optimizer=optimizer or optax.adam(1e-3))


def test_the_state_is_exact():
  found = memory_plan(plan(fsdp=4, tensor=2), loss, BATCH)
  assert found.categories["parameters"] == PARAMS // 8
  assert found.categories["optimizer"] == 2 * PARAMS // 8 + 8
  assert found.categories["batch"] == 512 * WIDTH * 4 // 4
  assert ("layers.up", DEPTH * WIDTH * HIDDEN * 4 // 8) in found.largest[:2]


def test_remat_keeps_only_the_layers_inputs():
  axes = {"fsdp": 8}
  full = trace_workload(plan(**axes), loss, BATCH, remat="full")
  none = trace_workload(plan(**axes), loss, BATCH, remat="none")
  # The input of each layer, and of the head.
  inputs = (DEPTH + 1) * 512 * WIDTH * 4
  assert sum(p.bytes for p in full.kept) == inputs
  # Inputs of the layer, and at least the input and output of the activation.
  assert sum(p.bytes for p in none.kept) >= DEPTH * 512 * (WIDTH + 2 * HIDDEN) * 4
  assert sum(p.flops * p.times for p in full.recomputed) == DEPTH * 2 * 512 * WIDTH * HIDDEN
  assert none.recomputed == ()
  assert {p.split for p in full.kept} == {frozenset(("data", "fsdp"))}


def test_microbatches_divide_activations_and_double_gradients():
  one, four = (memory_plan(plan(fsdp=8), loss, BATCH, microbatches=m, remat="full") for m in (1, 4))
  assert four.categories["kept activations"] == one.categories["kept activations"] // 4
  assert one.categories["gradients"] == PARAMS // 8
  assert four.categories["gradients"] == four.categories["summed gradients"] == PARAMS // 8


def scanned(cast_first, model, batch):
  """The layers of `Stack` in bfloat16: their weights cast as a whole, or each when it is multiplied."""
  low = jnp.bfloat16

  def layer(x, weights):
    up, down = (w.astype(low) for w in weights)
    return jax.checkpoint(lambda x: x + jax.nn.gelu(x @ up) @ down)(x), None

  weights = (model.layers.up[...], model.layers.down[...])
  x, _ = jax.lax.scan(layer, batch.astype(low), [w.astype(low) for w in weights] if cast_first else weights)
  return jnp.mean(jnp.square(x.astype(jnp.float32)))


def test_weights_cast_before_the_scan_have_gradients_half_as_large():
  layout = plan(fsdp=2, optimizer=optax.adam(1e-3))
  small = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
  own, first = (
    memory_plan(layout, functools.partial(scanned, cast), small).categories for cast in (False, True)
  )
  layers = sum(layout[name].bytes_per_device for name in ("layers.up", "layers.down"))
  assert own["gradients"] - first["gradients"] == layers // 2
  assert own["parameters in compute dtype"] == first["parameters in compute dtype"] == layers // 2
  assert trace_workload(layout, functools.partial(scanned, True), small).narrowed
  sizes = {"data": 2, "fsdp": 2, "tensor": 1}
  split = nxp.plan(init, nxp.abstract_mesh(sizes), RULES, optimizer=optax.adam(1e-3), zero=2)
  assert not trace_workload(split, functools.partial(scanned, True), small).narrowed


def test_frozen_weights_cast_before_the_scan_have_no_gradients():
  sizes = {"data": 1, "fsdp": 2, "tensor": 1}
  head = nnx.PathContains("head")
  layout = nxp.plan(init, nxp.abstract_mesh(sizes), RULES, optimizer=optax.adam(1e-3), wrt=head)
  small = jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)
  categories = memory_plan(layout, functools.partial(scanned, True), small).categories
  assert categories["gradients"] == layout["head"].bytes_per_device


def test_headroom_and_text():
  found = memory_plan(plan(fsdp=8), loss, BATCH, chip="v5e")
  assert found.headroom_bytes == chip("v5e").usable_bytes - found.need_bytes
  assert "left on v5e" in str(found)
  assert json.loads(found.to_json())["need_bytes"] == found.need_bytes
  with pytest.raises(ReportError, match="microbatches=0 is not a positive number"):
    memory_plan(plan(fsdp=8), loss, BATCH, microbatches=0)


def within_the_band(planned, step, layout, batch):
  compiled = compile_report(step, layout, batch=batch, topology="cpu:8")
  ratio = compiled.need_bytes / planned.need_bytes
  assert ERROR_BAND[0] <= ratio <= ERROR_BAND[1], f"{ratio:.2f}: {planned.categories}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_plan_is_within_its_band_of_the_compiled_need(remat):
  layout, big = plan(data=2, fsdp=2, tensor=2), jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)
  step = nxp.train_step(with_layers(loss, remat=remat))
  within_the_band(memory_plan(layout, loss, big, remat=remat), step, layout, big)


class Named(nnx.Module):
  """Two layers that only a pattern tells to be layers."""

  def __init__(self, rngs):
    self.part_a, self.part_b = (
      nnx.Sequential(nnx.Linear(WIDTH, HIDDEN, rngs=rngs), jnp.sin, nnx.Linear(HIDDEN, WIDTH, rngs=rngs))
      for _ in range(2)
    )

  def __call__(self, x):
    return self.part_b(self.part_a(x))


def test_layers_are_named_by_their_paths():
  layout = nxp.plan(
    lambda: Named(nnx.Rngs(0)), nxp.abstract_mesh(fsdp=8), nxp.fsdp(), optimizer=optax.adam(1e-3)
  )
  big = jax.ShapeDtypeStruct((1 << 16, WIDTH), jnp.float32)
  with pytest.raises(nxp.errors.TrainError, match="finds no layer"):
    memory_plan(layout, loss, big, remat="full")
  none = memory_plan(layout, loss, big, remat="none")
  full = memory_plan(layout, loss, big, remat="full", layers="part_?")
  assert full.need_bytes < none.need_bytes
  time = predict_time(layout, loss, BATCH, chip="v5e", remat="full", layers="part_?")
  assert time.compute > predict_time(layout, loss, BATCH, chip="v5e", remat="none").compute
  found = search(
    lambda: Named(nnx.Rngs(0)),
    loss,
    "tpu:v5e:2x4",
    batch=BATCH,
    rules=nxp.fsdp(),
    remat="full",
    layers="part_?",
    compile_best=0,
  )
  assert {candidate.remat for candidate in found.fitting} == {"full"}
  assert 'remat="full", layers="part_?")' in found.code()


@pytest.mark.nightly
@pytest.mark.slow
def test_search_takes_every_second_layer_too():
  config = decoders.Config(vocab=512, width=128, heads=8, kv_heads=4, head_dim=16, hidden=256, depth=4)
  search_for = functools.partial(
    search,
    lambda: decoders.Decoder(config, nnx.Rngs(0)),
    decoders.loss,
    "tpu:v5e:2x2",
    batch=jax.ShapeDtypeStruct((16, 65), jnp.int32),
    rules=[nxp.LogicalRules(batch="fsdp"), nxp.fsdp()],
    max_microbatches=1,
    compile_best=0,
  )
  with jax.numpy_rank_promotion("allow"):  # the model is as people write it
    found = search_for(remat=("full", nxp.Remat("full", every=2)))
  assert {str(candidate.remat) for candidate in found.fitting} == {"full", "full in one of every 2 layers"}
  half = next(candidate for candidate in found.fitting if candidate.remat != "full")
  full = next(c for c in found.fitting if c.sizes == half.sizes and c.remat == "full")
  assert half.time.compute < full.time.compute
  with pytest.raises(nxp.errors.ReportError, match="has no name to print"):
    search_for(remat=jax.checkpoint_policies.dots_saveable)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_plain_model_without_remat_is_within_the_band():
  """What its products read is in memory, and kept: weights of attention, the products of gates."""
  config = decoders.Config(vocab=512, width=128, heads=8, kv_heads=4, head_dim=16, hidden=256, depth=2)
  layout = nxp.plan(
    lambda: decoders.Decoder(config, nnx.Rngs(0)),
    nxp.abstract_mesh(fsdp=8),
    nxp.fsdp(min_size=0),
    optimizer=optax.adam(1e-3),
  )
  tokens = jax.ShapeDtypeStruct((32, 257), jnp.int32)
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    planned = memory_plan(layout, decoders.loss, tokens, remat="none")
    within_the_band(planned, nxp.train_step(decoders.loss, remat="none"), layout, tokens)


def zero_plan(stage, optimizer=None, **sizes):
  axes = {"data": 8, "fsdp": 1, "tensor": 1, **sizes}
  optimizer = optimizer or optax.adam(1e-3)
  return nxp.plan(init, nxp.abstract_mesh(axes), RULES, optimizer=optimizer, zero=stage)


def test_a_zero_stage_is_within_the_band_of_the_compiled_need():
  planned = memory_plan(zero_plan(2), loss, BATCH, microbatches=4)
  within_the_band(planned, nxp.train_step(loss, microbatches=4), zero_plan(2), BATCH)


def test_a_checkpointed_loop_of_layers_stays_as_written():
  def checkpointed(model, x):
    for n in range(DEPTH):
      up, down = model.layers.up[n], model.layers.down[n]
      x = jax.checkpoint(lambda x, up=up, down=down: x + jax.nn.gelu(x @ up) @ down)(x)
    return jnp.mean(x)

  assert trace_workload(plan(fsdp=8), checkpointed, BATCH, remat="none").recomputed
  with pytest.raises(nxp.errors.TrainError, match=r"parts under nnx\.remat, stay as written"):
    trace_workload(plan(fsdp=8), checkpointed, BATCH, remat="full")
  with pytest.raises(nxp.errors.TrainError, match="remat='some' is not a known policy"):
    with_layers(loss, remat="some")  # pyright: ignore[reportArgumentType]


def test_state_changes_survive_remat():
  class Counting(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones(3))
      self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
      self.calls[...] += 1
      return (self.w[...] * x).sum()

  model = nnx.Dict(only=Counting())
  with_layers(lambda m, x: m.only(x), remat="full", layers="only")(model, jnp.ones(3))
  assert int(model.only.calls[...]) == 1


# Step time ------------------------------------------------------------------------------------


def test_flops_and_time_scale_with_devices():
  work = trace_workload(plan(fsdp=2), loss, BATCH, remat="none")
  product = 2 * 512 * WIDTH * HIDDEN
  for count in (1, 8, 64):
    found = step_time(work, {"data": 1, "fsdp": count, "tensor": 1}, chip("h100"))
    assert found.flops == 3 * (2 * DEPTH + 1) * product / count
    assert found.seconds >= max(found.terms().values())


def test_each_layout_waits_for_its_own_axis():
  work = trace_workload(plan(fsdp=2), loss, BATCH)
  data = step_time(work, {"data": 8, "fsdp": 1, "tensor": 1}, chip("h100"))
  fsdp = step_time(work, {"data": 1, "fsdp": 8, "tensor": 1}, chip("h100"))
  tensor = step_time(work, {"data": 1, "fsdp": 1, "tensor": 8}, chip("h100"))
  assert (set(data.overlapped), set(data.waiting)) == ({"data"}, set())
  assert (set(fsdp.overlapped), set(fsdp.waiting)) == ({"fsdp"}, set())
  assert (set(tensor.overlapped), set(tensor.waiting)) == (set(), {"tensor"})


def test_products_inside_of_compiled_calls_are_told_apart():
  """Calls of a compiled function on equal shapes share one traced program, and not their operands."""

  class Chain(nnx.Module):
    def __init__(self, multiply):
      self.multiply = multiply
      self.weights = nnx.List(
        nnx.Param(jnp.ones((WIDTH, WIDTH)), out_sharding=names)
        for names in [(None, "tensor"), ("tensor", None)] * 2
      )

    def __call__(self, x):
      for weight in self.weights:
        x = self.multiply(x, weight[...])
      return x

  def waiting(multiply):
    made = nxp.plan(lambda: Chain(multiply), nxp.abstract_mesh(tensor=8), nxp.LogicalRules(batch=None))
    return predict_time(made, loss, BATCH, chip="h100").waiting

  assert waiting(jax.jit(jax.lax.dot)) == waiting(jax.lax.dot)


def test_an_axis_that_leaves_the_host_is_slower():
  sizes, h100 = {"data": 2, "fsdp": 8}, chip("h100")
  links = Links(sizes, h100)
  for axis in sizes:
    links.add((axis,), 1e9, 1, hidden=True)
  assert links.overlapped["data"] / links.overlapped["fsdp"] == pytest.approx(450 / 50, rel=0.01)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_model_ranks_layouts_as_the_compiled_programs_do():
  """Predicted link time against the sent bytes of compiled programs, over five layouts."""
  big = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
  work = trace_workload(plan(fsdp=2), loss, big)
  predicted, compiled = [], []
  for data, fsdp, tensor in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2)]:
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    time = step_time(work, sizes, chip("cpu"))
    predicted.append(sum(time.overlapped.values()) + sum(time.waiting.values()))
    report = compile_report(nxp.train_step(loss), plan(**sizes), batch=big, topology="cpu:8")
    compiled.append(sum(c.sent_bytes for c in report.collectives))
    assert compiled_time(report).seconds > 0
  ranks = [np.argsort(np.argsort(values)) for values in (predicted, compiled)]
  assert np.corrcoef(*ranks)[0, 1] >= 0.7, (predicted, compiled)


def test_a_gradient_travels_in_the_type_of_its_product():
  axes = {"data": 8, "fsdp": 1, "tensor": 1}

  def narrow(model, batch):
    x = batch.astype(jnp.bfloat16)
    for n in range(DEPTH):
      x = x @ model.layers.up[n].astype(jnp.bfloat16) @ model.layers.down[n].astype(jnp.bfloat16)
    return jnp.mean(jnp.square(x @ model.head[...].astype(jnp.bfloat16)))

  wide = chip("cpu").link_bandwidth * chip("cpu").links
  work = trace_workload(plan(fsdp=2), narrow, BATCH)
  one, four = (step_time(work, axes, chip("cpu"), microbatches=m) for m in (1, 4))
  assert one.overlapped["data"] * wide == pytest.approx(PARAMS * 7 / 8, rel=0.1)
  assert four.overlapped["data"] * wide == pytest.approx(2 * PARAMS * 7 / 8, rel=0.1)


def test_what_is_not_hidden_shows_in_the_step():
  time = step_time(
    trace_workload(plan(fsdp=2), loss, BATCH), {"data": 2, "fsdp": 4, "tensor": 1}, chip("h100")
  )
  hidden = [s for s in time.overlapped.values() if s < max(time.terms().values())]
  assert time.exposed == EXPOSED * sum(hidden)
  assert time.seconds == max(time.terms().values()) + time.exposed
  text = str(predict_time(plan(data=2, fsdp=4), loss, BATCH, chip="h100"))
  assert f"bound by {time.binds}" in text


@pytest.mark.cases(1)
@pytest.mark.parametrize("index", [0, 18, 30])
def test_published_runs_have_the_flops_that_their_projects_count(index):
  published = pytest.importorskip("benchmarks.step_time")
  case = published.cases()[index]
  with jax.numpy_dtype_promotion("standard"):
    time = published.predict(case)
  assert time.model_flops == pytest.approx(published.model_flops(case.config) * case.batch, rel=1e-3)


# Search ---------------------------------------------------------------------------------------


def test_every_factorisation_is_tried_once():
  found = [tuple(s.values()) for s in factorisations(12, ("a", "b", "c"))]
  assert len(found) == len(set(found)) == 18
  assert all(math.prod(s) == 12 for s in found)


@pytest.mark.parametrize(
  ("topology", "expected"),
  [
    ("cpu:4", "4,1,1 2,1,2 1,4,1 1,2,2 1,1,4"),
    ("gpu:h100:4x8", "32,1,1 16,1,2 8,1,4 4,8,1 4,4,2 4,2,4 4,1,8 2,8,2 1,32,1 1,16,2 1,8,4 1,4,8"),
  ],
)
def test_usual_meshes_keep_tensor_parallelism_on_the_fast_links(topology, expected):
  found = meshes(read_machine(topology), ("data", "fsdp", "tensor"), ("data", "fsdp"))
  assert {tuple(s.values()) for s in found} == {tuple(map(int, x.split(","))) for x in expected.split()}


def test_meshes_with_stages_and_without_a_use_for_an_axis():
  cpu = read_machine("cpu:8")
  found = meshes(cpu, ("data", "tensor", "expert"), ("data",), ("expert", "tensor"), "stage")
  assert [(*s,) for s in found] == [("stage", "data", "tensor", "expert")] * 4
  assert [s["stage"] for s in found] == [1, 2, 4, 8]
  assert meshes(cpu, ("a", "b"), (), ("a", "b")) == [{"a": 8, "b": 1}]


def find(topology, batch=BATCH, **options):
  options = {"rules": RULES, "optimizer": optax.adam(1e-3), "compile_best": 0, **options}
  return search(init, loss, topology, batch=batch, **options)


def test_search_finds_what_fits_and_prints_the_winner_on_top():
  result = find("tpu:v5e:4x8")
  assert result.best is result.fitting[0]
  times = [c.time.seconds for c in result.fitting]
  assert all(a <= b * (1 + SAME_TIME) for a, b in itertools.pairwise(times))
  lines = str(result).splitlines()
  assert (lines[2], lines[4:8]) == ("The winner:", [f"  {line}" for line in result.code().splitlines()])
  assert len(result.table().rows) == len({c.mesh_text for c in result.fitting})
  assert json.loads(result.to_json())["best"]["mesh"] == dict(result.best.sizes)
  # What is printed is what the plan of the winner says.
  how = {"microbatches": result.best.microbatches, "remat": result.best.remat}
  planned = memory_plan(result.best.plan, loss, BATCH, **how)
  assert result.best.memory_bytes == pytest.approx(planned.need_bytes, abs=8)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": 2}, {"optimizer_memory": "pinned_host"}], ids=str)
def test_the_code_of_the_winner_runs(options):
  rules = nxp.LogicalRules(batch="data", embed=None, mlp=None, layers=None) if options else RULES
  result = find("cpu:8", rules=rules, **options)
  for name, value in options.items():
    assert f"{name}={json.dumps(value)}" in result.code()
  found = json.loads(result.to_json())["best"]
  assert (found["zero"], found["offload"]) == (options.get("zero", 0), "optimizer_memory" in options)
  scope = {"nxp": nxp, "init": init, "loss": loss, "rules": rules, "optimizer": optax.adam(1e-3)}
  exec(result.code(), scope)
  batch = nxp.shard_batch(np.zeros(BATCH.shape, np.float32), scope["plan"])
  assert float(scope["step"](scope["model"], scope["state"], batch)["loss"]) == 0.0


def test_the_products_of_an_optimizer_count():
  """Muon multiplies matrices, which are split, at each update; Adam has no product."""
  init = lambda: nnx.Linear(128, 512, use_bias=False, rngs=nnx.Rngs(0))
  batch, times = jax.ShapeDtypeStruct((64, 128), jnp.float32), {}
  for name, optimizer in (("adam", optax.adam(1e-3)), ("muon", optax.contrib.muon(1e-3))):
    made = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optimizer)
    time = predict_time(made, loss, batch, chip="cpu")
    report = compile_report(nxp.train_step(loss), made, batch=batch)
    sent = sum(time.overlapped.values()) + sum(time.waiting.values())
    times[name] = time.flops, sent, report.cost.flops, report.sent().per_device
  more = [b - a for a, b in zip(times["adam"], times["muon"], strict=True)]
  assert more[0] == more[2] > 0
  cpu = chip("cpu")
  assert more[1] * cpu.link_bandwidth * cpu.links == pytest.approx(more[3], rel=0.15)


@pytest.mark.nightly
@pytest.mark.slow
def test_matrices_that_per_matrix_exchanges_count():
  """Each device multiplies its own matrices once; they travel to it and back."""
  init = lambda: nnx.List([nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(8)])
  loss = lambda layers, x: sum((layer(x) ** 2).mean() for layer in layers)
  batch, times = jax.ShapeDtypeStruct((64, 64), jnp.float32), []
  for optimizer in (optax.adam(1e-3), nxp.parallel.per_matrix(optax.contrib.muon(1e-3))):
    made = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optimizer)
    time = predict_time(made, loss, batch, chip="cpu")
    report = compile_report(nxp.train_step(loss), made, batch=batch)
    times.append((time.flops, sum(time.waiting.values()), report.cost.flops, report.sent().per_device))
  more = [b - a for a, b in zip(*times, strict=True)]
  assert more[0] == more[2] == 5 * 2 * (2 * 64 * 64 * 128 + 64**3)
  cpu = chip("cpu")
  latency = 2 * LATENCY * 3
  sent = (more[1] - latency) * cpu.link_bandwidth * cpu.links
  assert sent == pytest.approx(more[3]) == pytest.approx(2 * 4 * 64 * 128 * 7 / 8)


def test_stage_two_splits_gradients_as_the_state_of_their_shape():
  for optimizer, ways in ((optax.adam(1e-3), 8), (optax.sgd(0.1), 1)):
    work = trace_workload(zero_plan(2, optimizer), loss, BATCH)
    found = memory_categories(work, {"data": 8, "fsdp": 1, "tensor": 1}, 4)
    assert found["gradients"] == found["summed gradients"] == PARAMS / ways
    assert work.stage == (2 if ways == 8 else 0)


def test_zero_stages_send_what_their_collectives_send():
  cpu = chip("cpu")
  once = PARAMS * 7 / 8 / (cpu.link_bandwidth * cpu.links)
  for stage, rounds in ((0, 2), (1, 2), (2, 5)):
    time = predict_time(zero_plan(stage), loss, BATCH, chip=cpu, microbatches=4)
    assert time.overlapped["data"] == pytest.approx(rounds * once, rel=0.2)


def test_meshes_that_cannot_split_the_batch_are_left_out_with_the_reason():
  result = find("gpu:h100:2x8", jax.ShapeDtypeStruct((24, WIDTH), jnp.float32))
  (reason,) = result.refused
  assert reason.startswith("batch has 24 examples, which 16 shards cannot split evenly")
  assert f"{result.refused[reason]} meshes are left out: {reason}" in " ".join(str(result).split())
  assert all(math.prod((c.sizes["data"], c.sizes["fsdp"])) in (1, 2, 4, 8) for c in result.fitting)


@pytest.mark.parametrize("estimate", [memory_plan, functools.partial(predict_time, chip="v5e")])
def test_a_batch_that_cannot_be_split_has_no_estimate(estimate):
  layout = nxp.plan(
    lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.abstract_mesh(data=64, fsdp=8), nxp.fsdp()
  )
  squares = lambda model, batch: jnp.square(model(batch["x"])).mean() * batch["rate"]
  batch = lambda count: {"x": jax.ShapeDtypeStruct((count, 8), jnp.float32), "rate": 0.5}
  assert estimate(layout, squares, batch(1024), microbatches=2)
  with pytest.raises(ReportError) as error:
    estimate(layout, squares, batch(520))
  assert str(error.value).splitlines()[0] == (
    "batch['x'] has 520 examples, which 512 shards cannot split evenly: this layout cannot run."
  )
  assert "Fix: a global batch of 512 or 1024, or fewer shards." in str(error.value)
  with pytest.raises(ReportError, match=r"512 shards in each of 7 microbatches cannot split evenly"):
    estimate(layout, squares, batch(1024), microbatches=7)
  with pytest.raises(
    ReportError, match=r"the batch has no array: \(16, 8\)\.\n  Fix: .*ShapeDtypeStruct\(\(16, 8\)"
  ):
    estimate(layout, squares, (16, 8))


def test_nothing_fits():
  huge = jax.ShapeDtypeStruct((1 << 22, WIDTH), jnp.float32)
  rules = nxp.LogicalRules(batch=None, embed="fsdp", mlp="fsdp2", layers=None)
  result = find("tpu:v5e:2x2", huge, rules=rules, remat=["none"], max_microbatches=1)
  assert result.best is None
  assert "Nothing fits. The smallest" in str(result)
  with pytest.raises(ReportError, match="no layout fits on tpu:v5e:2x2"):
    result.code()


BIG = jax.ShapeDtypeStruct((1 << 16, WIDTH), jnp.float32)


@pytest.fixture
def tight(monkeypatch):
  """A device which the fastest layout is planned to fill to three quarters."""
  (fastest,) = find("tpu:v5e:1x1", BIG, max_microbatches=1, remat="none").fitting
  small = dataclasses.replace(chip("v5e"), usable_bytes=int(fastest.memory_bytes * 1.3))
  name = "nnx_parallel.report.search.search.read_machine"
  monkeypatch.setattr(name, lambda text: dataclasses.replace(read_machine(text), chip=small))
  return small.usable_bytes / ERROR_BAND[1]


def test_a_search_ranks_what_likely_fits_before_what_is_borderline(tight):
  found = find("tpu:v5e:1x1", BIG)
  assert all(c.fits == ("likely" if c.memory_bytes <= tight else "borderline") for c in found.fitting)
  order = [c.fits for c in found.fitting]
  assert order == sorted(order, reverse=True)
  assert set(order) == {"likely", "borderline"}
  assert found.best.time.seconds > min(c.time.seconds for c in found.fitting)
  assert f"{order.count('likely')} of them likely" in str(found)
  assert "In 24 test cases compilers needed 0.60 to 1.51 times the plan." in str(found)
  edge = find("tpu:v5e:1x1", BIG, remat="none", max_microbatches=1)
  assert "The winner, a borderline fit; check it with search(..., compile_best=3):" in str(edge)


def reported(*, fits=True):
  return SimpleNamespace(fits=fits, need_bytes=2**20, target="8 x cpu")


@pytest.fixture
def compiler(monkeypatch):
  """Stands in for the compiler: gives these reports, one for each candidate."""

  def given(*reports):
    left = iter(reports)
    name = "nnx_parallel.report.search.search.compile_candidate"
    monkeypatch.setattr(name, lambda c, *_: dataclasses.replace(c, report=next(left)))

  return given


def test_a_layout_that_the_compiler_accepts_wins(compiler):
  compiler(reported(fits=False), reported())
  found = find("cpu:8", compile_best=2)
  assert found.best is found.fitting[0]
  refused = found.fitting[-1]
  (note,) = found.notes
  assert note.startswith(refused.mesh_text)
  assert note.endswith("refused: the compiler needs 1 MiB.")
  (right, wrong) = json.loads(found.to_json())["compiled"]
  assert (right["refused"], wrong["refused"]) == ("", "the compiler needs 1 MiB")


def test_a_layout_that_likely_fits_wins_where_no_compiled_one_fits(compiler):
  compiler(reported(fits=False), reported(fits=False))
  found = find("cpu:8", compile_best=2)
  assert found.best is found.fitting[0]
  assert found.best.report is None
  assert found.notes[-1] == "None of the 2 compiled layouts fits; the winner was not compiled."
  assert [c.refused for c in found.fitting[-2:]] == ["the compiler needs 1 MiB"] * 2


def test_the_search_names_what_limits_the_memory_of_a_gpu():
  text = str(find("gpu:h100:1x8", remat="none"))
  assert "59.74 GiB usable each, the 75 % that JAX takes (XLA_CLIENT_MEM_FRACTION):" in text
  planned = str(memory_plan(plan(fsdp=8), loss, BATCH, chip="h100"))
  assert "left on h100, the 75 % that JAX takes (XLA_CLIENT_MEM_FRACTION)." in planned


def test_the_compiler_decides():
  result = find("cpu:8", optimizer=optax.sgd(0.1), compile_best=3)
  assert [c.report is not None for c in result.fitting[:2]] == [True, False]
  assert result.best.report.fits
  text = str(result)
  assert "The winner, compiled for 8 x cpu: it fits:" in text
  assert "compiler needs" in text
  (note,) = find("cpu:8", optimizer=None, compile_best=1).notes
  assert "a train step needs search(..., optimizer=)" in note
  far = find("tpu:v5e:4x4", compile_best=1)
  assert "16 simulated devices are needed, and this process has 8" in far.notes[0] or far.best.report


def test_axes_that_split_nothing_and_the_notes_of_the_plan_are_shown():
  """A layer that no rule names is in the notes of the winner's plan."""

  class Dense(nnx.Module):
    def __init__(self):
      self.q_proj = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
      self.odd = nnx.Linear(512, 512, rngs=nnx.Rngs(0))

    def __call__(self, x):
      return self.odd(self.q_proj(x))

  rules = [nxp.presets.gpt(), nxp.presets.fsdp_tensor(min_size=16)]
  batch = jax.ShapeDtypeStruct((8, 512), jnp.float32)
  result = search(Dense, loss, "cpu:8", batch=batch, rules=rules, compile_best=0)
  assert "The axis 'expert' splits nothing of this model: its size is 1." in result.notes
  assert "without tensor parallelism, since no path rule names them: odd.kernel" in str(result)


def test_rules_without_axes_are_refused():
  with pytest.raises(ReportError, match="the rules name no mesh axis"):
    searched_axes(nxp.replicate())


def test_what_no_layout_could_have_is_an_error():
  with pytest.raises(ReportError, match=r"max_microbatches=0 leaves nothing to try(.|\n)*max_microbatches=1"):
    find("cpu:8", max_microbatches=0)
  with pytest.raises(nxp.errors.PlanError, match="zero=1 splits optimizer state, but there is no optimizer"):
    find("cpu:8", optimizer=None, zero=1)


def test_70b_is_planned_from_shapes_alone():
  llama = pytest.importorskip("benchmarks.llama")
  sizes = llama.SIZES["70b"]
  layout = nxp.plan(
    llama.init_70b, nxp.abstract_mesh(data=1, fsdp=256, tensor=1), llama.RULES, optimizer=llama.optimizer()
  )
  # jax.nn.dot_product_attention mixes bfloat16 and float32, which strict promotion refuses.
  with jax.numpy_dtype_promotion("standard"):
    found = memory_plan(layout, llama.loss, llama.batch_of(sizes), chip="v5p")
  assert found.categories["parameters"] == pytest.approx(sizes.parameters * 4 / 256, rel=1e-2)
  assert found.headroom_bytes > 0
