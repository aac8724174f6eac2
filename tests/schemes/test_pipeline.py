"""A pipeline gives what its layers give one after the other, on one device."""

import collections
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from benchmarks import pipeline as benchmark
from nnx_parallel.errors import SchemeError, TrainError
from nnx_parallel.layers import pipeline as schedule
from nnx_parallel.layers import pipeline_1f1b
from nnx_parallel.layers.pipeline import Schedule
from nnx_parallel.layers.pipeline_saving import Cut
from training import placed

pytestmark = pytest.mark.usefixtures("compiled_here")


def layer(w: Any, x: Any, seen: Any, other: Any) -> Any:
  return x + jnp.tanh((x * (seen > 0).astype(x.dtype)[:, None] + other) @ w["kernel"] + w["bias"][None])


def given(layers: int, batch: int) -> tuple[Any, Any, Any, Any]:
  keys = jax.random.split(jax.random.key(0), 4)
  weights = {
    "kernel": jax.random.normal(keys[0], (layers, 6, 6)) / 2,
    "bias": jax.random.normal(keys[1], (layers, 6)),
  }
  x, other = jax.random.normal(keys[2], (2, batch, 6))
  return weights, x, jnp.arange(batch) % 3, other


def one_by_one(weights: Any, x: Any, seen: Any, other: Any) -> Any:
  return jax.lax.scan(lambda x, w: (layer(w, x, seen, other), None), x, weights)[0]


def close(a: Any, b: Any) -> None:
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-5 * (1 + float(np.abs(y).max())))


def value_and_gradients(f: Any, weights: Any, x: Any, seen: Any, other: Any) -> Any:
  def squares(weights: Any, x: Any, other: Any) -> Any:
    y = f(weights, x, seen, other)
    return (y**2).mean(), y

  return jax.jit(jax.value_and_grad(squares, argnums=(0, 1, 2), has_aux=True))(weights, x, other)


GRID = [
  (4, 4, 1, (), False),
  (7, 8, 1, "data", True),
  (8, 8, 2, "data", False),
  (8, 8, 2, "data", True),
  (3, 4, 1, "data", False),
  (13, 12, 3, (), True),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("layers", "microbatches", "virtual_stages", "axes", "explicit"), GRID)
def test_values_and_gradients_are_those_of_the_layers(
  layers: int, microbatches: int, virtual_stages: int, axes: Any, explicit: bool
) -> None:
  args = given(layers, microbatches * 4)
  options = {"microbatches": microbatches, "virtual_stages": virtual_stages, "batch_axes": axes}
  with jax.set_mesh(nxp.make_mesh(data=2, stage=4, explicit=explicit)):
    found = jax.jit(
      lambda *args: value_and_gradients(
        lambda w, x, seen, other: nxp.parallel.pipeline(layer, w, x, seen, other, **options), *args
      )
    )(*args)
  close(found, value_and_gradients(one_by_one, *args))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_nothing_comes_out_of_bubbles(monkeypatch: Any, virtual_stages: int) -> None:
  def poisoned(result: Any, works: Any) -> Any:
    def nan(x: Any) -> Any:
      return jnp.where(jnp.reshape(works, (-1, *[1] * (x.ndim - 1))), x, jnp.nan)

    return jax.tree.map(nan, result)

  monkeypatch.setattr(schedule, "_marked", poisoned)
  args = given(8, 32)

  def piped(w: Any, *args: Any) -> Any:
    return nxp.parallel.pipeline(layer, w, *args, microbatches=8, virtual_stages=virtual_stages)

  with jax.set_mesh(nxp.make_mesh(data=2, stage=4)):
    found = jax.jit(lambda *args: value_and_gradients(piped, *args))(*args)
  close(found, value_and_gradients(one_by_one, *args))


ORDERS = [("gpipe", 1, True), ("1f1b", 1, True), (None, 2, True), (None, 1, False)]
PLACES = {
  "whole": (P(), P(), P(), P()),
  "stages": (P("stage"), P(), P(), P("data")),
  "rows of the table": (P("stage"), P("data"), P(None), P("data")),
}
"""Where the layers, the table, the head and the batch are."""


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize(("order", "virtual_stages", "recompute"), ORDERS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("explicit", [False, True])
def test_a_loss_of_a_layer_function_in_each_order(
  order: Any, virtual_stages: int, recompute: bool, places: str, explicit: bool
) -> None:
  weights, x, seen, other = given(8, 32)
  model = {"layers": weights, "table": other[:4], "head": jnp.linspace(-1, 1, 12).reshape(6, 2)}
  batch = {"tokens": seen, "wanted": jnp.stack([x[:, 0], x[:, 1]], -1), "seen": seen, "other": other}

  def whole(model: Any) -> Any:
    y = one_by_one(model["layers"], model["table"][seen], seen, other)
    return (((y @ model["head"]) - batch["wanted"]) ** 2).mean()

  def piped(model: Any, batch: Any) -> Any:
    def look_up(x: Any) -> Any:
      return (jax.nn.one_hot(x["tokens"], 4) @ model["table"]) if explicit else model["table"][x["tokens"]]

    return nxp.parallel.pipeline(
      layer,
      model["layers"],
      batch,
      batch["seen"],
      batch["other"],
      microbatches=8,
      before=look_up,
      after=lambda y, x: ((y @ model["head"] - x["wanted"]) ** 2).mean(),
      order=order,
      virtual_stages=virtual_stages,
      recompute=recompute,
    )

  mesh = nxp.make_mesh(data=2, stage=4, explicit=explicit)
  with jax.set_mesh(mesh):
    names, where = (model["layers"], model["table"], model["head"], batch), PLACES[places]
    layers, table, head, rows = (
      jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(names, where, strict=True)
    )
    found = jax.jit(jax.value_and_grad(piped))({"layers": layers, "table": table, "head": head}, rows)
  close(found, jax.value_and_grad(whole)(model))
  if recompute and order != "1f1b" and places == "whole":
    close(jax.jit(jax.value_and_grad(piped))(model, batch), found)  # on one device


def test_a_batch_of_a_loss_has_no_gradient_and_options_need_a_loss() -> None:
  weights, x, seen, other = given(4, 8)
  with jax.set_mesh(nxp.make_mesh(data=2, stage=4)):
    with pytest.raises(SchemeError, match="has no gradient"):
      jax.grad(
        lambda x: nxp.parallel.pipeline(
          layer, weights, x, seen, other, microbatches=4, after=lambda y, x: (y * x).mean()
        )
      )(x)
    with pytest.raises(SchemeError, match="before=, order= and recompute= are of"):
      nxp.parallel.pipeline(layer, weights, x, seen, other, microbatches=4, order="1f1b")
    with pytest.raises(SchemeError, match=r"batch_axes='data' has no effect"):
      nxp.parallel.pipeline(
        layer, weights, x, seen, other, microbatches=4, after=lambda y, x: y.mean(), batch_axes="data"
      )


def test_the_schedule_is_the_one_of_theory() -> None:
  plan = nxp.parallel.Schedule(stages=4, microbatches=8, layers=16)
  assert plan.bubble_ratio == pytest.approx(3 / (8 + 3))
  assert nxp.parallel.Schedule(4, 8, 16, 2).bubble_ratio == pytest.approx(3 / (2 * 8 + 3))
  for some in (plan, nxp.parallel.Schedule(4, 8, 16, 2), nxp.parallel.Schedule(2, 4, 9, 3)):
    ticks, stages = np.ix_(range(some.ticks), range(some.stages))
    works, microbatch, repeat = some.item(ticks, stages)
    done = collections.Counter(
      zip(*(np.broadcast_to(x, works.shape)[works] for x in (stages, microbatch, repeat)), strict=True)
    )
    assert {*done.values()} == {1}
    assert len(done) == some.stages * some.microbatches * some.virtual_stages
    assert 1 - works.mean() == pytest.approx(some.bubble_ratio)


def in_loops(text: str) -> set[str]:
  """The collectives in the bodies of loops."""
  bodies = {*re.findall(r"body=%?([\w.\-]+)", text)}
  found: set[str] = set()
  inside = False
  for line in text.split("\n"):
    if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
      inside = head.group(1) in bodies
    elif inside and (op := re.search(r" (all-reduce|all-gather|collective-permute|all-to-all)\(", line)):
      found.add(op.group(1))
  return found


@pytest.mark.slow
@pytest.mark.nightly
def test_a_tick_sends_activations_only() -> None:
  args = given(8, 32)

  def piped(axes: Any) -> Any:
    def f(w: Any, *args: Any) -> Any:
      return nxp.parallel.pipeline(layer, w, *args, microbatches=8, batch_axes=axes)

    return jax.jit(lambda *args: value_and_gradients(f, *args))

  mesh = nxp.make_mesh(data=2, stage=4)
  weights = jax.device_put(args[0], jax.NamedSharding(mesh, jax.P("stage")))
  rest = jax.device_put(args[1:], jax.NamedSharding(mesh, jax.P("data")))
  with jax.set_mesh(mesh):
    assert in_loops(piped("data").lower(weights, *rest).compile().as_text()) == {"collective-permute"}
    assert "all-reduce" in in_loops(piped(()).lower(weights, *rest).compile().as_text())


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["2 stages, 4 virtual stages", "4 stages"])
def test_bytes_and_memory_are_those_of_theory(way: str) -> None:
  wanted = benchmark.WAYS[way]
  plan = benchmark.plan_of(nxp.make_mesh(benchmark.sizes_of(wanted)))
  batch = jax.ShapeDtypeStruct((benchmark.BATCH, benchmark.WIDTH), jnp.float32)
  report = nxp.compile_report(benchmark.step_of(wanted), plan, batch=batch)
  sent = [c for c in report.collectives if c.axes == ("stage",)]
  assert sum(c.total_bytes for c in sent if "ppermute" in c.op) == benchmark.analytic(wanted)
  if wanted.virtual_stages > 1:
    return  # the weights are sent to their stages
  assert [(c.kind, c.bytes) for c in sent if "ppermute" not in c.op] == [("all-reduce", 4)]  # no weights
  weights = 2 * benchmark.LAYERS * benchmark.WIDTH**2 * 4 // wanted.stages
  microbatch = benchmark.BATCH // benchmark.MICROBATCHES // plan.mesh.shape["data"] * benchmark.WIDTH * 4
  # Weights that each tick kept would be `ticks` times those of the stage.
  assert report.memory.temporaries < 3 * weights + 8 * wanted.ticks * microbatch
  assert 3 * weights < wanted.ticks * weights / wanted.virtual_stages / 4


def test_errors_say_what_fits() -> None:
  args = given(4, 12)
  with jax.set_mesh(nxp.make_mesh(data=2, stage=4)):
    for options, message in (
      ({"microbatches": 6}, "microbatches=8"),
      ({"microbatches": 8}, "8 equal parts"),
      ({"microbatches": 4, "axis": "stages"}, "no axis 'stages'"),
      ({"microbatches": 4, "virtual_stages": 2}, "2 chunks"),
    ):
      with pytest.raises(SchemeError, match=message):
        nxp.parallel.pipeline(layer, *args, **options)
  with pytest.raises(SchemeError, match="stacked"):
    nxp.parallel.pipeline(layer, {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}, *args[1:], microbatches=4)


class Block(nnx.Module):
  def __init__(self, features: int, rngs: nnx.Rngs, drop: float = 0.0, *, norm: bool = False):
    self.norm = nnx.BatchNorm(features, rngs=rngs) if norm else nnx.LayerNorm(features, rngs=rngs)
    self.up = nnx.Linear(features, 2 * features, rngs=rngs)
    self.down = nnx.Linear(2 * features, features, rngs=rngs)
    self.drop = nnx.Dropout(drop, rngs=rngs)

  def __call__(self, x: Any, mask: Any) -> Any:
    return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))) * mask[..., None])


class Model(nnx.Module):
  def __init__(self, depth: int = 5, rngs: Any = None, **options: Any):
    self.embed = nnx.Embed(16, 8, rngs=rngs)
    self.blocks = nnx.List([Block(8, rngs, **options) for _ in range(depth)])
    self.head = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, tokens: Any) -> Any:
    x, mask = self.embed(tokens), (tokens > 0).astype(jnp.float32)
    for block in self.blocks:
      x = block(x, mask)
    return self.head(x)


class Remembering(nnx.Module):
  """Its result, and so the loss, depends on what it kept of the microbatch before."""

  def __init__(self, features: int, rngs: nnx.Rngs):
    self.linear = nnx.Linear(features, features, rngs=rngs)
    self.last = nnx.BatchStat(jnp.ones(()))

  def __call__(self, x: Any, mask: Any) -> Any:
    del mask
    y = self.linear(x) * self.last[...]
    self.last[...] = 1 + y.mean()
    return x + y


class Memories(Model):
  def __init__(self, rngs: Any):
    super().__init__(1, rngs)
    self.blocks = nnx.List([Remembering(8, rngs) for _ in range(4)])


class Routed(Block):
  """Its second result is for the loss."""

  def __call__(self, x: Any, mask: Any, scale: Any, bias: Any) -> Any:
    y = super().__call__(x * scale[None, None], mask) + bias[None, None]
    return y, (y**2).mean()


class Tied(Model):
  """Layers with a term of the loss, which read one Param twice; the head is the embedding."""

  def __init__(self, rngs: Any):
    super().__init__(0, rngs)
    self.blocks = nnx.List([Routed(8, rngs) for _ in range(5)])
    self.shared = nnx.Param(jnp.linspace(0.5, 1.5, 8))

  def __call__(self, tokens: Any) -> Any:
    x, mask = self.embed(tokens), (tokens > 0).astype(jnp.float32)
    first, terms = x, []
    for block in self.blocks:
      x, term = block(x, mask, self.shared[...], self.shared[...])
      terms.append(term)
    return (x + first) @ self.embed.embedding[...].T * (1 + sum(terms))


class Stacked(nnx.Module):
  """Layers in one or several stacks, each of which is a scan of recomputed layers."""

  def __init__(self, depth: int = 4, stacks: int = 1, rngs: Any = None):
    self.embed = nnx.Embed(16, 8, rngs=rngs)
    stack = nnx.split_rngs(splits=depth // stacks)(nnx.vmap(lambda rngs: Block(8, rngs)))
    self.stacks = nnx.List([stack(rngs) for _ in range(stacks)])
    self.head = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, tokens: Any) -> Any:
    x, mask = self.embed(tokens), (tokens > 0).astype(jnp.float32)
    body = nnx.remat(lambda x, block: block(x, mask))
    through = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    for stack in self.stacks:
      x = through(x, stack)
    return self.head(x)


def loss(model: Any, batch: Any) -> Any:
  losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
  counted = batch["y"] > 2
  return nxp.weighted((losses * counted.astype(losses.dtype)).sum(), counted.sum()), {"all": losses.mean()}


def trained(
  make: Any, mesh: Any, pipeline: Any, rules: Any = None, microbatches: int = 4, **options: Any
) -> tuple[Any, Any]:
  plan = nxp.plan(make, mesh, rules or nxp.replicate(), optimizer=optax.adam(1e-2))
  model, optimizer = placed(plan)
  step = nxp.train_step(loss, microbatches=microbatches, pipeline=pipeline, **options)
  found = []
  for n in range(3):
    tokens = jax.random.randint(jax.random.key(n), (4 * microbatches, 6), 0, 16)
    metrics = step(model, optimizer, nxp.shard_batch({"x": tokens, "y": (tokens * 7 + 3) % 16}, plan))
    found.append([metrics["loss"], metrics["all"]])
  keys = nnx.state(model, nnx.Not(nnx.RngKey))
  return (found, jax.device_get(jax.tree.leaves(keys))), step


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
  "uneven": (Model, {"data": 2, "stage": 4}, {"rules": nxp.presets.pipeline(min_size=8)}),
  "dropout": (lambda rngs: Model(drop=0.3, rngs=rngs), {"data": 2, "stage": 4}, {"remat": "full"}),
  "statistics": (lambda rngs: Model(4, norm=True, rngs=rngs), {"data": 2, "stage": 2}, {}),
  "memory": (Memories, {"data": 2, "stage": 4}, {}),
  "tied": (Tied, {"data": 2, "stage": 4}, {}),
  "stacked": (Stacked, {"data": 2, "stage": 4}, {"remat": "full"}),
  "circular": (
    lambda rngs: Model(8, rngs=rngs),
    {"data": 4, "stage": 2},
    {"virtual_stages": 2, "rules": nxp.presets.pipeline(min_size=8)},
  ),
  "stacks": (lambda rngs: Stacked(8, 2, rngs), {"data": 2, "stage": 4}, {}),
  "fsdp": (Stacked, {"data": 2, "fsdp": 2, "stage": 2}, {"rules": nxp.fsdp("fsdp", min_size=8)}),
  "tensor": (
    lambda rngs: Model(4, rngs=rngs),
    {"data": 2, "stage": 2, "tensor": 2},
    {
      "remat": "full",
      "rules": [
        nxp.PathRules([(".*[.]up[.]kernel", (None, "tensor")), (".*[.]down[.]kernel", ("tensor", None))]),
        nxp.fsdp("stage", min_size=8),
      ],
    },
  ),
}


@functools.cache
def on_one_device(case: str, microbatches: int) -> Any:
  kind, _, options = CASES[case]
  options = {key: value for key, value in options.items() if key not in ("virtual_stages", "rules")}
  mesh = nxp.make_mesh(data=1, devices=jax.devices()[:1])
  return trained(lambda: kind(rngs=nnx.Rngs(0)), mesh, None, None, microbatches, **options)[0]


IN_CI = {"gpipe": "uneven", "1f1b": "stacked", "saved": "memory"}


def each_case_in_each_order() -> Iterator[Any]:
  for case in CASES:
    for order, in_ci in IN_CI.items():
      marks = () if case == in_ci else (pytest.mark.nightly,)
      yield pytest.param(case, order, 4 if order == "gpipe" else 8, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "order", "microbatches"), [*each_case_in_each_order()])
def test_a_train_step_is_that_of_its_microbatches(case: str, order: Any, microbatches: int) -> None:
  kind, sizes, options = CASES[case]
  options = dict(options)
  order, recompute = (None, False) if order == "saved" else (order, True)
  pipeline = nxp.Pipeline("stage", options.pop("virtual_stages", 1), order, recompute)
  rules = options.pop("rules", None)
  if not recompute:
    options.pop("remat", None)
  mesh = nxp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])
  found, step = trained(lambda: kind(rngs=nnx.Rngs(0)), mesh, pipeline, rules, microbatches, **options)
  close(found, on_one_device(case, microbatches))
  assert f"a{' 1F1B' * (order != 'gpipe')} pipeline over stage" in str(step.layers)
  if case in ("uneven", "stacked", "circular", "tensor"):
    assert step.reduction == "once, after the last tick, over data"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_saved_activations_of_1f1b_do_not_grow_with_microbatches(virtual_stages: int) -> None:
  plan = benchmark.plan_of(nxp.make_mesh(data=2, stage=4))

  def temporaries(order: Any, microbatches: int) -> int:
    pipeline = nxp.Pipeline("stage", virtual_stages, order)
    step = nxp.train_step(benchmark.loss, microbatches=microbatches, pipeline=pipeline)
    batch = jax.ShapeDtypeStruct((32 * microbatches, benchmark.WIDTH), jnp.float32)
    report = nxp.compile_report(step, plan, batch=batch)
    stage = Schedule(4, microbatches, benchmark.LAYERS, virtual_stages)
    if order == "1f1b":
      # Two microbatches in each tick, in each direction; and the first result of each group that leaves. The
      # model has nothing before its layers, so no gradient leaves.
      sent = sum(c.total_bytes for c in report.collectives if "ppermute" in c.op)
      assert sent == (4 * stage.ticks + stage.groups) * 32 // 2 * benchmark.WIDTH * 4
    return report.memory.temporaries

  # The batch itself, split for the stages, is 0.25 MiB of 64 microbatches.
  few, many = temporaries("1f1b", 8), temporaries("1f1b", 64)
  assert many - few < 2**19
  assert temporaries("gpipe", 64) - temporaries("gpipe", 8) > 3 * (many - few)


@pytest.mark.slow
def test_a_backward_pass_is_cut_where_it_reads_gradients() -> None:
  def back(x: Any, w: Any, g: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
      return jax.checkpoint(lambda x: x + jnp.tanh(x @ w["up"] + w["bias"][None]) @ w["down"].T)(x)

    y, pull = jax.vjp(layer, x, w)
    return y, pull(g)

  keys = jax.random.split(jax.random.key(0), 5)
  x, g = (jax.random.normal(key, (6, 4)) for key in keys[:2])
  w = {
    "up": jax.random.normal(keys[2], (4, 8)),
    "bias": jnp.zeros(8),
    "down": jax.random.normal(keys[3], (4, 8)),
  }
  cut = Cut.of(back, (x,), (w,), g)
  y, residuals = cut.forward((x,), (w,))
  close((y, cut.backward(residuals, (w,), g)), back(x, w, g))
  products = [[eqn.primitive.name for eqn in eqns].count("dot_general") for eqns in (cut.early, cut.back)]
  assert products == [3, 4]  # forward: one is computed again in the checkpoint, which XLA sees
  assert not any(a.shape == (4, 8) for a in residuals)  # no weights


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_without_recomputation_a_tick_has_one_forward_pass_less(virtual_stages: int) -> None:
  plan = benchmark.plan_of(nxp.make_mesh(data=2, stage=4))
  microbatches = 8
  chunks = microbatches * virtual_stages

  def passes(order: Any, recompute: bool = True) -> float:
    """The compute of a stage, as a multiple of a forward pass of a chunk for one microbatch."""
    pipeline = nxp.Pipeline("stage", virtual_stages, order, recompute)
    step = nxp.train_step(benchmark.loss, microbatches=microbatches, pipeline=pipeline)
    batch = jax.ShapeDtypeStruct((32 * microbatches, benchmark.WIDTH), jnp.float32)
    flops = nxp.compile_report(step, plan, batch=batch).cost.flops
    return flops / (2 * 16 * benchmark.WIDTH**2 * 2 * benchmark.LAYERS // (4 * virtual_stages))

  # Forward, once again, and the gradients of inputs and of weights.
  assert passes("1f1b") == passes(None) == 4 * (chunks + 3)
  assert passes("1f1b", recompute=False) == 3 * (chunks + 3)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_1f1b_trains_only_what_is_trained(recompute: bool) -> None:
  def adapted(pipeline: Any, mesh: Any) -> Any:
    wrt = nnx.All(nnx.Param, nnx.PathContains("up"))
    plan = nxp.plan(lambda: Model(4, nnx.Rngs(0)), mesh, nxp.replicate(), optimizer=optax.adam(1e-2), wrt=wrt)
    model, optimizer = placed(plan)
    step = nxp.train_step(loss, microbatches=8, pipeline=pipeline)
    tokens = jax.random.randint(jax.random.key(1), (16, 6), 0, 16)
    batch = nxp.shard_batch({"x": tokens, "y": tokens}, plan)
    losses = [step(model, optimizer, batch)["loss"] for _ in range(2)]
    return (
      losses,
      jax.device_get(jax.tree.leaves(nnx.state(model, nnx.Param))),
      nxp.compile_report(step, plan, batch=batch),
    )

  *found, report = adapted(nxp.Pipeline(recompute=recompute), nxp.make_mesh(data=2, stage=4))
  *wanted, _ = adapted(None, nxp.make_mesh(data=1, devices=jax.devices()[:1]))
  close(found, wanted)
  *_, everything = adapted(nxp.Pipeline(order="gpipe"), nxp.make_mesh(data=2, stage=4))
  assert report.cost.flops <= everything.cost.flops


def two_steps(loss: Any, make: Any, pipeline: Any, mesh: Any, microbatches: int = 8) -> Any:
  plan = nxp.plan(make, mesh, nxp.replicate(), optimizer=optax.adam(1e-2))
  model, optimizer = placed(plan)
  step = nxp.train_step(loss, microbatches=microbatches, pipeline=pipeline)
  tokens = jax.random.randint(jax.random.key(1), (2 * microbatches, 6), 0, 16)
  batch = nxp.shard_batch({"x": tokens, "y": tokens}, plan)
  losses = [step(model, optimizer, batch)["loss"] for _ in range(2)]
  return losses, jax.device_get(jax.tree.leaves(nnx.state(model, nnx.Param)))


def of_weights(model: Any) -> Any:
  kernels = sum((block.up.kernel[...] ** 2).sum() for block in model.blocks)
  return (model.embed.embedding[...] ** 2).sum() + kernels


def weights_alone(model: Any, batch: Any) -> Any:
  return of_weights(model), {"logits": model(batch["x"]).mean()}


def both(model: Any, batch: Any) -> Any:
  losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
  return of_weights(model) + losses.mean()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("loss", [weights_alone, both])
def test_a_loss_may_read_weights_outside_of_the_layers(loss: Any, recompute: bool) -> None:
  def make() -> Any:
    return Model(4, nnx.Rngs(0))

  found = two_steps(loss, make, nxp.Pipeline(recompute=recompute), nxp.make_mesh(data=2, stage=4))
  close(found, two_steps(loss, make, None, nxp.make_mesh(data=1, devices=jax.devices()[:1])))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_nothing_comes_out_of_bubbles_of_1f1b(monkeypatch: Any, recompute: bool) -> None:
  def make() -> Any:
    return Model(7, nnx.Rngs(0))

  wanted = two_steps(both, make, None, nxp.make_mesh(data=1, devices=jax.devices()[:1]), 10)

  def poisoned(result: Any, works: Any) -> Any:
    def nan(x: Any) -> Any:
      return (
        jnp.where(jnp.reshape(works, (-1, *[1] * (x.ndim - 1))), x, jnp.nan) if x.dtype.kind == "f" else x
      )

    return jax.tree.map(nan, result)

  monkeypatch.setattr(schedule, "_marked", poisoned)
  mesh = nxp.make_mesh(stage=2, data=1, devices=jax.devices()[:2])
  close(two_steps(both, make, nxp.Pipeline("stage", 3, "1f1b", recompute), mesh, 10), wanted)


class Rounded(Block):
  def __call__(self, x: Any, mask: Any) -> Any:
    y = super().__call__(x, mask)
    return y + 0.1 * jnp.floor(y)


class Roundings(Model):
  def __init__(self, rngs: Any):
    super().__init__(0, rngs)
    self.blocks = nnx.List([Rounded(8, rngs) for _ in range(4)])


@pytest.mark.slow
@pytest.mark.nightly
def test_wrong_gradients_of_1f1b_are_found_where_layers_round(monkeypatch: Any) -> None:
  mesh = nxp.make_mesh(data=2, stage=4)
  plan = nxp.plan(lambda: Roundings(nnx.Rngs(0)), mesh, nxp.replicate(), optimizer=optax.sgd(0.1))
  model, optimizer = placed(plan)
  tokens = jax.random.randint(jax.random.key(0), (16, 6), 0, 16)
  batch = nxp.shard_batch({"x": tokens, "y": tokens}, plan)

  def checked() -> Any:
    step = nxp.train_step(loss, microbatches=4, pipeline=nxp.Pipeline(order="1f1b"))
    return step.check_gradients(model, optimizer, batch)

  assert checked()
  right = pipeline_1f1b.Gradients.run

  def negated(self: Any) -> Any:
    found, gradients = right(self)
    return found, jax.tree.map(jnp.negative, gradients)

  monkeypatch.setattr(pipeline_1f1b.Gradients, "run", negated)
  assert not checked()


class Straight(Model):
  """Layers and a head whose results have a sharding of their own on Explicit axes."""

  def __call__(self, x: Any) -> Any:
    for block in self.blocks:
      x = block(x, jnp.ones_like(x[..., 0]))
    return self.head(x)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("explicit", [False, True])
def test_an_evaluation_is_the_one_without_a_pipeline(explicit: bool) -> None:
  def squares(model: Any, x: Any) -> Any:
    y = model(x)
    losses = (y**2).mean((1, 2))
    counted = (losses > 0.1).astype(losses.dtype)
    metrics = {"all": losses.mean(), "largest": y.max((1, 2))}
    return nxp.weighted((losses * counted).sum(), counted.sum()), metrics

  mesh = nxp.make_mesh(data=2, stage=4, explicit=explicit)
  plan = nxp.plan(lambda: Straight(rngs=nnx.Rngs(0)), mesh, nxp.replicate())
  model = placed(plan)
  batch = nxp.shard_batch(jax.random.normal(jax.random.key(1), (16, 6, 8)), plan)
  for pairs in (False, True):
    options: dict[str, Any] = {"outputs": ["largest"], "pairs": pairs}
    piped = nxp.eval_step(squares, microbatches=4, pipeline="stage", **options)
    close(piped(model, batch), nxp.eval_step(squares, **options)(model, batch))
    assert "a pipeline over stage, 4 stages" in str(piped.layers)
  with pytest.raises(TrainError, match="need a pipeline"):
    nxp.eval_step(squares, microbatches=4)
  with pytest.raises(TrainError, match="12 microbatches cannot split evenly"):
    nxp.eval_step(squares, microbatches=12, pipeline="stage")(model, batch)


@pytest.mark.cases(1)
@pytest.mark.nightly
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.slow
def test_forward_mode_has_the_same_gradients(order: Any) -> None:
  mesh = nxp.make_mesh(data=2, stage=4)
  plan = nxp.plan(lambda: Model(4, nnx.Rngs(0)), mesh, nxp.replicate(), optimizer=optax.sgd(0.1))
  model, optimizer = placed(plan)
  tokens = jax.random.randint(jax.random.key(0), (16, 6), 0, 16)
  batch = nxp.shard_batch({"x": tokens, "y": tokens}, plan)
  pipeline = nxp.Pipeline("stage", order=order)
  found = nxp.train_step(loss, microbatches=4, pipeline=pipeline).check_gradients(model, optimizer, batch)
  assert found, str(found)
  assert "a stage of a pipeline" in str(found)


class Stem(Model):
  def __init__(self, rngs: Any):
    super().__init__(4, rngs)
    self.first = nnx.BatchNorm(8, rngs=rngs)

  def __call__(self, tokens: Any) -> Any:
    x, mask = self.first(self.embed(tokens)), jnp.ones(tokens.shape)
    for block in self.blocks:
      x = block(x, mask)
    return self.head(x)


class Windowed(Block):
  def __call__(self, x: Any, mask: Any, flag: bool = False) -> Any:
    return super().__call__(jnp.tanh(x) if flag else x, mask)


class Alternating(Model):
  """Has layers of two kinds in turn, and others before them."""

  def __init__(self, rngs: Any):
    super().__init__(1, rngs)
    self.sides = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
    self.blocks = nnx.List([Windowed(8, rngs) for _ in range(8)])

  def __call__(self, tokens: Any) -> Any:
    x, mask = self.embed(tokens), (tokens > 0).astype(jnp.float32)
    for side in self.sides:
      x = x + side(x)
    for n, block in enumerate(self.blocks):
      x = block(x, mask, flag=n % 2 == 1)
    return self.head(x)


def lowered(make: Any, mesh: Any, pipeline: Any = "stage", tx: Any = None, **options: Any) -> Any:
  """A step that was traced for a model, which is not created."""
  plan = nxp.plan(lambda: make(rngs=nnx.Rngs(0)), mesh, nxp.replicate(), optimizer=tx or optax.sgd(0.1))
  step = nxp.train_step(loss, microbatches=4, pipeline=pipeline, **options)
  tokens = jax.ShapeDtypeStruct((16, 6), jnp.int32)
  step.lower(plan, batch={"x": tokens, "y": tokens})
  return step


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_outside_of_a_pipeline_is_said() -> None:
  said = str(lowered(Alternating, nxp.make_mesh(data=2, stage=4)).layers)
  assert "4 stages of 1 layers" in said
  assert "each of its 4 layers is 2 layers of the model" in said
  assert "outside of the pipeline, computed by each stage: sides.0, sides.1, weights of 576 B" in said


class Recomputed(Model):
  def __init__(self, rngs: Any):
    super().__init__(0, rngs)
    self.blocks = nnx.List([Kept(8, rngs) for _ in range(4)])


class Kept(Block):
  __call__ = nnx.remat(Block.__call__)


@pytest.mark.nightly
@pytest.mark.slow
def test_recomputation_has_no_effect_on_layers_that_are_saved() -> None:
  mesh, saving = nxp.make_mesh(data=2, stage=4), nxp.Pipeline(recompute=False)
  said = "jax.checkpoint inside of the layers has no effect"
  assert said in str(lowered(Recomputed, mesh, pipeline=saving).layers)
  assert said not in str(lowered(Recomputed, mesh, pipeline=nxp.Pipeline(order="1f1b")).layers)
  assert said not in str(lowered(functools.partial(Model, 4), mesh, pipeline=saving).layers)
  with pytest.raises(TrainError, match="remat='dots' has no effect"):
    nxp.train_step(loss, remat="dots", pipeline=saving)


class Hidden(Model):
  def __call__(self, tokens: Any) -> Any:
    return jax.checkpoint(super().__call__)(tokens)


APPLY = Block.__call__
"""Read before a trace, in which `Block.__call__` marks layers."""


class Unbound(Model):
  def __call__(self, tokens: Any) -> Any:
    x, mask = self.embed(tokens), (tokens > 0).astype(jnp.float32)
    for block in self.blocks:
      x = APPLY(block, x, mask)
    return self.head(x)


@pytest.mark.slow
def test_what_cannot_be_a_pipeline_says_why() -> None:
  stages = nxp.make_mesh(data=2, stage=4)
  for make, mesh, options, message in (
    (Stem, stages, {}, "changes with the batch"),
    (functools.partial(Model, 1), stages, {}, "consecutive equal layers"),
    (functools.partial(Unbound, 4), stages, {}, r"does not call them as layer\(\.\.\.\)"),
    (functools.partial(Model, 4), nxp.make_mesh(data=8), {}, "no axis 'stage'"),
    (Stacked, stages, {"remat": nxp.Remat("full", every=2)}, "does not apply to a scan"),
    (
      functools.partial(Hidden, 4),
      stages,
      {},
      r"(?s)a pipeline does not reach layers inside remat.*Fix: @nnx\.remat",
    ),
    (
      functools.partial(Model, 4),
      nxp.make_mesh(data=8, stage=1),
      {"pipeline": nxp.Pipeline(order="1f1b")},
      "at least 2 stages",
    ),
    (
      functools.partial(Model, 4),
      stages,
      {"pipeline": nxp.Pipeline(order="1f1b"), "tx": nxp.with_loss_scale(optax.sgd(0.1))},
      "underflow",
    ),
  ):
    with pytest.raises((TrainError, SchemeError), match=message):
      lowered(make, mesh, **options)
  with pytest.raises(TrainError, match="pipeline=True is not an axis"):
    nxp.train_step(loss, pipeline=True)
  with pytest.raises(TrainError, match="got order='1F1B'"):
    nxp.Pipeline("stage", order="1F1B")  # pyright: ignore[reportArgumentType]
  with pytest.raises(SchemeError, match='order="1f1b" with recompute=False'):
    nxp.Pipeline("stage", order="gpipe", recompute=False)
