"""Attention of unedited models where a mesh axis splits the positions: each device computes a part."""

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
from nnx_parallel.attention import find
from nnx_parallel.attention.find import queries_over
from nnx_parallel.errors import TrainError
from nnx_parallel.report.program.collectives import collectives
from nnx_parallel.report.program.cost import cost
from training import run_steps

CONFIG = decoders.Config(
  vocab=64, width=32, heads=4, kv_heads=2, head_dim=8, hidden=64, depth=2, dtype="float32"
)
INIT = lambda: decoders.Decoder(CONFIG, nnx.Rngs(0))
TENSOR = nxp.PathRules(
  {r".*\.(q|k|v|gate|up)\.kernel": (None, "tensor"), r".*\.(o|down)\.kernel": ("tensor", None)}, optional=True
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_users_have_it")]


def planned(mesh, *rules, batch="data", seq="context"):
  rest = rules or [nxp.replicate()]
  rules = [nxp.LogicalRules(batch=batch, **({"seq": seq} if seq else {})), *rest]
  return nxp.plan(INIT, mesh, rules, optimizer=optax.sgd(0.1))


@functools.cache
def one_device():
  return planned(nxp.make_mesh(data=1, devices=jax.devices()[:1]), seq=None)


@functools.cache
def tokens(length):
  return np.random.default_rng(0).integers(0, CONFIG.vocab, (4, length + 1))


@functools.cache
def alone(length):
  return trained(one_device(), length)


def trained(plan, length, attention=16, **options):
  """Losses of three steps, and the parameters after them."""
  run = run_steps(plan, decoders.loss, [tokens(length)] * 3, attention=attention, **options)
  return run.losses, jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(run.model, nnx.Param)))


CONTEXT, CUBE = {"data": 2, "context": 4}, {"data": 2, "context": 2, "tensor": 2}
SPLIT, ROLLED = [TENSOR, nxp.replicate()], {"remat": "full", "scan_layers": True}
LAYOUTS = {
  **{f"rolled, {w}": (CONTEXT, [], {}, 48, {"attention": w, **ROLLED}) for w in ("ring", 16, "ulysses")},
  "data": (CONTEXT, [], {}, 48, {}),
  "fsdp": ({"fsdp": 2, "context": 4}, [nxp.fsdp(min_size=0)], {"batch": "fsdp"}, 48, {}),
  "tensor": (CUBE, SPLIT, {}, 48, {}),
  "odd lengths": (CONTEXT, [], {}, 4 * 21, {}),
  "does not divide": (CONTEXT, [], {}, 46, {}),
  **{f"tensor, {w}": (CUBE, SPLIT, {}, 48, {"attention": w}) for w in ("ring", "ulysses")},
  "stages of a pipeline": (
    {"data": 2, "context": 2, "stage": 2}, [], {}, 48,
    {"attention": "ring", "pipeline": "stage", "microbatches": 2},
  ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_of_one_device(layout, monkeypatch):
  monkeypatch.setattr(find, "BLOCK", 5)
  mesh, rules, names, length, options = LAYOUTS[layout]
  losses, params = trained(planned(nxp.make_mesh(mesh), *rules, **names), length, **options)
  np.testing.assert_allclose(losses, alone(length)[0], rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), params, alone(length)[1])


def compiled(way, length):
  """The program of a step on a mesh of data=2, context=4, and what it sends over context."""
  plan = planned(nxp.make_mesh(data=2, context=4))
  abstract = jax.ShapeDtypeStruct((4, length + 1), jnp.int32)
  text = nxp.train_step(decoders.loss, attention=way).lower(plan, batch=abstract).compile().as_text()
  found = collectives(text, {"data": 2, "context": 4})
  return text, {
    kind: sum(x.total_bytes for x in found if x.kind == kind and "context" in x.axes)
    for kind in {x.kind for x in found}
  }


def floats_of(program, length):
  return re.findall(rf"(?:f32|bf16)\[(?:\d+,)*{length}(?:,\d+)*\]", program)


def test_in_a_ring_keys_and_values_travel_and_no_device_has_them_whole():
  length, context = 520, 4
  program, sent = compiled("ring", length)
  shard = 2 * 2 * (length // context) * CONFIG.kv_heads * CONFIG.head_dim * 4
  # Forward; backward, of which the first is that of the forward pass; gradients, which come home.
  times = (context - 1) + (context - 2) + context
  shifted = 4 * 10  # inputs and labels: each device has one position of the next one
  assert sent["collective-permute"] == CONFIG.depth * times * shard + shifted
  assert not {"all-gather", "all-to-all"} & sent.keys()
  assert floats_of(program, length // context)
  assert not floats_of(program, length)


def test_all_to_all_sends_queries_keys_values_and_results_once():
  _, sent = compiled("ulysses", 512)
  # Forward, and the gradients backward; the model repeats keys and values before.
  once = 4 * 2 * (512 // 4) * CONFIG.heads * CONFIG.head_dim * 4
  assert sent["all-to-all"] == CONFIG.depth * 2 * once
  assert "all-gather" not in sent


@pytest.mark.nightly
def test_a_device_computes_its_share_and_gathers_keys_and_values_once():
  length, batch, data, context = 512, 4, 2, 4
  plan = planned(nxp.make_mesh(data=data, context=context))
  step = nxp.train_step(decoders.loss, attention=64)
  abstract = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
  programs = [step.lower(of, batch=abstract).compile() for of in (one_device(), plan)]
  flops = [cost(program.as_text()).flops for program in programs]
  # The device with the last queries skips the fewest tiles of the causal mask: 1 of 16; one device 28 of 64.
  assert flops[0] < flops[1] * data * context < 1.5 * flops[0]
  report = nxp.compile_report(step, plan, batch=abstract)
  sent = report.bytes_by("kind", "axes")
  gathered = CONFIG.depth * 2 * (batch // data) * length * CONFIG.kv_heads * CONFIG.head_dim * 4
  assert sent["all-gather", "context"] == gathered  # before the model repeats them for groups of heads
  assert ("all-gather", "data") not in sent
  assert report.memory.temporaries < programs[0].memory_analysis().temp_size_in_bytes / 4


def test_an_axis_that_splits_weights_is_left_to_them():
  mesh = nxp.make_mesh(data=2, tensor=4)
  plan = planned(mesh, TENSOR, nxp.replicate(), seq="tensor")
  abstract = jax.ShapeDtypeStruct((4, 49), jnp.int32)
  step = nxp.train_step(decoders.loss, attention=16)
  assert "manual_computation" not in step.lower(plan, batch=abstract).as_text()
  split = planned(nxp.make_mesh(data=2, context=4))
  assert "manual_computation" in step.lower(split, batch=abstract).as_text()


Q, K, V = np.random.default_rng(1).normal(size=(3, 2, 24, 4, 8)).astype(np.float32)
BIAS = np.random.default_rng(2).normal(size=(4, 24, 24)).astype(np.float32)


def biased(q, k, v, bias):
  seen = jnp.arange(24)[:, None] >= jnp.arange(24)[None]
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
  return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)


def grouped(q, k, v, bias):
  near = jnp.abs(jnp.arange(24)[:, None] - jnp.arange(24)[None]) < 5
  k, v = (x[:, :, :2] for x in (k, v))
  return jax.nn.dot_product_attention(q, k, v, bias[None], mask=near[None, None], is_causal=True)


def narrow(q, k, v, bias):
  q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
  return nnx.dot_product_attention(q, k, v, bias[None].astype(q.dtype)).astype(jnp.float32)


def merged(q, k, v, bias):
  """Queries behind the heads in one dim, whose parts are no queries of all heads."""
  rows = q.transpose(0, 2, 1, 3).reshape(2, -1, 8)
  scores = jnp.einsum("brd,bkd->brk", rows, k[:, :, 0]).reshape(2, 4, 24, 24) + bias
  return jnp.einsum("bhqk,bkd->bhqd", jax.nn.softmax(scores), v[:, :, 0])


def evenly(f, way):
  run = nxp.with_layers(lambda _, given: f(*given), attention=way)
  return lambda *given: run(None, given)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
  ("function", "way"), [(biased, 5), (merged, 5), (grouped, "ring"), (narrow, "ring"), (narrow, "ulysses")]
)
def test_values_and_gradients_of_masks_and_biases(function, way, monkeypatch):
  monkeypatch.setattr(find, "BLOCK", 2)

  def both(change):
    def total(*given):
      out = change(function)(*given)
      return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum()

    return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(Q, K, V, BIAS)

  expected = both(lambda f: f)
  with jax.set_mesh(nxp.make_mesh(data=2, context=4)), queries_over("context"):
    found = both(lambda f: evenly(f, way))
  close = {"rtol": 2e-2, "atol": 5e-2} if function is narrow else {"rtol": 1e-5, "atol": 1e-5}
  np.testing.assert_allclose(found[0], expected[0], **close)
  jax.tree.map(functools.partial(np.testing.assert_allclose, **close), found[1], expected[1])


def dropped(q, k, v, _):
  weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
  return jnp.einsum(
    "bhqk,bkhd->bqhd", weights * jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape), v
  )


def with_epsilon(q, k, v, _):
  """Follows an attention that is shared."""
  q = nnx.dot_product_attention(q, k, v)
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
  e = jnp.exp(scores - scores.max(-1, keepdims=True))
  return jnp.einsum("bhqk,bkhd->bqhd", e / (e.sum(-1, keepdims=True) + 1e-6), v)


@pytest.mark.parametrize(
  ("function", "way", "reason"),
  [
    (
      lambda q, k, v, _: nnx.dot_product_attention(q[:, :22], k, v),
      "ring",
      "softmax of float32[1,2,4,22,24]: 4 devices cannot split 22 queries and 24 keys",
    ),
    (grouped, "ulysses", "softmax of float32[2,2,2,24,24]: 4 devices cannot share 2 heads of values"),
    (dropped, "ring", "softmax of float32[2,4,24,24]: dropout is between it and its product"),
    (with_epsilon, "ring", "softmax of float32[2,4,24,24]: its weights are not exponentials over their sum"),
    (merged, "ring", "softmax of float32[2,4,24,24]: its queries, keys or heads are the minor part of a dim"),
  ],
)
def test_what_devices_cannot_share_is_an_error_that_names_it(function, way, reason):
  wanted = pytest.raises(TrainError, match=f"attention='{way}': context=4 cannot share an attention")
  with jax.set_mesh(nxp.make_mesh(data=2, context=4)), queries_over("context"), wanted as caught:
    jax.eval_shape(evenly(function, way), Q, K, V, BIAS)
  assert reason in str(caught.value)
  assert 'or attention="blockwise"' in str(caught.value)


@pytest.mark.parametrize("explicit", [False, True])
def test_an_axis_that_splits_weights_or_is_explicit_cannot_be_a_ring(explicit):
  wanted = pytest.raises(TrainError, match="attention='ring' needs a mesh axis that splits the positions")
  if explicit:
    mesh = nxp.make_mesh(data=2, context=4, explicit=True)
    with jax.set_mesh(mesh), queries_over("context"), wanted as caught:
      jax.eval_shape(evenly(biased, "ring"), Q, K, V, BIAS)
    assert "whose axis 'context' is Explicit" in str(caught.value)
  else:
    plan = planned(nxp.make_mesh(data=2, tensor=4), TENSOR, nxp.replicate(), seq="tensor")
    with wanted as caught:
      batch = jax.ShapeDtypeStruct((4, 49), jnp.int32)
      nxp.train_step(decoders.loss, attention="ring").lower(plan, batch=batch)
    assert "a rule for `seq` on an axis that splits no weight" in str(caught.value)
