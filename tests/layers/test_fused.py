"""Attention found in a model, computed by a fused kernel.

The kernel of TPUs is interpreted here; of the kernel of GPUs, the call is tested with XLA's implementation.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders
from nnx_parallel.attention import kernels, masks
from nnx_parallel.attention.kernels import cudnn_attention
from nnx_parallel.attention.softmaxes import NotFused
from nnx_parallel.attention.tiling import order
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_options
from training import run_steps

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 128, 256, 4, 8
RANDOM = np.random.default_rng(0)
Q, K, V, K2, V2 = (
  RANDOM.normal(size=(BATCH, length, heads, WIDTH)).astype(np.float32)
  for length, heads in ((QUERIES, 4), (KEYS, 4), (KEYS, 4), (KEYS, 2), (KEYS, 2))
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, as_users_have_it):
  """The kernel of this platform is the interpreted one."""
  kernel = functools.partial(kernels.splash_attention, interpret=True)
  monkeypatch.setitem(kernels.KERNELS, "cpu", kernel)


def causal(more=0):
  return jnp.arange(QUERIES)[:, None] + more >= jnp.arange(KEYS)[None]


def attend(q, k, v, change=lambda s: s, softmax=jax.nn.softmax):
  scores = change(jnp.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5)
  return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)


def groups(q, k, v):
  q = q.reshape(BATCH, QUERIES, 2, 2, WIDTH)
  scores = jnp.where(causal(), jnp.einsum("bqhgd,bkhd->bhgqk", q, k) * 0.3, -1e30)
  return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v).reshape(Q.shape)


def repeated(q, k, v):
  return attend(q, *(jnp.repeat(x, 2, axis=2) for x in (k, v)), lambda s: jnp.where(causal(), s, -jnp.inf))


def window(s):
  return jnp.where(causal(9), jnp.where(causal(), -1e9, s), -1e9)


def soft_cap(s):
  return jnp.where(causal(), 3 * jnp.tanh(s / 3), -1e9)


def by_hand(s):
  e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
  return e / e.sum(-1, keepdims=True)


def learned(scale):
  return lambda q, k, v: attend(q, k, v, lambda s: s * scale[:, None, None])


CASES = {
  "all keys": (attend, Q, K, V),
  "causal": (lambda q, k, v: attend(q, k, v, lambda s: jnp.where(causal(), s, -1e9)), Q, K, V),
  "window": (functools.partial(attend, change=window), Q, K, V),
  "soft cap": (functools.partial(attend, change=soft_cap, softmax=by_hand), Q, K, V),
  "row without keys": (lambda q, k, v: attend(q, k, v, lambda s: jnp.where(causal(-1), s, -1e9)), Q, K, V),
  "groups": (groups, Q, K2, V2),
  "repeated heads": (repeated, Q, K2, V2),
  "jax.nn": (functools.partial(jax.nn.dot_product_attention, is_causal=True), Q, K2, V2),
  "flax": (lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=causal()[None, None]), Q, K, V),
}


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_whole(name):
  attention, *arrays = CASES[name]
  model = nnx.Dict({n: nnx.Param(jnp.asarray(x)) for n, x in zip("qkv", arrays, strict=True)})
  loss = lambda model, factor: (attention(model["q"][...], model["k"][...], model["v"][...]) * factor).sum()
  factor = RANDOM.normal(size=Q.shape).astype(np.float32)
  changed = nxp.with_layers(loss, attention="fused")
  jaxpr = jax.make_jaxpr(changed)(model, factor)
  assert sum(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr.jaxpr)) == 1
  assert max(v.aval.size for eqn in _outside(jaxpr) for v in eqn.outvars) <= max(K.size * 16, QUERIES * KEYS)
  plain, found = (nnx.jit(nnx.value_and_grad(f))(model, factor) for f in (loss, changed))
  np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
  for key in "qkv":
    np.testing.assert_allclose(found[1][key][...], plain[1][key][...], rtol=1e-4, atol=1e-5)


def _outside(jaxpr):
  return [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "shard_map"] or jaxpr.eqns


LONG = tuple(RANDOM.normal(size=(BATCH, KEYS, heads, WIDTH)).astype(np.float32) for heads in (4, 2, 2))
KINDS = {
  "tpu": functools.partial(kernels.splash_attention, interpret=True),
  "gpu": functools.partial(cudnn_attention, implementation="xla"),
}
SEQUENCES = {
  "causal": lambda ahead: ahead >= 0, "all": lambda ahead: ahead > -KEYS,
  "window": lambda ahead: (ahead >= 0) & (ahead < 40), "on both sides": lambda ahead: abs(ahead) < 40,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", SEQUENCES)
def test_a_kernel_makes_the_mask_of_a_rule(kind, rule, monkeypatch):
  """Only a mask of another rule is an array."""
  given = []
  monkeypatch.setitem(kernels.KERNELS, "cpu", lambda *xs: given.append(xs[3]) or KINDS[kind](*xs))

  def loss(arrays, factor):
    seen = SEQUENCES[rule](jnp.arange(KEYS)[:, None] - jnp.arange(KEYS))
    return (jax.nn.dot_product_attention(*arrays, mask=seen[None, None]) * factor).sum()

  factor = RANDOM.normal(size=LONG[0].shape).astype(np.float32)
  fused = nxp.with_layers(loss, attention="fused")
  plain, found = (jax.jit(jax.value_and_grad(f))(LONG, factor) for f in (loss, fused))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  causal, window, mask = (getattr(given[0], name) for name in ("causal", "window", "mask"))
  assert (causal, window) == (rule in ("causal", "window"), None if rule in ("causal", "all") else 40)
  assert mask is None


RULES = {
  "causal": (lambda r, c: r >= c, masks.Seen(causal=True, window=None)),
  "strictly causal": (lambda r, c: r > c, None),
  "one too many": (lambda r, c: r + 1 >= c, None),
  "all": (lambda r, c: r + 1000 > c, masks.Seen(causal=False, window=None)),
  "window": (lambda r, c: (r >= c) & (r - c < 33), masks.Seen(causal=True, window=33)),
  "on both sides": (lambda r, c: abs(r - c) < 33, masks.Seen(causal=False, window=33)),
  "more ahead": (lambda r, c: (r - c < 33) & (c - r < 34), None),
  "but one": (lambda r, c: (r >= c) & ((r != 200) | (c != 190)), None),
  "but one key": (lambda r, c: (r >= c) & (c != 190), None),
  "chunks": (lambda r, c: (r >= c) & (r // 64 == c // 64), None),
  "no first row": (lambda r, c: (r >= c) & (r > 0), None),
  "of halves": (lambda r, c: jnp.float32(0.5) * (r - c) + 8 > 7.75, masks.Seen(causal=True, window=None)),
  "of floats": (lambda r, c: r.astype(jnp.float32) >= c, masks.Seen(causal=True, window=None)),
}  # fmt: skip


@pytest.mark.parametrize("length", [128, 300])
@pytest.mark.parametrize("name", RULES)
def test_the_rule_of_a_mask(name, length):
  rule, seen = RULES[name]
  jaxpr = jax.make_jaxpr(lambda: rule(jnp.arange(length)[:, None], jnp.arange(length)[None]))().jaxpr
  tiles = [(jaxpr.outvars[0], order([("r", 0, 1), ("c", 1, 1)]), True)]
  found = masks.seen_by(jaxpr, tiles, {"r": length, "c": length}, "r", "c")
  at = np.arange(length)
  dense = np.broadcast_to(rule(at[:, None], jnp.asarray(at)[None]), (length, length))
  assert found == (seen if length == 300 or "but one" not in name else masks.Seen(causal=True, window=None))
  if found is not None:
    behind = at[:, None] - at
    wanted = (behind >= 0) if found.causal else abs(behind) < (found.window or length)
    np.testing.assert_array_equal(dense, wanted & (behind < (found.window or length)))


def test_what_cudnn_lacks():
  """cuDNN itself refuses here, as it is not installed."""
  q, kv = jnp.ones((1, 2, 2, 8, 4)), jnp.ones((1, 2, 8, 4))
  for options, reason in (({"cap": 3.0}, "soft cap"), ({}, "cuDNN:")):
    with pytest.raises(NotFused, match=reason):
      cudnn_attention(q, kv, kv, kernels.Terms(scale=1.0, **options))


def exponentials(over, shift=lambda s: s.max(-1, keepdims=True)):
  def softmax(s):
    e = jnp.exp(s - jax.lax.stop_gradient(shift(s)))
    return over(e)

  return softmax


SQUARE = np.arange(KEYS)[:, None] >= np.arange(KEYS)[None]


def another_maximum(s):
  e = jnp.exp(jnp.where(SQUARE, s, -1e9) - s.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def of_heads(s):
  return jnp.where((jnp.arange(HEADS)[:, None, None] < 1) | causal(), s, -1e9)


def of_examples(s):
  return jnp.where(jnp.arange(KEYS) < jnp.arange(BATCH)[:, None, None, None] * 60 + 60, s, -1e9)


def in_part(e):
  return e / jnp.where(SQUARE, e, 0).sum(-1, keepdims=True)


STRANGE = {
  "no gradient": {"change": lambda s: jax.lax.stop_gradient(s) * 0.5},
  "mask of a head": {"change": of_heads},
  "mask of an example": {"change": of_examples},
  "another maximum": {"softmax": another_maximum},
  "another sum": {"softmax": exponentials(lambda e: e / (e * 2).sum(-1, keepdims=True))},
  "a part of the sum": {"softmax": exponentials(in_part)},
  "sum over queries": {"softmax": exponentials(lambda e: e / e.swapaxes(-1, -2).sum(-1)[..., None])},
  "sum along keys": {"softmax": exponentials(lambda e: e / e.sum(-1)[..., None, :])},
  "divided": {"softmax": lambda s: jax.nn.softmax(s) / 2},
  "two fills": {"change": lambda s: jnp.where(causal(), jnp.where(jnp.arange(KEYS) >= 4, s, -1e5), -1e9)},
  "factor of a fill": {"change": lambda s: jnp.where(causal(), s, -1e9) * -0.5},
  "small fill": {"change": lambda s: jnp.where(causal(), s, -1e4) * 1e-4},
  "integers": {"change": lambda s: (s * 4).astype(jnp.int32).astype(jnp.float32)},
  "mask in a cap": {"change": lambda s: 3 * jnp.tanh(jnp.where(causal(), s, -1e9) / 3)},
}  # fmt: skip

REFUSED = {"sum over queries", "sum along keys"}


@pytest.mark.parametrize(
  ("name", "attention"),
  [*((name, "fused") for name in STRANGE), ("mask of a head", 64), ("a part of the sum", 64)],
)
def test_what_only_looks_like_it_keeps_its_value(name, attention):
  queries = K[::-1] if "softmax" in STRANGE[name] else Q
  model = nnx.Dict({n: nnx.Param(jnp.asarray(x)) for n, x in zip("qkv", (queries, K, V), strict=True)})

  def loss(model, factor):
    return (attend(model["q"][...], model["k"][...], model["v"][...], **STRANGE[name]) * factor).sum()

  factor = RANDOM.normal(size=queries.shape).astype(np.float32)
  changed = nnx.jit(nnx.value_and_grad(nxp.with_layers(loss, attention=attention)))
  if name in REFUSED:
    with pytest.raises(nxp.errors.TrainError, match="finds no attention in the loss"):
      changed(model, factor)
    return
  plain, found = nnx.jit(nnx.value_and_grad(loss))(model, factor), changed(model, factor)
  np.testing.assert_allclose(found[0], plain[0], rtol=1e-4, atol=1e-4)
  for key in "qkv":
    np.testing.assert_allclose(found[1][key][...], plain[1][key][...], rtol=1e-3, atol=1e-4)


def test_one_query_goes_by_blocks():
  def loss(arrays, length):
    q, k, v = arrays
    scores = jnp.where(jnp.arange(KEYS) < length, jnp.einsum("bhd,bkhd->bhk", q[:, 0], k), -1e9)
    return jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(scores), v).sum()

  with pytest.raises(nxp.errors.TrainError, match="finds no attention"):
    jax.jit(nxp.with_layers(loss, attention="fused"))((Q, K, V), 60)


BIAS = RANDOM.normal(size=(HEADS, QUERIES, KEYS)).astype(np.float32)
PADDING = np.arange(KEYS)[None] < np.array([[256], [150]])
OTHERS = {
  "examples": (
    lambda q, k, v: attend(q, k, v, lambda s: jnp.where(PADDING[:, None, None], s, -1e9)),
    "differs between examples",
  ),
  "heads": (lambda q, k, v: attend(q, k, v, of_heads), "differs between heads"),
  "bias": (lambda q, k, v: attend(q, k, v, lambda s: s + BIAS), "a bias is added"),
  "scales": (learned(jnp.ones(HEADS)), "its scores go through mul"),
  "length": (lambda q, k, v: attend(q[:, :100], k, v), "100 queries and 256 keys are not multiples of 128"),
}


def fused_of(loss, *args):
  """The value of a loss with its attention by the kernel, and what was done."""
  used = LayersUsed()
  value = jax.jit(with_options(loss, LayerOptions(attention="fused"), used))(*args)
  return value, str(used)


@pytest.mark.parametrize("name", OTHERS)
def test_another_form_goes_by_blocks(name):
  attention, reason = OTHERS[name]
  loss = lambda q, k, v: attention(q, k, v).sum() + attend(q, k, v).sum()
  value, done = fused_of(loss, Q, K, V)
  np.testing.assert_allclose(value, loss(Q, K, V), rtol=1e-4)
  assert reason in done
  assert "attention by the fused kernel: 1 of 2 found" in done


LOW = float(np.finfo(np.float32).min)
DOCUMENTS = np.sort(np.random.default_rng(3).integers(0, 3, (BATCH, KEYS))).astype(np.int32)
SLOPES = np.linspace(0.1, 1, HEADS, dtype=np.float32)


def square(seen=lambda r, c: r >= c):
  return seen(jnp.arange(KEYS)[:, None], jnp.arange(KEYS)[None])


def same_document():
  ids = jax.lax.optimization_barrier(jnp.asarray(DOCUMENTS))  # as if it came with the batch
  return ids[:, :, None] == ids[:, None]


REACH = {  # the kernels that compute it
  "added": (lambda s, b: s + jnp.where(square(), 0, -1e9), ("tpu", "gpu")),
  "added, a row sees nothing": (lambda s, b: s + (1.0 - square(lambda r, c: r > c)) * LOW, ()),
  "times a low number": (lambda s, b: s + jnp.where(~square(), LOW, 0.0), ("tpu", "gpu")),
  "window on both sides": (lambda s, b: s + ~square(lambda r, c: abs(r - c) < 40) * -1e30, ("tpu", "gpu")),
  "documents": (lambda s, b: jnp.where((square() & same_document())[:, None], s, -1e9), ("tpu", "gpu")),
  "documents that do not see themselves": (
    lambda s, b: jnp.where((same_document() & ~square())[:, None], s, -1e9), ("gpu",)
  ),
  "examples": (
    lambda s, b: jnp.where((np.arange(KEYS) < [[200], [3]])[:, None, None] & square(), s, -1e9), ("gpu",)
  ),
  "examples see nothing": (
    lambda s, b: jnp.where((DOCUMENTS > 1)[:, None, None] & square(), s, -1e9), ("gpu",)
  ),
  "bias": (lambda s, b: s + b, ("gpu",)),
  "bias inside a mask": (lambda s, b: jnp.where(square(), 0.3 * (b[:1] + s), -1e9), ("gpu",)),
  "bias and an added mask": (lambda s, b: s + b + jnp.where(square(), 0, LOW), ("gpu",)),
  "bias of keys": (lambda s, b: s + b[:, :1], ("gpu",)),
  "bias of examples": (lambda s, b: s + jnp.stack([b, 2 * b]), ("gpu",)),
  "linear biases": (lambda s, b: s - SLOPES[:, None, None] * abs(square(lambda r, c: r - c)), ()),
  "bias outside of a mask": (lambda s, b: jnp.where(square(lambda r, c: r > c), s, -1e9) + b, ()),
  "two added masks": (
    lambda s, b: s + jnp.where(square(), 0, LOW) + jnp.where(PADDING[:, None, None], 0, LOW), ()
  ),
}  # fmt: skip


@pytest.mark.cases(6)
@pytest.mark.parametrize(
  ("name", "kind"),
  [(name, kind) for kind in ("gpu", "tpu") for name in REACH if kind == "gpu" or "tpu" in REACH[name][1]],
)
def test_masks_biases_and_documents_reach_the_kernel(name, kind, monkeypatch):
  monkeypatch.setitem(kernels.KERNELS, "cpu", KINDS[kind])
  change, kinds = REACH[name]
  loss = lambda arrays, bias, factor: (attend(*arrays, lambda s: change(s, bias)) * factor).sum()
  draw = np.random.default_rng(4).normal
  arrays = [draw(size=(BATCH, KEYS, HEADS, WIDTH)).astype(np.float32) for _ in range(3)]
  bias, factor = draw(size=(HEADS, KEYS, KEYS)).astype(np.float32), draw(size=K.shape).astype(np.float32)
  used = LayersUsed()
  fused = with_options(loss, LayerOptions(attention="fused"), used)
  plain, found = (jax.jit(jax.value_and_grad(f, (0, 1)))(arrays, bias, factor) for f in (loss, fused))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  assert ("by the fused kernel: 1 of 1" in str(used)) == (kind in kinds), str(used)


CONFIG = decoders.Config(vocab=64, width=32, heads=4, kv_heads=2, head_dim=8, hidden=32, depth=2)
TOKENS = np.random.default_rng(1).integers(0, 64, (8, 129)).astype(np.int32)
decoder = lambda: decoders.Decoder(CONFIG, nnx.Rngs(0))


@functools.cache
def plain_losses():
  model, step = decoder(), nxp.train_step(decoders.loss)
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  return [float(step(model, optimizer, TOKENS)["loss"]) for _ in range(2)]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"remat": "full", "scan_layers": True}, {"microbatches": 2}], ids=str)
def test_a_step_on_a_mesh(options):
  mesh, rules = nxp.make_mesh(data=2, fsdp=2, tensor=2), nxp.LogicalRules(batch=("data", "fsdp"))
  plan = nxp.plan(decoder, mesh, [rules, nxp.fsdp(min_size=0)], optimizer=optax.sgd(0.1))
  _, _, losses, step = run_steps(plan, decoders.loss, [TOKENS] * 2, attention="fused", **options)
  np.testing.assert_allclose(losses, plain_losses(), rtol=1e-5)
  assert "attention by the fused kernel: 2 of 2 found" in str(step.layers)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kinds", [("Auto", "Auto"), ("Explicit", "Explicit"), ("Explicit", "Auto")])
def test_heads_and_examples_stay_split(kinds):
  """Each device computes its own heads of its own examples."""
  types = tuple(getattr(jax.sharding.AxisType, kind) for kind in kinds)
  mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=types)
  where = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
  arrays = [jax.device_put(x, where) for x in (Q, K, V)]
  loss = lambda arrays, factor: (attend(*arrays, lambda s: jnp.where(causal(), s, -1e9)) * factor).sum()
  changed = nxp.with_layers(loss, attention="fused")
  with jax.set_mesh(mesh):
    program = jax.jit(jax.value_and_grad(changed)).lower(arrays, 1.0).compile()
    plain, found = jax.jit(jax.value_and_grad(loss))(arrays, 1.0), program(arrays, 1.0)
  assert set(re.findall(r" (all-\w+|collective-permute)(?:-start)?\(", program.as_text())) == {"all-reduce"}
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_the_search_for_the_scale_ends():
  """It does not walk back through all operations of the layers before."""

  def loss(q, k, v):
    for _ in range(40):
      q = q + q * q * 1e-3
    return attend(q * q.mean(), k, v).sum()

  value, done = fused_of(loss, Q, K, V)
  np.testing.assert_allclose(value, loss(Q, K, V), rtol=1e-4)
  assert "1 of 1 found" in done


def test_without_a_kernel_it_goes_by_blocks(monkeypatch):
  monkeypatch.delitem(kernels.KERNELS, "cpu")
  q, k, v = (np.repeat(x, 3, axis=1) for x in (Q, K, V))
  _, done = fused_of(lambda q, k, v: attend(q, k, v).sum(), q, k, v)
  assert "1 found; no fused kernel for this platform" in done
