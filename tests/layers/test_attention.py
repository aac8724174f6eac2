"""Attention of models that nobody wrote for this package, computed by blocks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders, others
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_options

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 13, 18, 4, 8
RANDOM = np.random.default_rng(0)
Q, K, V, K2, V2 = (
  RANDOM.normal(size=(BATCH, length, heads, WIDTH)).astype(np.float32)
  for length, heads in ((QUERIES, 4), (KEYS, 4), (KEYS, 4), (KEYS, 2), (KEYS, 2))
)
PADDING = np.arange(KEYS)[None] < np.array([[18], [11]])
BIAS = RANDOM.normal(size=(HEADS, QUERIES, KEYS)).astype(np.float32)
TABLE = RANDOM.normal(size=(40, HEADS)).astype(np.float32)

pytestmark = pytest.mark.usefixtures("as_users_have_it")
causal = lambda: jnp.arange(QUERIES)[:, None] + KEYS - QUERIES >= jnp.arange(KEYS)[None]


def attend(q, k, v, change=lambda s: s, weights=lambda w: w, softmax=jax.nn.softmax):
  scores = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5)
  return jnp.einsum("bhqk,bkhd->bqhd", weights(softmax(scores)), v)


def by_hand(s):
  e = jnp.exp(s - s.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def reciprocal(s):
  e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
  return e * (1 / e.sum(-1, keepdims=True))


def in_bfloat16(q, k, v):
  q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
  return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v).astype(jnp.float32)


def five_dims(q, k, v):
  q = q.reshape(BATCH, QUERIES, 2, 2, WIDTH)
  w = jax.nn.softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * WIDTH**-0.5)
  return jnp.einsum("bhgqk,bkhd->bqhgd", w, v)


def five_dims_merged(q, k, v):
  q = q.reshape(BATCH, QUERIES, 2, 2, WIDTH)
  s = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).reshape(BATCH, HEADS, QUERIES, KEYS)
  w = jax.nn.softmax(jnp.where(causal(), s, -1e9)).reshape(BATCH, 2, 2, QUERIES, KEYS)
  return jnp.einsum("bhgqk,bkhd->bqhgd", w, v)


def relative(q, k, v, table):
  distance = jnp.arange(QUERIES)[:, None] - jnp.arange(KEYS)[None] + KEYS
  return attend(q, k, v, lambda s: s + table[distance].transpose(2, 0, 1)[None])


def bias_in_one_dim(q, k, v, bias):
  return attend(q, k, v, lambda s: s + bias.reshape(HEADS, QUERIES, KEYS))


def softmax_first_dim(q, k, v):
  w = jax.nn.softmax(jnp.einsum("bqhd,bkhd->kbhq", q, k), axis=0)
  return jnp.einsum("kbhq,bkhd->bqhd", w, v)


def image_keys(q, k, v):
  k, v = (x.reshape(BATCH, 3, 6, HEADS, WIDTH) for x in (k, v))
  s = jnp.einsum("bqhd,bxyhd->bhqxy", q, k)
  return jnp.einsum("bhqxy,bxyhd->bqhd", jax.nn.softmax(s, axis=(-2, -1)), v)


def scanned(q, k, v):
  def body(x, _):
    change = lambda s: jnp.where(causal() & PADDING[:, None, None], s, -1e9)
    return x + jax.checkpoint(functools.partial(attend, change=change))(x, k, v), None

  return jax.lax.scan(body, q, length=2)[0]


def window(s):
  near = jnp.abs(jnp.arange(QUERIES)[:, None] - jnp.arange(KEYS)[None]) < 4
  return jnp.where(causal() & near & PADDING[:, None, None], s, -1e9)


CASES = {
  "plain": (attend, Q, K, V),
  "relative bias": (relative, Q, K, V, TABLE),
  "bias with rows and columns in one dim": (bias_in_one_dim, Q, K, V, BIAS.reshape(HEADS, -1)),
  "by hand": (functools.partial(attend, softmax=by_hand), Q, K, V),
  "mask after": (functools.partial(attend, weights=lambda w: jnp.where(causal(), w, 0.0)), Q, K, V),
  "weighted after": (lambda q, k, v, b: attend(q, k, v, weights=lambda w: w * b), Q, K, V, BIAS),
  "bfloat16": (in_bfloat16, Q, K, V),
  "five dims": (five_dims, Q, K2, V2),
  "five dims merged": (five_dims_merged, Q, K2, V2),
  "keys first": (softmax_first_dim, Q, K, V),
  "keys of an image": (image_keys, Q, K, V),
  "checkpoints in a scan": (scanned, Q, K, V),
  "one head": (jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v), Q[:, :, 0], K[:, :, 0], V[:, :, 0]),
  "jax.nn": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=causal()[None, None]), Q, K2, V2),
  "jax.nn causal with bias": (
    lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, b[None], is_causal=True), Q, K, V, BIAS
  ),
  "jax.nn, nothing else": (jax.nn.dot_product_attention, Q, K2, V2),
  "nnx, nothing else": (nnx.dot_product_attention, Q, K, V),
  "nnx, causal": (lambda q, k, v: nnx.dot_product_attention(q, k, v, is_causal=True), Q, K, V),
  "nnx": (lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=causal()[None, None]), Q, K, V),
  "nnx with bias": (lambda q, k, v, b: nnx.dot_product_attention(q, k, v, bias=b[None]), Q, K, V, BIAS),
  "windowed": (functools.partial(attend, change=window), Q, K, V),
}  # fmt: skip


def loss_of(attention):
  loss = lambda arrays, direction: (attention(*arrays) * direction).sum()
  return loss


def largest(function, *args):
  """The most elements that an array of a program has."""
  return max(v.aval.size for eqn in equations(jax.make_jaxpr(function)(*args)) for v in eqn.outvars)


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", CASES)
def test_blocks_equal_the_whole(name):
  attention, *arrays = CASES[name]
  direction = RANDOM.normal(size=jax.eval_shape(attention, *arrays).shape).astype(np.float32)
  plain = loss_of(attention)
  blocks = nxp.with_layers(plain, attention=5)
  whole, expected = jax.jit(jax.value_and_grad(plain))(arrays, direction)
  value, found = jax.jit(jax.value_and_grad(blocks))(arrays, direction)
  close = {"rtol": 3e-2, "atol": 3e-2} if name == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
  np.testing.assert_allclose(value, whole, **close)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, expected)
  scores = BATCH * QUERIES * KEYS * (1 if name == "one head" else HEADS)
  assert largest(jax.grad(plain), arrays, direction) >= scores
  assert largest(jax.grad(blocks), arrays, direction) < scores


squares = lambda model, x: (model(x) ** 2).mean()
TOKENS = np.random.default_rng(0).integers(1, 64, (4, 14))
MODELS = {
  "llama": (lambda: decoders.Decoder(decoders.Config(depth=2), nnx.Rngs(0)), decoders.loss),
  "local and global": (lambda: decoders.Decoder(decoders.Config(depth=4, windows=(4, None)), nnx.Rngs(0)),
    decoders.loss),
  "experts": (lambda: decoders.Decoder(decoders.Config(depth=4, experts=4), nnx.Rngs(0)), decoders.loss),
  "encoder and decoder": (lambda: others.EncoderDecoder(nnx.Rngs(0), depth=2), squares),
  "bert": (lambda: others.Bert(nnx.Rngs(0), depth=2), squares),
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"remat": "full", "scan_layers": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_others(name, options):
  init, loss = MODELS[name]
  graphdef, state = nnx.split(init())

  def derived(loss):
    return jax.jit(jax.value_and_grad(lambda s: loss(nnx.merge(graphdef, s), TOKENS), allow_int=True))(state)

  whole, expected = derived(loss)
  value, found = derived(nxp.with_layers(loss, attention=5, **options))
  np.testing.assert_allclose(value, whole, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    if a.dtype == np.float32:
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_heads_and_examples_stay_split(kind):
  """Blocks need no collective that the whole does not need."""
  mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
  where = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
  args = [jax.device_put(np.tile(x, (4, 1, 1, 1)), where) for x in (Q, K, V)], 1.0
  plain = loss_of(functools.partial(attend, change=lambda s: jnp.where(causal(), s, -1e9)))
  counts: list[list[str]] = []
  values: list[float] = []
  with jax.set_mesh(mesh):
    for loss in (plain, nxp.with_layers(plain, attention=5)):
      program = jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
      kinds = r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\("
      counts.append(re.findall(kinds, program.as_text()))
      value, gradients = program(*args)
      values.append(float(value))
      assert all(x.sharding.is_equivalent_to(where, 4) for x in gradients)
  assert counts[0] == counts[1]
  np.testing.assert_allclose(values[0], values[1], rtol=1e-5)


def test_forward_mode_agrees():
  class Attention(nnx.Module):
    def __init__(self):
      self.q, self.k, self.v = nnx.Param(Q), nnx.Param(K), nnx.Param(V)

  loss = lambda model, x: (attend(model.q[...], model.k[...], model.v[...]) * x).sum()
  direction = np.linspace(-1, 1, Q.size, dtype=np.float32).reshape(Q.shape)
  assert nxp.check_gradients(Attention(), direction, nxp.with_layers(loss, attention=5))


def test_short_attention_stays_as_written():
  plain = loss_of(attend)
  blocks = nxp.with_layers(plain, attention="blockwise")
  args = [Q, K, V], np.float32(1)
  assert largest(blocks, *args) == largest(plain, *args)


def top_four(s):
  """Tiles round their scores in another way, so that one which equals the threshold may not be found."""
  return jnp.where(s < jax.lax.top_k(s, 4)[0][..., -1:], -jnp.inf, s)


def plus_one(s):
  e = jnp.exp(s - s.max(-1, keepdims=True))
  return e / (e.sum(-1, keepdims=True) + jnp.exp(-s.max(-1, keepdims=True)))


def without_max(s):
  return jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)


def sink_in_the_maximum_only(s):
  largest = jnp.maximum(s.max(-1, keepdims=True), jnp.full(s.shape[:-1], 9.3)[..., None])
  e = jnp.exp(s - largest)
  return e / e.sum(-1, keepdims=True)


def stopped(s):
  e = jnp.exp(s - s.max(-1, keepdims=True))
  return e / jax.lax.stop_gradient(e.sum(-1, keepdims=True))


def of_minus(s):
  e = jnp.exp(s - -s.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def by_log_softmax(s):
  return jnp.exp(jax.nn.log_softmax(s))


def with_sink(s):
  sink = jnp.broadcast_to(jnp.linspace(-1, 2, HEADS)[:, None, None], (*s.shape[:-1], 1))
  return jax.nn.softmax(jnp.concatenate([s, sink], -1))[..., :-1]


def divided_after(q, k, v):
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
  e = jnp.exp(scores - scores.max(-1, keepdims=True))
  return jnp.einsum("bhqk,bkhd->bqhd", e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


OTHER_FORMS = [
  (plus_one, "its weights are not exponentials over their sum"),
  (sink_in_the_maximum_only, "it does not subtract the maximum from its scores"),
  (without_max, "it does not subtract the maximum from its scores"),
  (of_minus, "it does not subtract the maximum from its scores"),
  (reciprocal, "its weights go through div -> float32[2,4,13,1]"),
  (by_log_softmax, "its weights are not exponentials over their sum"),
  (with_sink, "its weights go through slice"),
]


def others_too(q, k, v):
  """An attention, a router over experts, and an attention over features that is linear in the length."""
  x = attend(q, k, v)
  gates = jax.nn.softmax(x @ K[0, :WIDTH, 0])
  x = jnp.einsum("bqhe,bqhed->bqhd", gates, x[..., None] * V[0, :1, 0])
  features = jnp.exp(k - k.max(1, keepdims=True))
  x += (
    jnp.einsum("bqhd,bhde->bqhe", x, jnp.einsum("bkhd,bkhe->bhde", features, v))
    / features.sum((1, 3))[:, None, :, None]
  )
  return x


def test_each_attention_that_is_left_is_said():
  def mixed(q, k, v):
    return attend(attend(attend(q, k, v, softmax=without_max), k, v), k, v, softmax=with_maximum)

  assert line(loss_of(attend)) == line(loss_of(others_too)) == "attention by blocks of 5: 1 found"
  said = "attention by blocks of 5: 1 of 3 found; as written: softmax of float32[2,4,13,18]: it does not"
  assert line(loss_of(mixed)).startswith(said)
  both = lambda q, k, v: attend(q, k, v, lambda s: s, lambda w: jax.nn.softmax(w) - w)
  with pytest.raises(TrainError, match="its weights go through"):
    nxp.with_layers(loss_of(both), attention=5)([Q, K, V], np.float32(1))


def line(loss):
  used = LayersUsed()
  jax.eval_shape(with_options(loss, LayerOptions(attention=5), used), [Q, K, V], np.float32(1))
  return used.done[0]


def with_maximum(s):
  largest = jnp.maximum(s.max(-1, keepdims=True), 0.3)
  e = jnp.exp(s - largest)
  return e / (e.sum(-1, keepdims=True) + jnp.exp(0.3 - largest))


def test_weights_that_are_read_elsewhere_too():
  def loss(arrays, direction):
    q, k, v = arrays
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return (jnp.einsum("bhqk,bkhd->bqhd", weights, v) * direction).sum() + (weights * jnp.log(weights)).sum()

  assert "so all of them exist: softmax of float32[2,4,13,18]" in line(loss)


@pytest.mark.parametrize(
  ("attention", "reason"),
  [
    (lambda q, k, v: q * k[:, :QUERIES] * v[:, :QUERIES], "no softmax is followed by a product with values"),
    (
      functools.partial(attend, weights=lambda w: w * jax.random.bernoulli(jax.random.key(0), 0.9, w.shape)),
      "dropout is between it and its product",
    ),
    (functools.partial(attend, weights=lambda w: jnp.where(w > 0.1, w, 0)), "its weights go through gt"),
    (functools.partial(attend, weights=jnp.sqrt), "its weights go through sqrt -> float32[2,4,13,18]"),
    (
      functools.partial(attend, change=lambda s: jnp.cumsum(s, axis=-1)),
      "cumsum -> float32[2,4,13,18] cannot be evaluated by blocks",
    ),
    (functools.partial(attend, change=lambda s: s[..., :1] + s[:, :, :1]), "no product of queries and keys"),
    (
      functools.partial(attend, change=top_four),
      "lt -> bool[2,4,13,18] compares its scores with slice -> float32[2,4,13,1], which is computed",
    ),
    *[(functools.partial(attend, softmax=form), reason) for form, reason in OTHER_FORMS],
    (divided_after, "softmax of float32[2,4,13,18]: its exponentials meet dot_general"),
    (functools.partial(attend, softmax=stopped), "its weights go through stop_gradient -> float32[2,4,13,1]"),
  ],
  ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_no_attention_is_named(attention, reason):
  with pytest.raises(TrainError, match="finds no attention in the loss") as caught:
    nxp.with_layers(loss_of(attention), attention="blockwise")([Q, K, V], np.float32(1))
  assert reason in str(caught.value)
  assert "Fix: softmax(q k^T) v with dropout off" in str(caught.value)


def masked_rows(model, _):
  x = model["x"]
  scores = jnp.einsum("qd,kd->qk", x, x)
  mask = np.tril(np.ones((SIZE, SIZE), bool), -1)  # the first row sees nothing
  weights = jax.nn.softmax(scores, where=mask, axis=-1)
  return (jnp.where(mask, weights, 0) @ x).sum()


SIZE = 12
ROWS = np.random.default_rng(1).normal(size=(SIZE, 4)).astype(np.float32)


def test_rows_that_see_nothing_stay_zero():
  close(masked_rows, 5, 1e-5)


def close(loss, block, tolerance):
  both = loss, nxp.with_layers(loss, attention=block)
  plain, found = (jax.value_and_grad(f)({"x": ROWS}, None) for f in both)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, plain)


LOW = float(np.finfo(np.float32).min)
TWO_FILLS = {
  "added": lambda s, causal, padded: s + jnp.where(causal, 0, LOW) + jnp.where(padded, LOW, 0.0),
  "subtracted": lambda s, causal, padded: s - jnp.where(causal, 0, -LOW) - jnp.where(padded, -LOW, 0.0),
  "times": lambda s, causal, padded: s + (1.0 - causal) * LOW + (1.0 * padded) * LOW,
  "added and selected": lambda s, causal, padded: jnp.where(causal, s + jnp.where(padded, LOW, 0), -1e9),
  "other numbers": lambda s, causal, padded: jnp.where(causal, jnp.where(padded, -1e30, s), -1e9),
  "one sum": lambda s, causal, padded: s + (jnp.where(causal, 0, -1e9) + jnp.where(padded, -1e9, 0)),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("fill", TWO_FILLS.values(), ids=TWO_FILLS)
def test_rows_that_see_nothing_behind_two_masks_are_as_written(fill):
  def loss(model, _):
    q, k, v = (jnp.sin(model["x"] * n) for n in (1, 2, 3))
    i = jnp.arange(SIZE)
    scores = fill(q @ k.T, i[:, None] >= i[None], i[None] < 3)  # a prompt with 3 of padding on the left
    return (jax.nn.softmax(scores) @ v * jnp.arange(1.0, SIZE + 1)[:, None]).sum()

  close(loss, 4, 1e-4)


def test_printing_and_a_constant_exponential_beside_attention():
  def loss(model, _):
    x = model["x"]
    jax.debug.print("{}", x.sum())
    weights = jax.nn.softmax(jnp.einsum("qd,kd->qk", x, x))
    return (weights @ x).sum() * jax.lax.exp(0.5)

  close(loss, 5, 1e-5)


LENGTH = 64


def late(away, dim):
  return jax.lax.broadcasted_iota(jnp.int32, away.shape, dim) >= 32


MASKS = {
  "none": (lambda away: None, 1.0),
  "causal": (lambda away: away >= 0, 36 / 64),
  "window": (lambda away: (away >= 0) & (away < 8), 15 / 64),
  "both sides": (lambda away: abs(away) < 8, 22 / 64),
  "chunks": (lambda away: late(away, 0) == late(away, 1), 32 / 64),
}


def masked(mask, form):
  """Attention with a mask in a form that models have."""

  def attention(q, k, v, padding):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    seen = mask(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None])
    if seen is not None and form == "added":
      scores = scores + jnp.where(seen, 0, -1e9)
    elif seen is not None:
      scores = jnp.where(seen & padding[:, None, None], scores, -1e9 if form == "padded" else -jnp.inf)
    return (jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v) ** 2).sum()

  return attention


def product_flops(jaxpr):
  """Multiplications and additions of the products of a program, times the lengths of its scans."""
  total = 0
  for eqn in jaxpr.eqns:
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    inner = [
      getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns"))
    ]
    total += times * sum(product_flops(x) for x in inner if hasattr(x, "eqns"))
    if eqn.primitive.name == "dot_general":
      (summed, _), _ = eqn.params["dimension_numbers"]
      shape = eqn.invars[0].aval.shape
      total += 2 * eqn.outvars[0].aval.size * int(np.prod([shape[d] for d in summed]))
  return total


@pytest.mark.cases(8)
@pytest.mark.parametrize("form", ["infinite", "padded", "added"])
@pytest.mark.parametrize("name", MASKS)
def test_tiles_that_a_mask_hides_are_not_computed(name, form):
  mask, part = MASKS[name]
  q, k, v = np.random.default_rng(0).normal(size=(3, 2, LENGTH, 2, 4)).astype(np.float32)
  padding = np.arange(LENGTH)[None] >= np.array([[0], [19]])  # the first rows see nothing at all
  padding = padding if form == "padded" else np.ones_like(padding)

  def changed(attention):
    run = nxp.with_layers(lambda x, _: attention(*x, padding), attention=8)
    return lambda *x: run(x, None)

  found = changed(masked(mask, form))
  every = changed(masked(MASKS["none"][0], form))
  for change in (lambda f: f, lambda f: jax.value_and_grad(f, (0, 1, 2))):
    counts = [product_flops(jax.make_jaxpr(change(f))(q, k, v).jaxpr) for f in (found, every)]
    assert counts[0] <= counts[1] * part + 4 * q.size  # and a mean of the values


class Masked(nnx.Module):
  """A layer that is an attention, with a mask that the model made."""

  def __init__(self, rngs):
    self.scale = nnx.Param(jax.random.normal(rngs.params(), (1, 4)))

  def __call__(self, x, mask):
    scores = jnp.einsum("bqd,bkd->bqk", x * self.scale, x)
    scores = scores + mask if jnp.issubdtype(mask.dtype, jnp.floating) else jnp.where(mask, scores, -1e9)
    return x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)


class Handed(nnx.Module):
  """Two layers, which receive one mask, or two in turn."""

  def __init__(self, way, form):
    self.way, self.form, rngs = way, form, nnx.Rngs(0)
    if way == "scan":
      self.layers = nnx.vmap(Masked)(rngs.split(2))
    else:
      self.layers = nnx.List(Masked(rngs) for _ in range(2))

  def __call__(self, x, mask):
    away = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None]
    seen = (away == away) if mask(away) is None else mask(away)
    seen = jnp.where(seen, 0.0, -1e9) if self.form == "added" else seen
    if self.way == "scan":
      scan = nnx.scan(lambda x, layer, seen: layer(x, seen), in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
      return scan(x, self.layers, seen)
    for number, layer in enumerate(self.layers):
      later = jnp.where(away > 0, 0.0, -1e9) if self.form == "added" else away > 0
      own = later if self.way == "in turn" and number % 2 else seen
      x = nnx.remat(Masked.__call__)(layer, x, own) if self.way == "nnx.remat" else layer(x, own)
    return x


@pytest.mark.slow
@pytest.mark.cases(5)
@pytest.mark.parametrize("form", ["selected", "added"])
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("way", ["remat", "scanned", "nnx.remat", "scan", "in turn"])
def test_a_mask_that_layers_receive_hides_the_same_tiles(way, name, form):
  model, x = Handed(way, form), np.random.default_rng(1).normal(size=(2, LENGTH, 4)).astype(np.float32)
  options = {"remat": {"remat": "full"}, "scanned": {"remat": "full", "scan_layers": True}}.get(way, {})
  mask, part = MASKS[name]

  def gradients(mask, **options):
    run = nxp.with_layers(lambda model, x: (model(x, mask) ** 2).mean(), **options)
    return lambda model, x: nnx.value_and_grad(run)(model, x)

  found = gradients(mask, attention=8, **options)
  every = gradients(MASKS["none"][0], attention=8, **options)
  counts = [product_flops(jax.make_jaxpr(nnx.jit(f))(model, x).jaxpr) for f in (found, every)]
  assert counts[0] <= counts[1] * (1.0 if way == "in turn" else part + 0.02)
  pairs = zip(*(jax.tree.leaves(nnx.jit(f)(model, x)) for f in (found, gradients(mask))), strict=True)
  for one, other in pairs:
    np.testing.assert_allclose(one, other, atol=2e-5 * abs(other).max())


def _masked(sees, fill, after=lambda scores, i, j: scores):
  def loss(arrays, direction):
    q, k, v = arrays
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, d) for d in (1, 2))
    weights = jax.nn.softmax(after(jnp.where(sees(i, j), scores, fill), i, j))
    return (jnp.einsum("bqk,bkd->bqd", weights, v) * direction).sum()

  return loss


@pytest.mark.parametrize(
  ("rows", "columns", "block", "loss"),
  [
    (64, 16, 8, _masked(lambda i, j: (i >= j) & (i - j < 8), -1e30)),
    (516, 516, 128, _masked(lambda i, j: (i - j).astype(jnp.bfloat16) >= -256, -1e30)),
    (40, 40, 8, _masked(
      lambda i, j: i >= j, -1e4, lambda s, i, j: jnp.where((i < 16) & (j < 16) & (i >= j), -1e9, s)
    )),
    (40, 40, 8, _masked(lambda i, j: i >= j, -1e30, lambda s, i, j: s - 1e9)),
  ],
  ids=["whole blocks of rows see nothing", "positions in bfloat16",
       "two numbers hide", "a number added to every score"],
)  # fmt: skip
def test_what_a_mask_of_positions_hides_is_what_the_model_hides(rows, columns, block, loss):
  rng = np.random.default_rng(0)
  *given, direction = (
    jnp.asarray(rng.normal(size=(2, n, 8)).astype(np.float32)) for n in (rows, columns, columns, rows)
  )
  with jax.numpy_dtype_promotion("standard"):
    plain = jax.jit(jax.value_and_grad(loss))(given, direction)
    found = jax.jit(jax.value_and_grad(nxp.with_layers(loss, attention=block)))(given, direction)
  np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
  for ours, theirs in zip(found[1], plain[1], strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
