"""The vocabulary-parallel cross-entropy and look-up equal the plain ones, and send what they must."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P

import nnx_parallel as nxp
from benchmarks import vocabulary as benchmark
from nnx_parallel.errors import SchemeError

RANDOM = np.random.default_rng(0)
MESHES = {
  "tensor": {"tensor": 8}, "data, tensor": {"data": 2, "tensor": 4},
  "data, fsdp, tensor": {"data": 2, "fsdp": 2, "tensor": 2}, "no tensor": {"data": 2, "fsdp": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_numbers():
  """Each test draws the same numbers, whatever ran before it."""
  RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(*shape):
  return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def arrays(vocab, batch=4, seq=5, width=8):
  labels = jnp.asarray(RANDOM.integers(0, vocab, (batch, seq)), jnp.int32)
  return normal(batch, seq, width), normal(width, vocab), labels


def whole(x, head, labels, *, label_smoothing=0.0, z_loss=0.0, softcap=None, ignore=None, vocab_size=None):
  """With all logits at once, by optax."""
  logits = jnp.einsum("bsf,fv->bsv", x, head)[..., :vocab_size]
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  safe = labels if ignore is None else jnp.where(labels == ignore, 0, labels)
  if label_smoothing:
    targets = optax.smooth_labels(jax.nn.one_hot(safe, logits.shape[-1]), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, targets)
  else:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
  losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
  return losses if ignore is None else jnp.where(labels == ignore, 0, losses)


def close(found, wanted, tolerance=1e-5):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def with_gradients(f, weights):
  return jax.jit(jax.value_and_grad(lambda x, head: (f(x, head) * weights).sum(), (0, 1)))


CASES = {
  "plain": (32, {}), "odd vocabulary": (37, {}), "fewer columns than devices": (5, {}),
  "padded": (48, {"vocab_size": 41}), "smoothed": (37, {"label_smoothing": 0.1}),
  "z-loss": (37, {"z_loss": 1e-2}), "soft cap": (37, {"softcap": 3.0}), "ignored": (37, {"ignore": 0}),
  "all": (48, {"vocab_size": 41, "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 4.0, "ignore": -100}),
}  # fmt: skip

LAYOUTS = [("data, fsdp, tensor", 3, False), ("data, fsdp, tensor", 1, True), ("tensor", 3, True)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("mesh", "parts", "explicit"), LAYOUTS)
def test_losses_and_gradients_are_those_of_whole_logits(mesh, case, parts, explicit):
  vocab, options = CASES[case]
  x, head, labels = arrays(vocab)
  labels = jnp.minimum(labels, options.get("vocab_size", vocab) - 1)
  if "ignore" in options:
    labels = labels.at[0, :3].set(options["ignore"])
  weights = normal(*labels.shape)
  wanted = with_gradients(lambda x, w: whole(x, w, labels, **options), weights)(x, head)
  given = {("ignore_index" if name == "ignore" else name): value for name, value in options.items()}
  mesh = nxp.make_mesh(MESHES[mesh], explicit=explicit)
  with jax.set_mesh(mesh):
    f = lambda x, w: nxp.parallel.vocabulary_cross_entropy(x, w, labels, parts=parts, **given)
    close(with_gradients(f, weights)(x, head), wanted)


@pytest.mark.slow
def test_a_label_that_is_no_column_gives_nan_and_no_number():
  x, head, labels = arrays(37)
  labels = labels.at[0, 0].set(37).at[1, 1].set(-1)
  with jax.set_mesh(nxp.make_mesh(data=2, tensor=4)):
    losses = np.asarray(nxp.parallel.vocabulary_cross_entropy(x, head, labels))
  assert np.argwhere(np.isnan(losses)).tolist() == [[0, 0], [1, 1]]


def test_what_does_not_fit_is_an_error():
  x, head, labels = arrays(32)
  entropy = functools.partial(nxp.parallel.vocabulary_cross_entropy, x, head, labels)
  for call, message in (
    (lambda: nxp.parallel.vocabulary_cross_entropy(x, head.T, labels), "do not fit"),
    (lambda: entropy(parts=0), "parts=0"),
    (lambda: entropy(vocab_size=33), "vocab_size=33"),
    (lambda: nxp.parallel.vocabulary_embedding(head[0], labels), "no rows"),
  ):
    with pytest.raises(SchemeError, match=message):
      call()
  body = functools.partial(nxp.parallel.vocabulary_cross_entropy, labels=labels)
  mesh = nxp.make_mesh(data=2, tensor=4)
  with pytest.raises(SchemeError, match="mapped over that axis already"):
    jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P())(x, head)


TABLES = [("data, fsdp, tensor", 37, False), ("data, fsdp, tensor", 32, True), ("tensor", 5, True),
          ("tensor", 32, False), ("no tensor", 37, True)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("mesh", "rows", "explicit"), TABLES)
def test_a_look_up_is_that_of_the_whole_table(mesh, rows, explicit):
  table, ids, weights = normal(rows, 8), jnp.asarray(RANDOM.integers(0, rows, (8, 5))), normal(8, 5, 8)
  wanted = jax.value_and_grad(lambda t: (t[ids] * weights).sum())(table)
  with jax.set_mesh(nxp.make_mesh(MESHES[mesh], explicit=explicit)):
    f = jax.jit(jax.value_and_grad(lambda t: (nxp.parallel.vocabulary_embedding(t, ids) * weights).sum()))
    close(f(table), wanted)
    outside = nxp.parallel.vocabulary_embedding(table, jnp.array([[0, rows], [-1, 1]]))
  assert np.isnan(np.asarray(outside)).all(-1).tolist() == [[False, True], [True, False]]


# The TPU compiler makes an all-reduce of a small reduce-scatter, of 64 KiB for example.
SHAPE = {"batch": 8, "seq": 32, "features": 512, "vocabulary": 2048}


@pytest.mark.parametrize("machine", benchmark.MACHINES)
def test_each_machine_sends_what_it_must_and_no_more(machine):
  mesh = benchmark.machine(machine)
  if mesh is None:
    pytest.skip(f"the compiler of {machine} is not installed")
  given = benchmark.arguments(mesh, *SHAPE.values())
  found = benchmark.sent(benchmark.gradients(benchmark.in_parts(4), mesh, given))
  wanted = benchmark.analytic(*SHAPE.values())
  if machine.startswith("tpu"):  # the head is gathered in the dtype of its products
    wanted["all-gather", ("fsdp",)] //= 2
  assert found == wanted
