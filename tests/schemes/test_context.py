"""Attention with its positions split over a mesh axis equals attention of the whole sequence."""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from nnx_parallel.attention import kernels
from nnx_parallel.errors import SchemeError
from nnx_parallel.report.program.collectives import collectives

HEADS, WIDTH = 4, 8

pytestmark = pytest.mark.usefixtures("as_users_have_it")


@functools.partial(jax.jit, static_argnames=("causal", "window"))
def whole(q, k, v, segments=None, keep=None, *, causal=False, window=None):
  """Attention of the whole sequence with its scores written out; 0 for a query that sees no key."""
  away = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
  seen = jnp.ones(away.shape, bool)
  seen = seen & (away >= 0) if causal else seen
  seen = seen & (abs(away) < window) if window else seen
  seen = seen[None, None]
  if segments is not None:
    seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
  seen = seen if keep is None else seen & keep
  sees = jnp.broadcast_to(seen.any(-1)[:, 0, :, None, None], (q.shape[0], q.shape[1], 1, 1))
  return jnp.where(sees, jax.nn.dot_product_attention(q, k, v, mask=seen), 0)


def packed(seed, batch, length):
  """Documents of random lengths: their ids and positions `[batch, length]`."""
  draw, (ids, positions) = np.random.default_rng(seed), np.zeros((2, batch, length), np.int32)
  for row in range(batch):
    lengths = np.diff(np.unique([*draw.integers(1, length, 3), length]), prepend=0)
    ids[row] = np.repeat(np.arange(len(lengths)), lengths)
    positions[row] = np.concatenate([np.arange(n) for n in lengths])
  return ids, positions.astype(np.uint8)  # whose differences would wrap around


def drawn(batch, length, kv_heads, keys=None, dtype=np.float32):
  """Queries, keys, values, weights of a loss, and segments."""
  draw = np.random.default_rng(length).normal
  q, w = draw(size=(2, batch, length, HEADS, WIDTH)).astype(dtype)
  k, v = draw(size=(2, batch, keys or length, kv_heads, WIDTH)).astype(dtype)
  segments = np.minimum(np.arange(length) // max(1, length // 3), 2).astype(np.int32)
  return q, k, v, w, np.broadcast_to(segments, (batch, length))


@dataclasses.dataclass(frozen=True)
class Case:
  """A layout, and options of an attention."""

  mesh: dict[str, int]
  explicit: tuple[str, ...]
  length: int  # of queries
  keys: int
  kv_heads: int
  options: dict[str, Any]  # of `context_attention`
  packed: bool  # into segments
  padded: bool  # some keys are not seen
  by_document: bool  # documents are in an order of their own, with their positions
  in_scope: bool  # rules say how the examples are split

  @classmethod
  def of(cls, seed):
    draw = np.random.default_rng(seed)
    shards, how = int(draw.choice([1, 2, 4, 8])), str(draw.choice(["ring", "ring", "ulysses"]))
    shards = 4 if how == "ulysses" and shards == 8 else shards
    tensor = 2 if shards == 2 and draw.integers(2) else 1
    rings = 2 if how == "ring" and 1 < shards * tensor <= 4 and draw.integers(3) else 1
    batch = str(draw.choice(["data", "fsdp"]))
    sizes = {batch: min(4, 8 // shards // tensor // rings)}
    sizes |= {"context": shards, "heads": rings, "tensor": tensor}
    options = {"how": how, "block": int(draw.integers(2, 7)), "zigzag": bool(draw.integers(2)) and shards > 1}
    options |= {"heads_axis": "heads"} if rings > 1 else {}
    if draw.integers(3):
      options["causal"] = True
    if not draw.integers(3):
      options["window"] = int(draw.integers(1, 20))
    is_alone = "causal" in options or "window" in options or options["zigzag"]
    axes = [name for name, size in sizes.items() if size > 1 or name == "context"]
    explicit = ((), axes, [name for name in axes if draw.integers(2)])[draw.integers(3)]
    length, keys = (2 * shards * rings * int(draw.integers(1, 6)) for _ in range(2))
    kv_heads = 4 if tensor > 1 else int(draw.choice([1, 2, 4]))
    packed, padded, by_document, in_scope = (bool(draw.integers(2)) for _ in range(4))
    packed, keys = is_alone and packed, length if is_alone else keys
    by_document = packed and by_document and not options["zigzag"]
    mesh = {name: sizes[name] for name in axes}
    return cls(mesh, (*explicit,), length, keys, kv_heads, options, packed, padded, by_document, in_scope)


# Rings of some heads on Explicit axes of each kind, documents in an order of their own on each layout (also
# on one device), a tensor axis, and queries and keys of different lengths; then any.
SEEDS = (1, 36, 387, 32, 0, 134, 49, 9, 26)
MORE = [pytest.param(seed, marks=(pytest.mark.slow, pytest.mark.nightly)) for seed in {*range(40)} - {*SEEDS}]


@pytest.mark.parametrize("seed", [*SEEDS, *MORE])
def test_values_and_gradients_are_those_of_the_whole_sequence(seed):
  case = Case.of(seed)
  given = [*drawn(4, case.length, case.kv_heads, case.keys)[:4]]
  documents, positions = packed(seed, 4, case.length)
  given += [documents if case.packed else None]
  given += [np.arange(case.keys) % 5 != np.arange(4)[:, None, None, None] if case.padded else None]
  plain = {name: case.options[name] for name in ("causal", "window") if name in case.options}

  def loss(function, q, k, v, w, segments, keep):
    out = function(q, k, v, segments, keep)
    return jnp.sum(out * w), out

  wanted = jax.value_and_grad(functools.partial(loss, functools.partial(whole, **plain)), (0, 1, 2), True)
  (_, out), gradients = jax.jit(wanted)(*given)

  shards, is_zigzag = case.mesh["context"], case.options["zigzag"]
  *rest, keep = given
  ordered = functools.partial(nxp.parallel.zigzag, shards=max(2, shards))
  if case.by_document:
    ordered = functools.partial(ordered, segment_ids=documents, block=1 + seed % 2)
    if keep is not None:
      keep = ordered(np.broadcast_to(keep[:, 0, 0], documents.shape))[:, None, None]
    rest, positions = ordered((rest, positions))
  if is_zigzag:
    rest, keep = ordered(rest), ordered(keep, dim=-1)
  devices = jax.devices()[: math.prod(case.mesh.values())]
  mesh = nxp.make_mesh(case.mesh, explicit=case.explicit, devices=devices)
  tensor, batch = ("tensor" if "tensor" in case.mesh else None), next(iter(case.mesh))
  batch = None if batch == "context" else batch
  places = ("context", "heads") if "heads" in case.mesh else "context"
  layouts = [PartitionSpec(batch, places, tensor)] * 4 + [PartitionSpec(batch, places)]
  put = lambda x, layout: None if x is None else jax.device_put(x, NamedSharding(mesh, layout))
  placed = [*map(put, rest, layouts)]
  attend = nxp.parallel.context_attention(**case.options)

  def split(q, k, v, segments, keep):
    places = {"positions": positions} if case.by_document else {}
    return attend(q, k, v, keep, segment_ids=segments, **places)

  scope = nxp.use_rules(nxp.LogicalRules(batch=batch), mesh) if case.in_scope else contextlib.nullcontext()
  with jax.set_mesh(mesh), scope:
    found = jax.jit(jax.value_and_grad(functools.partial(loss, split), (0, 1, 2), True))(*placed, keep)
  (_, own), own_gradients = jax.tree.map(np.asarray, found)
  if is_zigzag or case.by_document:
    own, own_gradients = ordered((own, own_gradients), inverse=True)
  for a, b in zip((own, *own_gradients), (out, *gradients), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=str(case))


# What is sent, kept and computed.


def compiled(attend, length, *, gradient, shards=8, heads=HEADS):
  mesh = nxp.make_mesh(context=shards)
  layout = NamedSharding(mesh, PartitionSpec(None, "context"))
  given = [jax.ShapeDtypeStruct((1, length, heads, WIDTH), jnp.float32, sharding=layout)] * 3
  summed = lambda *given: jnp.sum(attend(*given))
  with jax.set_mesh(mesh):
    return jax.jit(jax.grad(summed, (0, 1, 2)) if gradient else attend).lower(*given).compile()


def permuted(program):
  found = [c for c in collectives(program.as_text(), {"context": 8}) if c.kind == "collective-permute"]
  return sum(c.sent_bytes for c in found)


@pytest.mark.cases(1)
@pytest.mark.parametrize("zigzag", [False, True])
def test_a_ring_sends_each_shard_of_keys_and_values_to_the_seven_others(zigzag):
  length = 64
  shard = 2 * length // 8 * HEADS * WIDTH * 4  # keys and values
  attend = nxp.parallel.context_attention(causal=True, zigzag=zigzag)
  forward, both = (compiled(attend, length, gradient=gradient) for gradient in (False, True))
  assert permuted(forward) == 7 * shard
  # Backward: keys and values again, and their gradients, which go one further, home. What is sent first both
  # ways is the same, and XLA sends it once.
  assert permuted(both) == (7 + 6 + 8) * shard
  kinds = {c.kind for c in collectives(both.as_text(), {"context": 8})}
  assert kinds == {"collective-permute"}


def test_all_to_all_sends_queries_keys_values_and_results_once():
  program = compiled(nxp.parallel.context_attention(how="ulysses", causal=True), 64, gradient=False, heads=8)
  found = collectives(program.as_text(), {"context": 8})
  assert {c.kind for c in found} == {"all-to-all"}
  assert sum(c.total_bytes for c in found) == 4 * 64 // 8 * 8 * WIDTH * 4


def test_devices_have_equal_work_for_documents_of_all_lengths():
  length, shards = 2**16, 8
  lengths = [700, 40000, 3001, 15999, 400, 1500, 3936]
  ids = np.repeat(np.arange(7), lengths)[None]
  positions = np.concatenate([np.arange(n) for n in lengths])[None]
  attend = nxp.parallel.context_attention(causal=True)
  straight = attend.tiles(length, shards, segment_ids=ids, positions=positions)
  moved = nxp.parallel.zigzag((ids, positions), shards, segment_ids=ids)
  assert [sorted(x[0]) for x in moved] == [sorted(ids[0]), sorted(positions[0])]
  balanced = attend.tiles(length, shards, segment_ids=moved[0], positions=moved[1])
  least = sum(n * (n + 1) / 2 for n in lengths) / 512**2
  assert least < straight.sum() < 1.1 * least
  assert least < balanced.sum() < 1.2 * least
  # The slowest device of each visit decides how long a ring takes.
  assert shards * balanced.max(0).sum() < 1.65 * least < 2.5 * least < shards * straight.max(0).sum()


ERRORS = {
  "a bias": (lambda f, x: f(x, x, x, bias=x), "the full attention weights never exist"),
  "dropout": (lambda f, x: f(x, x, x, dropout_rate=0.1), "dropout_rate=0.1"),
  "a mask": (lambda f, x: f(*[x[:, :8]] * 3, jnp.ones((1, 1, 8, 8), bool)),
    r"a mask of keys is \(2, 1, 1, 8\)"),
  "a length": (lambda f, x: f(x, x, x), "pad them to 12"),
  "heads": (lambda f, x: f(x, x[:, :, :3], x[:, :, :3]), "do not fit each other"),
  "segments": (lambda f, x: f(x, x, x, segment_ids=jnp.ones((2, 9), int)),
    r"segment_ids are int32 of shape \(2, 9\)"),
  "positions": (lambda f, x: f(x, x, x, positions=jnp.ones((2, 10))),
    r"(?s)positions are float32 of .*integers of shape \(2, 10\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_computed_is_refused(case):
  call, message = ERRORS[case]
  with jax.set_mesh(nxp.make_mesh(data=2, context=4)), pytest.raises(SchemeError, match=message):
    call(nxp.parallel.context_attention(), jnp.ones((2, 10, HEADS, WIDTH)))


def test_options_and_meshes_that_are_none_are_refused():
  with pytest.raises(SchemeError, match="how='both'"):
    nxp.parallel.context_attention(how="both")
  for options in ({"how": "ulysses", "heads_axis": "heads"}, {"heads_axis": "context"}):
    with pytest.raises(SchemeError, match="is not a second mesh axis beside the axis of a ring"):
      nxp.parallel.context_attention(**options)
  with pytest.raises(SchemeError, match="window=0"):
    nxp.parallel.context_attention(window=0)
  ids = np.repeat([[1, 2]], 12, 1)
  for given, options, text in (
    ((np.arange(20), 4), {"dim": 0}, "pad them to 24"),
    ((ids, 5), {"segment_ids": ids}, r"(?s)24 positions .* 5 equal parts.*ids \(1, 24\).*them to 25"),
    ((ids[:, :12], 2), {"segment_ids": ids}, r"shape \(1, 12\) does not fit segment ids of shape \(1, 24\)"),
    ((ids, 2), {"segment_ids": ids, "dim": 0}, "dim=0"),
    ((ids, 2), {"segment_ids": ids, "block": 0}, r"block=0(.|\n)*1 to "),
    ((ids, 2.5), {}, r"shards=2\.5"),
    ((ids, 2), {"segment_ids": ids, "block": "a"}, "block='a'"),
  ):
    with pytest.raises(SchemeError, match=text):
      nxp.parallel.zigzag(*given, **options)
  x = jnp.ones((1, 24, 1, 4))
  with pytest.raises(SchemeError, match="zigzag=True and positions= both"):
    nxp.parallel.context_attention(zigzag=True)(x, x, x, positions=ids)
  x = jnp.ones((2, 8, 3, WIDTH))
  with jax.set_mesh(nxp.make_mesh(data=2, context=4)):
    with pytest.raises(SchemeError, match="no axis 'ring'"):
      nxp.parallel.context_attention("ring")(x, x, x)
    with pytest.raises(SchemeError, match="cannot share 3 heads"):
      nxp.parallel.context_attention(how="ulysses")(x, x, x)
    with pytest.raises(SchemeError, match="no axis 'heads'"):
      nxp.parallel.context_attention(heads_axis="heads")(x, x, x)
  with jax.set_mesh(nxp.make_mesh(context=4, heads=2)):
    attend = nxp.parallel.context_attention(heads_axis="heads")
    with pytest.raises(SchemeError, match="cannot share 3 heads evenly"):
      attend(x, x, x)
    with pytest.raises(SchemeError, match="heads_axis='heads'"):
      nxp.parallel.context_attention(heads_axis="hd")(x, x, x)
    with pytest.raises(SchemeError, match="8 devices along context and heads"):
      attend(*[jnp.ones((2, 12, 4, WIDTH))] * 3)


FUSED = {
  "causal": ({"data": 2, "context": 4}, 4, {"causal": True}, True),
  "window, few heads": ({"data": 2, "context": 4}, 2, {"causal": True, "window": 70}, False),
  "both sides": ({"context": 4}, 4, {"window": 30}, False),
}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("case", FUSED)
def test_the_fused_kernel_computes_the_heads_of_a_device(case, monkeypatch):
  monkeypatch.setitem(kernels.KERNELS, "cpu", functools.partial(kernels.splash_attention, interpret=True))
  axes, kv_heads, options, segmented = FUSED[case]
  q, k, v, w, segments = drawn(2, 256, kv_heads)
  segments = segments if segmented else None
  attend = nxp.parallel.context_attention(how="ulysses", fused=True, **options)
  loss = lambda attend: jax.jit(jax.value_and_grad(lambda *x: (attend(*x) * w).sum(), argnums=(0, 1, 2)))
  split = lambda q, k, v: attend(q, k, v, segment_ids=segments)
  mesh = nxp.make_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])
  with nxp.use_rules(nxp.LogicalRules(batch="data" if "data" in axes else None), mesh):
    assert "pallas_call" in str(jax.make_jaxpr(split)(q, k, v))
    found = loss(split)(q, k, v)
  expected = loss(lambda *x: whole(*x, segments, **options))(q, k, v)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
