"""A pipeline gives what its layers give one after the other, on one device."""

import collections
import functools
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
from nnx_parallel.layers.pipeline_saving import Cut
from training import placed

pytestmark = pytest.mark.usefixtures("compiled_here")


def layer(w: Any, x: Any, seen: Any, other: Any) -> Any:
  return x + jnp.tanh((x * (seen > 0).astype(x.dtype)[:, None] + other) @ w["kernel"] + w["bias"][None])


def given(layers: int, batch: int) -> tuple[Any, Any, Any, Any]:
  keys = jax.random.split(jax.random.key(0), 4)
  kernel, bias = jax.random.normal(keys[0], (layers, 6, 6)) / 2, jax.random.normal(keys[1], (layers, 6))
  weights = {"kernel": kernel, "bias": bias}
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
  (4, 4, 1, (), False), (7, 8, 1, "data", True), (8, 8, 2, "data", False), (8, 8, 2, "data", True),
  (3, 4, 1, "data", False), (13, 12, 3, (), True),
]  # fmt: skip


def poisoned(result: Any, works: Any) -> Any:
  """NaN for what a stage computes in a bubble."""

  def nan(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return jnp.where(jnp.reshape(works, (-1, *[1] * (x.ndim - 1))), x, jnp.nan)

  return jax.tree.map(nan, result)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("layers", "microbatches", "virtual_stages", "axes", "explicit"), GRID)
def test_values_and_gradients_are_those_of_the_layers_and_nothing_comes_out_of_bubbles(
  layers: int, microbatches: int, virtual_stages: int, axes: Any, explicit: bool, monkeypatch: Any
) -> None:
  monkeypatch.setattr(schedule, "_marked", poisoned)
  args = given(layers, microbatches * 4)
  options = {"microbatches": microbatches, "virtual_stages": virtual_stages, "batch_axes": axes}
  piped = lambda w, x, seen, other: nxp.parallel.pipeline(layer, w, x, seen, other, **options)
  with jax.set_mesh(nxp.make_mesh(data=2, stage=4, explicit=explicit)):
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

    squares = lambda y, x: ((y @ model["head"] - x["wanted"]) ** 2).mean()
    options = {"order": order, "virtual_stages": virtual_stages, "recompute": recompute}
    ends = {"before": look_up, "after": squares, "microbatches": 8}
    given = model["layers"], batch, batch["seen"], batch["other"]
    return nxp.parallel.pipeline(layer, *given, **ends, **options)

  mesh = nxp.make_mesh(data=2, stage=4, explicit=explicit)
  with jax.set_mesh(mesh):
    *where, of_batch = (jax.NamedSharding(mesh, spec) for spec in PLACES[places])
    placed = {name: jax.device_put(x, to) for (name, x), to in zip(model.items(), where, strict=True)}
    found = jax.jit(jax.value_and_grad(piped))(placed, jax.device_put(batch, of_batch))
  close(found, jax.value_and_grad(whole)(model))
  if recompute and order != "1f1b" and places == "whole":
    close(jax.jit(jax.value_and_grad(piped))(model, batch), found)  # on one device


def test_the_schedule_is_the_one_of_theory() -> None:
  plan = nxp.parallel.Schedule(stages=4, microbatches=8, layers=16)
  assert plan.bubble_ratio == pytest.approx(3 / (8 + 3))
  assert nxp.parallel.Schedule(4, 8, 16, 2).bubble_ratio == pytest.approx(3 / (2 * 8 + 3))
  for some in (plan, nxp.parallel.Schedule(4, 8, 16, 2), nxp.parallel.Schedule(2, 4, 9, 3)):
    ticks, stages = np.ix_(range(some.ticks), range(some.stages))
    works, microbatch, repeat = some.item(ticks, stages)
    parts = (np.broadcast_to(x, works.shape)[works] for x in (stages, microbatch, repeat))
    done = collections.Counter(zip(*parts, strict=True))
    assert {*done.values()} == {1}
    assert len(done) == some.stages * some.microbatches * some.virtual_stages
    assert 1 - works.mean() == pytest.approx(some.bubble_ratio)


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
    return self.head(self.through(self.embed(tokens), (tokens > 0).astype(jnp.float32)))

  def through(self, x: Any, mask: Any) -> Any:
    for block in self.blocks:
      x = block(x, mask)
    return x


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


class Routed(Block):  # Its second result is for the loss
  def __call__(self, x: Any, mask: Any, scale: Any, bias: Any) -> Any:
    y = super().__call__(x * scale[None, None], mask) + bias[None, None]
    return y, (y**2).mean()


class Tied(Model):  # Layers with a term of the loss, which read one Param twice; the head is the embedding
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


class Stacked(Model):  # Layers in one or several stacks, each of which is a scan of recomputed layers
  def __init__(self, depth: int = 4, stacks: int = 1, rngs: Any = None):
    super().__init__(0, rngs)
    stack = nnx.split_rngs(splits=depth // stacks)(nnx.vmap(lambda rngs: Block(8, rngs)))
    self.stacks = nnx.List([stack(rngs) for _ in range(stacks)])

  def through(self, x: Any, mask: Any) -> Any:
    body = nnx.remat(lambda x, block: block(x, mask))
    through = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    for stack in self.stacks:
      x = through(x, stack)
    return x


def loss(model: Any, batch: Any) -> Any:
  losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
  counted = batch["y"] > 2
  return nxp.weighted((losses * counted.astype(losses.dtype)).sum(), counted.sum()), {"all": losses.mean()}


def loss_of_weights(model: Any, batch: Any) -> Any:
  return (model.embed.embedding[...] ** 2).sum(), {"all": model(batch["x"]).mean()}


def trained(make: Any, mesh: Any, pipeline: Any, rules: Any, microbatches: int, **options: Any) -> Any:
  plan = nxp.plan(make, mesh, rules or nxp.replicate(), optimizer=optax.adam(1e-2))
  model, optimizer = placed(plan)
  step = nxp.train_step(options.pop("of", loss), microbatches=microbatches, pipeline=pipeline, **options)
  found = []
  for n in range(3):
    tokens = jax.random.randint(jax.random.key(n), (4 * microbatches, 6), 0, 16)
    metrics = step(model, optimizer, nxp.shard_batch({"x": tokens, "y": (tokens * 7 + 3) % 16}, plan))
    found.append([metrics["loss"], metrics["all"]])
  keys = nnx.state(model, nnx.Not(nnx.RngKey))
  return (found, jax.device_get(jax.tree.leaves(keys))), step


BY_TENSOR = nxp.PathRules([(".*[.]up[.]kernel", (None, "tensor")), (".*[.]down[.]kernel", ("tensor", None))])
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
  "uneven": (Model, {"data": 2, "stage": 4}, {"rules": nxp.presets.pipeline(min_size=8)}),
  "dropout": (lambda rngs: Model(drop=0.3, rngs=rngs), {"data": 2, "stage": 4}, {"remat": "full"}),
  "statistics": (lambda rngs: Model(4, norm=True, rngs=rngs), {"data": 2, "stage": 2}, {}),
  "memory": (Memories, {"data": 2, "stage": 4}, {}),
  "tied": (Tied, {"data": 2, "stage": 4}, {}),
  "stacked": (Stacked, {"data": 2, "stage": 4}, {"remat": "full"}),
  "circular": (lambda rngs: Model(8, rngs=rngs), {"data": 4, "stage": 2},
    {"virtual_stages": 2, "rules": nxp.presets.pipeline(min_size=8)}),
  "weights": (Model, {"data": 2, "stage": 4}, {"of": loss_of_weights}),
  "stacks": (lambda rngs: Stacked(8, 2, rngs), {"data": 2, "stage": 4}, {}),
  "fsdp": (Stacked, {"data": 2, "fsdp": 2, "stage": 2}, {"rules": nxp.fsdp("fsdp", min_size=8)}),
  "tensor": (lambda rngs: Model(4, rngs=rngs), {"data": 2, "stage": 2, "tensor": 2},
    {"remat": "full", "rules": [BY_TENSOR, nxp.fsdp("stage", min_size=8)]}),
}  # fmt: skip


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


def test_a_gradient_that_reads_no_slope_is_passed_on() -> None:  # that of a rule of the model, for example
  varied, weights, slopes = ((jnp.arange(3.0) + n,) for n in range(3))
  cut = Cut.of(lambda x, w, s: (x * w, (s[0] * w, jnp.sin(x))), varied, weights, slopes)
  results, residuals = cut.forward(varied, weights)
  close(results, varied[0] * weights[0])
  close(cut.backward(residuals, weights, slopes), (slopes[0] * weights[0], jnp.sin(varied[0])))


class Straight(Model):  # Layers and a head whose results have a sharding of their own on Explicit axes
  def __call__(self, x: Any) -> Any:
    return self.head(self.through(x, jnp.ones_like(x[..., 0])))


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


class Stem(Model):
  def __init__(self, rngs: Any):
    super().__init__(4, rngs)
    self.first = nnx.BatchNorm(8, rngs=rngs)

  def __call__(self, tokens: Any) -> Any:
    return self.head(self.through(self.first(self.embed(tokens)), jnp.ones(tokens.shape)))


def lowered(make: Any, mesh: Any, pipeline: Any = "stage", tx: Any = None, **options: Any) -> Any:
  """A step that was traced for a model, which is not created."""
  plan = nxp.plan(lambda: make(rngs=nnx.Rngs(0)), mesh, nxp.replicate(), optimizer=tx or optax.sgd(0.1))
  step = nxp.train_step(loss, microbatches=4, pipeline=pipeline, **options)
  tokens = jax.ShapeDtypeStruct((16, 6), jnp.int32)
  step.lower(plan, batch={"x": tokens, "y": tokens})
  return step


class Hidden(Model):
  def __call__(self, tokens: Any) -> Any:
    return jax.checkpoint(super().__call__)(tokens)


APPLY = Block.__call__
"""Read before a trace, in which `Block.__call__` marks layers."""


class Unbound(Model):
  def through(self, x: Any, mask: Any) -> Any:
    for block in self.blocks:
      x = APPLY(block, x, mask)
    return x


@pytest.mark.slow
def test_what_cannot_be_a_pipeline_says_why() -> None:
  stages, four = nxp.make_mesh(data=2, stage=4), functools.partial(Model, 4)
  one_by_one = nxp.Pipeline(order="1f1b")
  for make, mesh, options, message in (
    (Stem, stages, {}, "changes with the batch"),
    (functools.partial(Model, 1), stages, {}, "consecutive equal layers"),
    (functools.partial(Unbound, 4), stages, {}, r"does not call them as layer\(\.\.\.\)"),
    (four, nxp.make_mesh(data=8), {}, "no axis 'stage'"),
    (Stacked, stages, {"remat": nxp.Remat("full", every=2)}, "does not apply to a scan"),
    (functools.partial(Hidden, 4), stages, {}, r"(?s)not reach layers inside remat.*Fix: @nnx\.remat"),
    (four, nxp.make_mesh(data=8, stage=1), {"pipeline": one_by_one}, "at least 2 stages"),
    (four, stages, {"pipeline": one_by_one, "tx": nxp.with_loss_scale(optax.sgd(0.1))}, "underflow"),
  ):
    with pytest.raises((TrainError, SchemeError), match=message):
      lowered(make, mesh, **options)
  with pytest.raises(TrainError, match="pipeline=True is not an axis"):
    nxp.train_step(loss, pipeline=True)
  with pytest.raises(TrainError, match="got order='1F1B'"):
    nxp.Pipeline("stage", order="1F1B")  # pyright: ignore[reportArgumentType]
  with pytest.raises(SchemeError, match='order="1f1b" with recompute=False'):
    nxp.Pipeline("stage", order="gpipe", recompute=False)
