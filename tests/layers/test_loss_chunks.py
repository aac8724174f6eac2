"""Chunked cross-entropy: the head and the loss of each token in chunks, for third-party losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from benchmarks.plain import decoders, others
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_options
from training import DECODER_RULES, run_steps

BATCH, SEQ, WIDTH, VOCAB = 4, 13, 6, 50
RANDOM = np.random.default_rng(0)
PARAMS = {
  "head": RANDOM.normal(size=(WIDTH, VOCAB)).astype(np.float32),
  "table": RANDOM.normal(size=(VOCAB, WIDTH)).astype(np.float32),
  "bias": RANDOM.normal(size=VOCAB).astype(np.float32),
}
X = RANDOM.normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
LABELS = RANDOM.integers(0, VOCAB, (BATCH, SEQ))
MASK = RANDOM.random((BATCH, SEQ)) < 0.7

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def logits_of(params, x):
  return x @ params["head"]


def one_by_one(params, x):
  logp = jax.nn.log_softmax(logits_of(params, jnp.tanh(x)))
  return -jnp.take_along_axis(logp, LABELS[..., None], axis=-1).mean()


def integer_labels(params, x):
  return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"] + params["bias"], LABELS).mean()


def shifted(params, x):
  logits = logits_of(params, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], LABELS[:, 1:]).mean()


def one_hot(params, x):
  return optax.softmax_cross_entropy(logits_of(params, x), jax.nn.one_hot(LABELS, VOCAB)).mean()


def smoothed(params, x):
  targets = optax.smooth_labels(jax.nn.one_hot(LABELS, VOCAB), 0.1)
  return -(targets * jax.nn.log_softmax(logits_of(params, x))).sum(-1).mean()


def products(params, x):
  """Over the columns by a product."""
  targets, logp = jax.nn.one_hot(LABELS, VOCAB), jax.nn.log_softmax(logits_of(params, x))
  return -jnp.einsum("bsv,bsv->bs", targets, logp).mean()


def masked(params, x):
  losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, LABELS)
  return (losses * MASK).sum() / MASK.sum()


def flat(params, x):
  logits = logits_of(params, x).reshape(-1, VOCAB)
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS.reshape(-1)).mean()


def flat_before(params, x):
  logits = logits_of(params, x.reshape(-1, WIDTH))
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS.reshape(-1)).sum()


def capped_with_z_loss(params, x):
  logits = 5 * jnp.tanh(logits_of(params, x) / 5)
  lse = jax.nn.logsumexp(logits, axis=-1)
  label = jnp.take_along_axis(logits, LABELS[..., None], axis=-1)[..., 0]
  return (lse - label + 1e-2 * lse**2).mean()


def bfloat16(params, x):
  logits = (x.astype(jnp.bfloat16) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def metrics(params, x):
  logits = logits_of(params, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
  best = jax.lax.top_k(logits, 3)[1]
  right = logits.argmax(-1) == LABELS
  return losses.mean() + 0 * right.mean() + 0 * (best == LABELS[..., None]).any(-1).mean()


def of_examples(params, x):
  return optax.softmax_cross_entropy_with_integer_labels(x.mean(1) @ params["head"], LABELS[:, 0]).mean()


def by_hand(params, x):
  """Without a stop_gradient."""
  logits = logits_of(params, x)
  largest = logits.max(-1, keepdims=True)
  exponentials = jnp.exp(logits - largest)
  probabilities = exponentials / exponentials.sum(-1, keepdims=True)
  return -jnp.log(jnp.take_along_axis(probabilities, LABELS[..., None], -1)).mean() + 0.1 * largest.mean()


def log_of_softmax(params, x):
  probabilities = jax.nn.softmax(logits_of(params, x))
  return -(jax.nn.one_hot(LABELS, VOCAB) * jnp.log(probabilities + 1e-6)).sum()


def entropy(params, x):
  logits = logits_of(params, x)
  logp = jax.nn.log_softmax(logits)
  return (jnp.exp(logp) * logp).sum(-1).mean() - jnp.where(MASK[..., None], logp, 0.0).mean()


def weighted(params, x):
  """Over some of the columns, with weights."""
  logits = jnp.where(jnp.arange(VOCAB) < 41, logits_of(params, x), -jnp.inf)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS % 41)
  return losses.mean() + 1e-3 * jnp.square((jax.nn.softmax(logits) * params["bias"]).sum(-1)).mean()


def focal(params, x):
  logp = jax.nn.log_softmax(logits_of(params, x))
  return -(jax.nn.one_hot(LABELS, VOCAB) * (1 - jnp.exp(logp)) ** 2 * logp).sum((0, 1, 2))


def mixes(params, x):
  """Over all tokens, column by column."""
  logits = logits_of(params, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits - logits.mean((0, 1)), LABELS).mean()


def ranks(params, x):
  logits = logits_of(params, x)
  own = jnp.take_along_axis(logits, LABELS[..., None], -1)
  margin = (jax.lax.top_k(logits, 3)[0] * jnp.arange(3.0)).mean()
  found = jax.lax.stop_gradient((logits > own).sum(-1).mean() + jax.nn.log_softmax(logits).argmax(-1).mean())
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean() + found + margin


def padded(params, x):
  logits = logits_of(params, x)[..., :45]
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS % 45).mean()


def by_position(params, x):
  """Some labels are no column, as of padding: the gather reads the first or the last column."""
  logp = jax.nn.log_softmax(logits_of(params, x))
  labels = jnp.where(MASK, LABELS, jnp.where(LABELS > 20, -100, 70))
  return -(logp[jnp.arange(BATCH)[:, None], np.arange(SEQ), labels] * MASK).mean()


def by_flat_position(params, x):
  logits = logits_of(params, x).reshape(-1, VOCAB)
  losses = jax.nn.logsumexp(logits, -1) - logits[jnp.arange(BATCH * SEQ), LABELS.reshape(-1)]
  return losses.sum()


def entr(params, x):
  logits = logits_of(params, x)
  probabilities = jax.nn.softmax(logits)
  least = logits.min(-1).mean() - jnp.square(jnp.min(logits * 0.3, axis=-1)).mean()
  return jax.scipy.special.entr(probabilities).sum(-1).mean() + least


def maxima_of_bfloat16(params, x):
  logits = x.astype(jnp.bfloat16) @ params["head"].astype(jnp.bfloat16)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), LABELS)
  return losses.mean() + logits.max(-1).astype(jnp.float32).mean()


LOSSES = [
  one_by_one, integer_labels, shifted, one_hot, smoothed, masked, flat, flat_before,
  capped_with_z_loss, bfloat16, metrics, of_examples, by_hand, log_of_softmax, entropy, weighted, focal,
  mixes, ranks, by_position, by_flat_position, entr, maxima_of_bfloat16,
]  # fmt: skip


def largest(function, *args):
  """The most elements that an array of a program has."""
  return max(v.aval.size for eqn in equations(jax.make_jaxpr(function)(*args)) for v in eqn.outvars)


def same(changed, loss, *args, rtol=1e-5, atol=1e-6):
  """Compares values and gradients of two functions of (params, x)."""
  pairs = [jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(*args) for f in (changed, loss)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), *pairs)


def gradients(loss):
  return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.cases(4)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_chunks_equal_the_whole(loss):
  changed = nxp.with_layers(loss, loss_chunks=4)
  tolerance = {"rtol": 1e-2, "atol": 1e-2} if loss in (bfloat16, maxima_of_bfloat16) else {}
  same(changed, loss, PARAMS, X, **tolerance)
  logits = BATCH * VOCAB * (1 if loss is of_examples else SEQ)
  assert largest(gradients(loss), PARAMS, X) >= logits
  if loss is not of_examples:  # the input is larger than the logits
    assert largest(gradients(changed), PARAMS, X) < logits
  if loss in (integer_labels, smoothed, metrics):
    recomputed = jax.checkpoint(changed)
    same(recomputed, loss, PARAMS, X)
    assert largest(gradients(recomputed), PARAMS, X) < logits


def orders(params, x):
  logits = logits_of(params, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
  return losses.mean() + jnp.sort(logits)[..., 0].mean()


def returns_logits(params, x):
  logits = logits_of(params, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean(), {"logits": logits}


def returns_means(params, x):
  logits = logits_of(params, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean(), logits.mean((0, 1))


def best_tokens(params, x):
  logits = logits_of(params, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean() + logits.argmax(0).max()


def best_integers(params, x):
  logits = logits_of(params, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
  return losses.mean() + (logits > 0).astype(int).argmax(-1).mean()


square = lambda params, x: (logits_of(params, x) ** 2).mean()


def codebooks(params, x):
  logits = logits_of(params, x).reshape(BATCH, SEQ, 5, VOCAB // 5)
  labels = jnp.stack([LABELS % (VOCAB // 5)] * 5, -1)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def attention_only(params, x):
  weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x))
  return ((weights @ x @ params["head"]) ** 2).mean()


def in_a_scan(params, x):
  token = lambda _, row: (None, jax.nn.logsumexp(row @ params["head"]).sum())
  return jax.lax.scan(token, None, x)[1].mean()


def line_of(loss, chunks):
  used = LayersUsed()
  jax.eval_shape(with_options(loss, LayerOptions(loss_chunks=chunks), used), PARAMS, X)
  return str(used).strip()


def test_what_is_done_with_the_head_is_said():
  two = lambda params, x: one_by_one(params, x) + integer_labels(params, x[::-1])
  routed = lambda params, x: one_by_one(params, x * jax.nn.softmax(x @ params["head"])[..., :WIDTH])
  plain = "the head and the loss of each token in 4 chunks of the 50 columns"
  assert line_of(one_by_one, 4) == line_of(routed, 4) == plain
  assert line_of(two, 4) == f"{plain}; the last of 2 heads only, as written: dot_general -> float32[4,13,50]"
  assert line_of(one_by_one, 1) == plain.replace("4 chunks", "1 chunks")
  assert "in 17 chunks of the 50 columns (of 20 requested: chunks are of equal" in line_of(one_by_one, 20)


@pytest.mark.parametrize(("loss", "text"), [
  (codebooks, "reshape -> float32[4,13,5,10] needs all columns of the logits at once"),
  (attention_only, "finds no head in the loss"),
  (in_a_scan, "0 products outside of its layers, scans and checkpoints"),
  (orders, "sort -> float32[4,13,50] needs all columns of the logits at once"),
  (returns_logits, "the loss returns float32[4,13,50]"), (returns_means, "the loss returns float32[50]"),
  (best_tokens, "argmax -> int32[13,50] needs all columns"), (square, "finds no head in the loss"),
  (best_integers, "argmax -> int32[4,13] needs all columns"),
  (products, "dot_general -> float32[4,13] needs all columns"),
  (padded, "slice -> float32[4,13,45] needs all columns"),
  (padded, "jnp.where(jnp.arange(columns) < size, logits, -jnp.inf)"),
])  # fmt: skip
def test_what_does_not_match_is_named(loss, text):
  with pytest.raises(TrainError) as caught:
    nxp.with_layers(loss, loss_chunks=4)(PARAMS, X)
  assert text in str(caught.value)


def test_an_evaluation_with_both():
  model = others.EncoderDecoder(nnx.Rngs(0), depth=1)
  tokens = RANDOM.integers(1, 64, (4, 12))

  def loss(model, tokens):
    logits = model(tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return nxp.weighted(losses.sum(), losses.size), {"right": (logits.argmax(-1) == tokens).mean()}

  plain = nxp.eval_step(loss)(model, tokens)
  found = nxp.eval_step(loss, attention=4, loss_chunks=3)(model, tokens)
  assert found.keys() == plain.keys()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, plain)


def test_one_pass_over_the_columns_in_each_direction():
  for loss, passes in ((one_by_one, 1), (smoothed, 2), (entropy, 2), (capped_with_z_loss, 1), (focal, 2)):
    in_chunks = nxp.with_layers(loss, loss_chunks=4)
    for function, directions in ((in_chunks, 1), (jax.grad(in_chunks), 2)):
      eqns = equations(jax.make_jaxpr(function)(PARAMS, X))
      assert sum(eqn.primitive.name == "scan" for eqn in eqns) == passes * directions, loss.__name__


MODEL = decoders.Config(depth=2, vocab=512, width=64)
TENSOR = [nxp.LogicalRules(batch=("data", "fsdp")), DECODER_RULES]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("sizes", "rules", "chunks"), [
  ((1, 8, 1), nxp.fsdp("shards", min_size=0), 5), ((2, 1, 4), TENSOR, 8), ((1, 4, 2), TENSOR, 5),
], ids=["fsdp", "tensor", "both"])  # fmt: skip
def test_what_a_mesh_sends(sizes, rules, chunks):
  axes = ("data", "fsdp" if sizes[2] > 1 else "shards", "tensor")  # any name
  mesh = nxp.make_mesh(**dict(zip(axes, sizes, strict=True)))
  plan = nxp.plan(lambda: decoders.Decoder(MODEL, nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(1e-2))
  tokens = nxp.shard_batch(RANDOM.integers(1, 512, (16, 65)).astype(np.int32), plan)
  sent, losses = [], []
  for options in ({}, {"loss_chunks": chunks}):
    run = run_steps(plan, decoders.loss, [tokens] * 2, **options)
    losses.append(run.losses)
    bytes_by = nxp.compile_report(run.step, plan, batch=tokens).bytes_by("axes")
    sent.append({axis: bytes_by.get((axis,), 0) for axis in mesh.axis_names})
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
  # The weights once more, and a few numbers of each token in each chunk.
  weights, numbers = 4 * 64 * 512 // sizes[2], 4 * 4 * chunks * 16 * 64 // (sizes[0] * sizes[1])
  assert sent[1][axes[1]] <= sent[0][axes[1]] + weights + numbers
  assert sent[1]["tensor"] <= sent[0]["tensor"] + numbers
  assert sent[1]["data"] <= sent[0]["data"]
  said = f"the head and the loss of each token in {chunks} chunks of the 512 columns"
  assert str(run.step.layers).strip().endswith(said)


def test_types_with_shardings():
  mesh = nxp.make_mesh(data=2, tensor=4, explicit=True)
  rows, columns = np.tile(X, (2, 1, 1)), RANDOM.normal(size=(WIDTH, 48)).astype(np.float32)
  labels = np.tile(LABELS, (2, 1)) % 48
  x, params = jax.device_put(rows, jax.NamedSharding(mesh, jax.P("data"))), {"head": columns}
  split = {"head": jax.device_put(columns, jax.NamedSharding(mesh, jax.P(None, "tensor")))}
  one = lambda params, x: optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), labels).mean()

  def other(params, x):
    return optax.softmax_cross_entropy(logits_of(params, x), jax.nn.one_hot(labels, 48)).mean()

  with jax.set_mesh(mesh):
    for loss, given in ((one, params), (other, split)):
      same(nxp.with_layers(loss, loss_chunks=5), loss, given, x)


def largest_of_all(params, x):
  logits = logits_of(params, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
  return losses.mean() + logits.max(-1).mean()


@pytest.mark.slow
def test_equal_maxima_share_their_gradient():
  params = PARAMS | {"head": np.zeros_like(PARAMS["head"])}
  plain, changed = (jax.grad(f) for f in (largest_of_all, nxp.with_layers(largest_of_all, loss_chunks=4)))
  np.testing.assert_allclose(changed(params, X)["head"], plain(params, X)["head"], atol=1e-6)


def test_what_many_chunks_add_up_to_is_not_rounded_in_each():
  draw, entropy = np.random.default_rng(0), optax.softmax_cross_entropy_with_integer_labels
  small = [jnp.asarray(draw.normal(size=size), jnp.bfloat16) for size in ((64, 16), (16, 512))]
  loss = lambda x, head: entropy((x @ head).astype(np.float32), np.arange(64)).sum()
  exact = jax.grad(loss)(*(x.astype(np.float32) for x in small))
  each = [jax.grad(f)(*small) - exact for f in (loss, nxp.with_layers(loss, loss_chunks=128))]
  whole, chunks = map(jnp.linalg.norm, each)
  assert chunks < 1.3 * whole  # 2.2, where each of the 128 sums is rounded to bfloat16


def test_forward_mode_and_printing():
  printed: list[float] = []

  def loss(params, x):
    jax.debug.callback(printed.append, logits_of(params, x).max())
    return one_by_one(params, x)

  tangent = jax.tree.map(np.ones_like, PARAMS)
  plain = jax.jvp(lambda p: one_by_one(p, X), (PARAMS,), (tangent,))
  model = nnx.Linear(WIDTH, VOCAB, rngs=nnx.Rngs(0))
  of_model = lambda model, x: one_by_one({"head": model.kernel[...]}, x)
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  assert nxp.train_step(of_model, loss_chunks=4).check_gradients(model, optimizer, X)
  np.testing.assert_allclose(nxp.with_layers(loss, loss_chunks=4)(PARAMS, X), plain[0], rtol=1e-6)
  jax.effects_barrier()
  assert len(printed) == 1
