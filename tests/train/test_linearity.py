"""Whether the gradients of a batch are those of its parts, added up: by the trace, and by numbers."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import nnx_parallel as nxp
from nnx_parallel.train import linearity
from nnx_parallel.train.linearity import factors
from training import placed, run_steps

PARTS, ROWS = 4, 6


def inputs(rows, seed=0):
  rng = np.random.default_rng(seed)
  return {
    "x": rng.normal(size=(rows, 3, 4)).astype(np.float32),
    "y": rng.integers(0, 4, (rows, 3)).astype(np.int32),
    "mask": (rng.random((rows, 3)) < 0.5).astype(np.float32),
  }


WEIGHTS = {"w": np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32), "b": np.ones(4, np.float32)}


def features(p, b):
  return jnp.tanh(b["x"] @ p["w"] + p["b"][None, None])


losses = lambda p, b: optax.softmax_cross_entropy_with_integer_labels(features(p, b), b["y"])


def contrast(p, b):
  z = features(p, b).mean(1)
  return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(z.shape[0])).mean()


def balance(p, b):
  chances = jax.nn.softmax(features(p, b))
  return (chances.mean((0, 1)) * jax.nn.one_hot(chances.argmax(-1), 4).mean((0, 1))).sum()


def scanned(p, b):
  step = lambda h, x: (jnp.tanh(h @ p["w"] + x),) * 2
  return jax.lax.scan(step, jnp.zeros_like(b["x"][:, 0]), b["x"].swapaxes(0, 1))[1].mean()


def clipped(p, b):
  @jax.custom_vjp
  def limit(x):
    return x

  limit.defvjp(lambda x: (x, None), lambda _, g: (g / (1 + jnp.linalg.norm(g)),))
  return limit(losses(p, b)).mean()


def sent(p, b):
  """Features that devices of another axis than the examples' send on, and their sum over it."""
  mesh, own = nxp.make_mesh(tensor=4, devices=jax.devices()[:4], explicit=False), jax.P(None, None, "tensor")

  def turn(x):
    away = jax.lax.ppermute(x, "tensor", [(n, (n + 1) % 4) for n in range(4)])
    return x * away, jax.lax.psum(x, "tensor")

  turned, total = jax.shard_map(turn, mesh=mesh, in_specs=own, out_specs=(own, jax.P()))(features(p, b))
  return turned.mean() + (total**2).mean()


def summed_by_rule(p, b):
  """A sum over devices with a rule of its own, whose axis only the `shard_map` around it knows."""
  mesh, own = nxp.make_mesh(tensor=4, devices=jax.devices()[:4], explicit=False), jax.P(None, None, "tensor")

  @jax.custom_vjp
  def total(x):
    return jax.lax.psum(x, "tensor")

  total.defvjp(lambda x: (total(x), None), lambda _, g: (g,))
  options = {"in_specs": own, "out_specs": jax.P(), "check_vma": False}
  return (jax.shard_map(total, mesh=mesh, **options)(features(p, b)) ** 2).mean()


def held(p, b):
  """A layout for the features, which is not what they are."""
  where = jax.NamedSharding(nxp.make_mesh(data=2, devices=jax.devices()[:2], explicit=False), jax.P("data"))
  return (jax.lax.with_sharding_constraint(features(p, b), where) ** 2).mean()


FOLLOWS = {
  "mean": (lambda p, b: losses(p, b).mean(), "mean"),
  "sum": (lambda p, b: losses(p, b).sum(), "sum"),
  "mean with a penalty": (lambda p, b: losses(p, b).mean() + (p["w"] ** 2).sum(), "mean"),
  "sum taken for a mean": (lambda p, b: losses(p, b).sum(), "mean"),
  "fixed divisor": (lambda p, b: losses(p, b).sum() / 18, "mean"),
  "mean taken for a sum": (lambda p, b: losses(p, b).mean(), "sum"),
  "masked sum": (lambda p, b: (losses(p, b) * b["mask"]).sum(), "sum"),
  "mean of each example first": (lambda p, b: (losses(p, b).sum(1) / b["mask"].sum(1).clip(1)).mean(),
    "mean"),
  "scan": (scanned, "mean"),
  "vmap": (lambda p, b: jax.vmap(lambda x: features(p, {"x": x[None]})[0].max())(b["x"]).mean(), "mean"),
  "checkpoint": (lambda p, b: jax.checkpoint(lambda p: losses(p, b).mean())(p), "mean"),
  "sent between devices": (sent, "mean"),
  "held in a layout": (held, "mean"),
  "zero added": (lambda p, b: ((features(p, b) + 0.0) ** 2).mean(), "mean"),
  "padded": (lambda p, b: (jnp.pad(features(p, b), ((0, 0), (1, 0), (0, 0))) ** 2).mean(), "mean"),
  "rows as one dim": (lambda p, b: (features(p, b).reshape(-1, 4) ** 2).mean(), "mean"),
  "look-up": (lambda p, b: (p["w"][b["y"]] ** 2).mean(), "mean"),
  "top": (lambda p, b: jax.lax.top_k(features(p, b), 2)[0].mean(), "mean"),
  "top, approximately": (lambda p, b: jax.lax.approx_max_k(features(p, b), 2)[0].mean(), "mean"),
  "largest of each slot": (
    lambda p, b: jax.vmap(lambda i, x: jnp.zeros((4, 4)).at[i].max(x))(b["y"], features(p, b)).mean(),
    "mean"),
  "branch": (lambda p, b: jax.lax.cond(p["b"][0] > 0, losses, lambda p, b: 2 * losses(p, b), p, b).mean(),
    "mean"),
}  # fmt: skip
FAILS = {
  "contrastive": (contrast, "mean", r"dot_general \(.*test_linearity.py"),
  "balance of experts": (balance, "mean", "mul"),
  "masked mean": (lambda p, b: (losses(p, b) * b["mask"]).sum() / b["mask"].sum(), "mean", "div"),
  "logarithm of a mean": (lambda p, b: jnp.log(losses(p, b).mean()), "mean", "log"),
  "largest": (lambda p, b: losses(p, b).max(), "mean", "reduce_max|eq"),
  "sum with a penalty": (lambda p, b: losses(p, b).sum() + (p["w"] ** 2).sum(), "sum", "add"),
  "statistics": (lambda p, b: ((features(p, b) - features(p, b).mean(0)[None]) ** 2).mean(), "mean", ""),
  "order": (lambda p, b: (jnp.cumsum(features(p, b), 0) ** 2).mean(), "mean", "cumsum"),
  "zeros over the first example": (
    lambda p, b: jax.lax.dynamic_update_slice(losses(p, b), jnp.zeros((1, 3)), (0, 0)).mean(), "mean",
    "dynamic_update_slice"),
  "zeros over the examples of one part": (
    lambda p, b: jax.lax.dynamic_update_slice(losses(p, b), jnp.zeros((ROWS, 3)), (0, 0)).mean(), "mean",
    "dynamic_update_slice"),
  "zeros over rows that examples name": (
    lambda p, b: (
      (p["w"].ravel().at[abs(5 * b["x"][:, 0, 0]).astype(int)].set(0.0) ** 2).sum() + losses(p, b).mean()
    ),
    "mean",
    "scatter|iota",
  ),
  "neighbours": (lambda p, b: (features(p, b) * jnp.roll(features(p, b), 1, 0)).mean(), "mean", ""),
  "rule that looks at all cotangents": (clipped, "mean", ""),
  "another program for more rows": (
    lambda p, b: losses(p, b).mean() * (1.0 if len(b["x"]) > ROWS else p["w"].sum()), "mean",
    "depends on the number of examples"),
}  # fmt: skip


def read(loss, how, rows=ROWS, parts=PARTS):
  traces = [jax.make_jaxpr(loss)(WEIGHTS, inputs(n)) for n in (rows, rows * parts)]
  splits = [False] * len(WEIGHTS) + [True] * len(inputs(1))
  found, _, why = factors(*traces, parts, splits, [how])
  return found * len(WEIGHTS), why


def difference(loss, how, scales=(1.0, 1.0), rows=ROWS, parts=PARTS, seed=0):
  """Between the gradients of a batch and those of its parts, relative to the largest."""
  whole = inputs(rows * parts, seed)
  each = [jax.tree.map(lambda x, n=n: x[n * rows : (n + 1) * rows], whole) for n in range(parts)]
  gradients = jax.jit(jax.grad(loss))
  wanted = gradients(WEIGHTS, whole)
  found = jax.tree.map(
    lambda *g: np.sum(g, 0) / (parts if how == "mean" else 1), *[gradients(WEIGHTS, x) for x in each]
  )
  found = [x * scale for x, scale in zip(jax.tree.leaves(found), scales, strict=True)]
  pairs = [*zip(jax.tree.leaves(wanted), found, strict=True)]
  return max(float(abs(a - b).max()) for a, b in pairs) / (1e-3 + max(float(abs(a).max()) for a, _ in pairs))


@pytest.mark.cases(3)
@pytest.mark.parametrize(("loss", "how"), FOLLOWS.values(), ids=FOLLOWS)
def test_sums_and_means_over_examples_follow_from_the_parts(loss, how):
  scales, why = read(loss, how)
  assert not why
  assert difference(loss, how, scales) < 1e-5


@pytest.mark.cases(5)
@pytest.mark.parametrize(("loss", "how", "message"), FAILS.values(), ids=FAILS)
def test_other_losses_do_not_and_the_operation_is_named(loss, how, message):
  assert difference(loss, how) > 1e-4
  _, found = read(loss, how)
  assert found.startswith(f"the loss is no {how} over its examples: ")
  assert re.search(message, found)


def test_a_rule_inside_a_shard_map_is_not_followed_and_says_so():
  """Its derivative cannot be traced without the `shard_map`: it was a NameError of jax."""
  _, found = read(summed_by_rule, "mean")
  assert re.search(r"the loss is no mean over its examples: .*(custom_vjp_call|call_hi_primitive)", found)


UNARY = {
  "tanh": jnp.tanh, "softmax": jax.nn.softmax, "product": lambda x, p: x @ p["w"],
  "over rows": lambda x: jnp.cumsum(x, 1), "swapped": lambda x: x.swapaxes(0, 1),
  "flat": lambda x: x.reshape(-1, 4).reshape(x.shape), "reversed": lambda x: x[:, ::-1],
  "added": lambda x: jnp.cumsum(x, 0), "sorted": lambda x: jnp.sort(x, 0),
  "centred": lambda x: x - x.mean(0, keepdims=True), "softmax over all": lambda x: jax.nn.softmax(x, 0),
  "rolled": lambda x: jnp.roll(x, 1, 0), "doubled": lambda x: jnp.concatenate([x, 2 * x], 0)[: x.shape[0]],
  "stacked": lambda x: jnp.concatenate([x, x**2], 0).reshape(2, *x.shape).sum(0),
  "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
  "where": lambda x: jnp.where(x > 0, x, 0.1 * x),
  "normed": lambda x: x / (1 + jnp.sqrt((x**2).sum(-1, keepdims=True))),
  "times the mean": lambda x: x * x.mean(), "plus one": lambda x: x + jnp.ones_like(x),
  "shifted": lambda x: jax.lax.pad(x, np.float32(0), ((1, -1, 0), (0, 0, 0), (0, 0, 0))),
  "first half set": lambda x: x.at[: x.shape[0] // 2].set(0.0),
  "first half added": lambda x: x.at[: x.shape[0] // 2].add(1.0),
  "first columns set": lambda x: x.at[:, :2].multiply(2.0),
  "pooled": lambda x: nnx.max_pool(x, (2,), (1,), "SAME"),
  "by its place": lambda x: x * jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None],
}  # fmt: skip
ENDS = {
  "mean": lambda x: x.mean(), "sum": lambda x: x.sum(), "mean of squares": lambda x: (x**2).mean(),
  "square of the mean": lambda x: x.mean() ** 2, "largest of each": lambda x: x.max(-1).mean(),
  "largest": lambda x: x.max(), "scaled sum": lambda x: x.sum() / x.shape[0],
  "sum of sums": lambda x: 3 * x.sum(0).sum() - x[:, 0].sum(),
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
  names=st.lists(st.sampled_from(sorted(UNARY)), min_size=0, max_size=4),
  end=st.sampled_from(sorted(ENDS)),
  how=st.sampled_from(["mean", "sum"]),
  seed=st.integers(0, 99),
)
def test_what_is_said_to_follow_does(names, end, how, seed):
  def loss(p, b):
    x = b["x"] @ p["w"]
    for name in names:
      x = UNARY[name](x, p) if name == "product" else UNARY[name](x)
    return ENDS[end](x) + 0.1 * (x.mean() if how == "mean" else x.sum()) * p["b"].sum()

  scales, why = read(loss, how)
  if not why:
    assert difference(loss, how, scales, seed=seed) < 1e-4


class Net(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.Linear(4, 4, rngs=rngs)

  def loss(self, of):
    return lambda model, batch: of({"w": model.layer.kernel[...], "b": model.layer.bias[...]}, batch)


def largest(p, b):
  """The mean of the 3 largest losses: a replica may have fewer examples of a microbatch."""
  return jax.lax.top_k(losses(p, b).mean(1), 3)[0].mean()


STEPS = {
  "largest": (largest, False),
  "mean": (lambda p, b: losses(p, b).mean(), True),
  "contrastive": (contrast, False),
  "balance": (lambda p, b: losses(p, b).mean() + balance(p, b), False),
  "masked mean": (FAILS["masked mean"][0], False),
  "sum": (lambda p, b: (losses(p, b).sum(), {"seen": b["mask"].sum()}), True),
  "perplexity beside the loss": (
    lambda p, b: (losses(p, b).mean(), {"p": jnp.exp(losses(p, b).mean())}),
    False,
  ),
  "weighted": (lambda p, b: nxp.weighted((losses(p, b) * b["mask"]).sum(), b["mask"].sum()), True),
  "weighted with a penalty": (lambda p, b: nxp.weighted(losses(p, b).sum() + (p["w"] ** 2).sum(), 18), False),
}


def planned(init, sizes, rate):
  mesh = nxp.make_mesh(sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])
  split = nxp.fsdp("fsdp", min_size=4) if "fsdp" in sizes else nxp.replicate()
  return nxp.plan(init, mesh, [nxp.LogicalRules(batch=tuple(sizes)), split], optimizer=optax.sgd(rate))


@pytest.mark.cases(2)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "fsdp": 2}], ids=str)
@pytest.mark.parametrize(("of", "once"), STEPS.values(), ids=STEPS)
def test_a_step_equals_one_device_with_the_same_microbatches(of, once, axes, parts):
  def trained(sizes):
    plan = planned(lambda: Net(nnx.Rngs(0)), sizes, 0.1)
    model, optimizer = placed(plan)
    step = nxp.train_step(model.loss(of), microbatches=parts)
    metrics = step(model, optimizer, nxp.shard_batch(inputs(16), plan))
    return {k: float(x) for k, x in metrics.items()}, np.asarray(model.layer.kernel[...]), step.reduction

  (metrics, kernel, _), (found, ours, how) = trained({"data": 1}), trained(axes)
  assert found == pytest.approx(metrics, rel=1e-5)
  np.testing.assert_allclose(ours, kernel, rtol=1e-5, atol=1e-6)
  assert how.startswith("once, after the scan, over data" if once else "in each microbatch: ")


class Drawing(nnx.Module):
  """Draws of one kind: masks of examples, noise, a mask for all of them, keys for each example or for all."""

  def __init__(self, rngs, kind):
    self.layer, self.kind, self.rngs = nnx.Linear(4, 4, rngs=rngs), kind, rngs
    self.dropout = nnx.Dropout(0.4, broadcast_dims=(0,) if kind == "shared" else (), rngs=rngs)

  def __call__(self, x):
    x = self.dropout(nnx.relu(self.layer(x)))
    if self.kind == "noise":
      x = x + 0.3 * self.rngs.noise.normal(x.shape)
    if self.kind == "keys":
      keys = jax.random.split(self.rngs.noise(), x.shape[0])
      x = x + jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(keys)
    if self.kind == "samples":
      keys = jax.random.split(self.rngs.noise(), 3)
      x = x + jax.vmap(lambda key: jax.random.uniform(key, x.shape))(keys).mean(0)
    return x


class Dropped(nnx.Module):
  def __init__(self, rngs, kind):
    self.parts = nnx.List([Drawing(rngs, kind) for _ in range(2)])

  def __call__(self, x):
    for part in self.parts:
      x = part(x)
    return x


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", [{}, {"remat": "full"}], ids=str)
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "fsdp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["dropout", "noise", "shared", "keys", "samples"])
@pytest.mark.parametrize("size", [16, 8])
def test_random_numbers_by_example_are_reduced_once_and_equal_one_device(kind, axes, options, size):
  def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

  def trained(sizes):
    plan = planned(lambda: Dropped(nnx.Rngs(0, noise=1, dropout=2), kind), sizes, 0.5)
    return run_steps(plan, loss, [inputs(size, seed) for seed in range(3)], microbatches=2, **options)

  wanted, found = trained({"data": 1}), trained(axes)
  assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
  single = kind == "keys" and size == 2 * axes["data"]  # one key and one example on each replica
  assert found.step.reduction.startswith("in each" if single else "once, after the scan, over data")
  state = lambda run: jax.tree.leaves(nnx.to_pure_dict(nnx.state(run.model, nnx.RngCount)))
  assert [int(x) for x in state(found)] == [int(x) for x in state(wanted)]


COUNTED = {
  "unbiased": (lambda p, b, n: losses(p, b).sum() / (3 * n - 1), False),
  "one more": (lambda p, b, n: losses(p, b).sum() / (3 * n + 1), False),
  "by roots": (lambda p, b, n: losses(p, b).sum() / n**0.5 / n**0.5, True),
  "exponent": (lambda p, b, n: ((losses(p, b) + 0.1) ** (1 + 1 / n)).mean(), False),
  "temperature": (lambda p, b, n: jnp.tanh(losses(p, b) * ((n - 1) / n)).mean(), False),
  "shift": (lambda p, b, n: jnp.tanh(losses(p, b) + (1 - 1 / n)).mean(), False),
  "penalty": (lambda p, b, n: losses(p, b).mean() + (p["w"] ** 2).sum() / (n - 1), False),
  "bfloat16": (lambda p, b, n: losses(p, b).astype(jnp.bfloat16).sum() * jnp.bfloat16(1 / n), True),
}


@pytest.mark.parametrize("rows", [16, 256, 4096])
@pytest.mark.parametrize(("of", "follows"), COUNTED.values(), ids=COUNTED)
def test_a_loss_with_the_number_of_examples_follows_only_where_it_does_exactly(of, follows, rows):
  loss = lambda p, b: of(p, b, len(b["x"]))
  scales, why = read(loss, "mean", rows=rows)
  assert bool(why) != follows
  if of is COUNTED["bfloat16"][0]:
    assert scales == [1.0, 1.0]
  elif follows:
    assert difference(loss, "mean", scales, rows=rows) < 1e-5


def test_numbers_that_are_rounded_may_differ_by_their_rounding():
  """A third and a ninth are no float32, so their ratio is not exactly 3."""
  times = lambda factor: lambda p, b: losses(p, b).sum() * np.float32(factor / len(b["x"]))
  scales, why = read(times(1.0), "mean", parts=3)
  assert not why
  assert difference(times(1.0), "mean", scales, parts=3) < 1e-5
  _, why = read(lambda p, b: losses(p, b).sum() * np.float32(1 / (len(b["x"]) + 1e-4)), "mean", parts=3)
  assert "depends on the number of examples" in why


def test_parameters_that_cannot_be_compared_are_not_the_same():
  eqn = lambda value: types.SimpleNamespace(params={"sizes": value})
  assert linearity._same_parameters(eqn((1, 2)), eqn((1, 2)))
  assert not linearity._same_parameters(eqn((1, 2)), eqn((1, 3)))
  assert not linearity._same_parameters(eqn(np.arange(2)), eqn(np.arange(2)))
