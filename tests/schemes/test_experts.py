"""Experts that a mesh axis splits compute what every expert on every token, masked, does."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import nnx_parallel as nxp
from nnx_parallel.errors import SchemeError
from nnx_parallel.report.program.collectives import collectives
from nnx_parallel.schemes import experts as schemes_experts

WIDTH, HIDDEN = 6, 10

pytestmark = pytest.mark.usefixtures("as_users_have_it")


def gated(p, rows, sizes):
  gate, up = (nxp.parallel.ragged_dot(rows, p[name], sizes) for name in ("gate", "up"))
  return nxp.parallel.ragged_dot(jax.nn.silu(gate) * up, p["down"], sizes, bias=p["bias"])


def alone(expert):
  """The function of one expert, with products that are not grouped."""
  return lambda p, rows: expert(jax.tree.map(lambda leaf: leaf[None], p), rows, jnp.full(1, len(rows)))


@functools.partial(jax.jit, static_argnums=0)
def dense(expert, parameters, x, routing):
  """Every expert on every token, masked."""
  flat = x.reshape(-1, x.shape[-1])
  results = jax.vmap(alone(expert), (0, None))(parameters, flat)
  chosen = jax.nn.one_hot(routing.experts.reshape(flat.shape[0], -1), results.shape[0])
  weights = (chosen * routing.weights.reshape(flat.shape[0], -1, 1)).sum(1)
  return jnp.einsum("etd,te->td", results, weights).reshape(*x.shape[:-1], -1)


def drawn(tokens, experts, seed=0):
  """Parameters, tokens, a router, and the weights of a loss."""
  draw = np.random.default_rng(seed).normal
  shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "bias": (WIDTH,)}
  parameters = {k: draw(size=(experts, *shape)).astype(np.float32) / 2 for k, shape in shapes.items()}
  x, w = draw(size=(2, *tokens, WIDTH)).astype(np.float32)
  return parameters, x, draw(size=(WIDTH, experts)).astype(np.float32), w


@pytest.mark.parametrize("normalize", [True, False])
def test_scores_of_zero_give_numbers(normalize):
  def total(logits):
    routing = nxp.parallel.route(logits, 2, score="sigmoid", normalize=normalize)
    return routing.weights.sum() + routing.auxiliary_loss

  logits = jnp.array([[-200.0, -300.0, -250.0], [1.0, 0.0, -1.0]])
  value, gradient = jax.value_and_grad(total)(logits)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()


def loss(layer, top_k, parameters, x, router, w):
  routing = nxp.parallel.route(x @ router, top_k)
  result = layer(gated, parameters, x, routing)
  y, dropped = result if isinstance(result, tuple) else (result, 0)
  value = jnp.sum(y * w) + 0.1 * routing.auxiliary_loss + 0.01 * routing.z_loss
  return value, (y, dropped, routing.load)


def with_gradients(layer, top_k):
  return jax.jit(jax.value_and_grad(functools.partial(loss, layer, top_k), (0, 1, 2), has_aux=True))


@functools.cache
def wanted(tokens, experts, top_k):
  return with_gradients(dense, top_k)(*drawn(tokens, experts))


def check(found, wanted):
  """Values, results, loads and gradients; nothing is dropped."""
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-5)


LAYERS = {
  "capacity": functools.partial(nxp.parallel.experts, capacity=8.0),
  "dropless": functools.partial(nxp.parallel.experts, block=4),
  "rounds": functools.partial(nxp.parallel.experts, block=3, buffer=0.5),
}
ON_TPUS = {
  "grouped": nxp.parallel.experts,
  "grouped rounds": functools.partial(nxp.parallel.experts, buffer=0.5),
  "grouped parts": functools.partial(nxp.parallel.experts, block=2),
}
BY_DATA = {"data": 2, "expert": 4}
BY_TENSOR, BY_FSDP = ({axis: 2, "expert": 2, "tensor": 2} for axis in ("data", "fsdp"))
SIZES = {
  "rounds": ("rounds", BY_DATA, (8, 5), 8, 2, False),
  "capacity, odd": ("capacity", BY_DATA, (3, 7), 4, 3, False),
  "dropless, odd": ("dropless", BY_DATA, (3, 7), 4, 3, False),
  "rounds, odd": ("rounds", BY_DATA, (5, 3), 8, 2, True),
  "capacity, one expert each": ("capacity", {"expert": 8}, (16,), 8, 1, False),
  "rounds, one expert each": ("rounds", {"expert": 8}, (16,), 8, 1, False),
  "dropless, tensor": ("dropless", BY_TENSOR, (8, 3), 4, 2, False),
  "capacity, fsdp": ("capacity", BY_FSDP, (4, 2, 3), 6, 2, False),
  "rounds, fsdp": ("rounds", BY_FSDP, (4, 2, 3), 6, 2, False),
  "capacity, explicit and tensor": ("capacity", BY_FSDP, (8, 3), 4, 2, True),
  "dropless, explicit and tensor": ("dropless", BY_FSDP, (8, 3), 4, 2, True),
  "capacity, no axis": ("capacity", {"data": 8}, (9,), 3, 2, False),
  "dropless, no axis": ("dropless", {"data": 8}, (9,), 3, 2, False),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", SIZES)
def test_values_and_gradients_are_those_of_every_expert_on_every_token(case):
  layer, shape, tokens, experts, top_k, explicit = SIZES[case]
  parameters, *given = drawn(tokens, experts)
  mesh = nxp.make_mesh(shape, explicit=explicit)
  fsdp, tensor = (name if name in shape else None for name in ("fsdp", "tensor"))
  axis = "expert" if "expert" in shape else None
  wide, high = PartitionSpec(axis, fsdp, tensor), PartitionSpec(axis, tensor, fsdp)
  layouts = {"gate": wide, "up": wide, "down": high, "bias": PartitionSpec(axis)}
  placed = {k: jax.device_put(v, NamedSharding(mesh, layouts[k])) for k, v in parameters.items()}
  with jax.set_mesh(mesh):
    found = with_gradients(LAYERS[layer], top_k)(placed, *given)
  check(found, wanted(tokens, experts, top_k))


# Tokens are conserved. Each expert marks its rows with its number, so that the sum of a token counts who
# computed it.

TOKENS, EXPERTS, TOP_K = 24, 8, 3
MESH = BY_DATA


def mark(own, rows, sizes):
  own = jnp.repeat(own, sizes, axis=0, total_repeat_length=len(rows))
  return own * (rows[:, :1] + 1)


@functools.cache
def counting(**options):
  marks = np.eye(EXPERTS, dtype=np.float32)

  @jax.jit
  def counted(experts):
    weights = jnp.ones(experts.shape)
    routing = nxp.parallel.Routing(weights, experts, 0.0, 0.0, jnp.zeros(EXPERTS, jnp.int32))
    return nxp.parallel.experts(mark, marks, jnp.zeros((TOKENS, 1)), routing, **options)

  def run(experts):
    with jax.set_mesh(nxp.make_mesh(MESH)):
      return jax.tree.map(np.asarray, counted(experts))

  return run


def skewed(seed, skew):
  """Distinct experts of each token; those with low numbers are chosen more often."""
  draw = np.random.default_rng(seed)
  scores = draw.gumbel(size=(TOKENS, EXPERTS)) - skew * np.arange(EXPERTS)
  return np.argsort(-scores, -1)[:, :TOP_K].astype(np.int32)


def by_expert(experts):
  return np.eye(EXPERTS + 1)[experts].sum(1)[:, :EXPERTS]


ROUTED = {"seed": st.integers(0, 10**6), "skew": st.sampled_from([0.0, 0.5, 2.0, 20.0])}


@settings(max_examples=25, deadline=None)
@given(**ROUTED, buffer=st.sampled_from([0.3, 1.0, 2.0]))
def test_each_choice_is_computed_exactly_once(seed, skew, buffer):
  experts = skewed(seed, skew)
  found, dropped = counting(buffer=buffer, block=5)(experts)
  np.testing.assert_array_equal(found, by_expert(experts))
  assert dropped == 0


def test_an_expert_that_gets_all_tokens_takes_rounds_and_gradients_stay_right():
  given = drawn((16,), 8)
  given[1][:, 0] = 4
  given[2][0] = np.linspace(30, 0, 8)
  plain = with_gradients(dense, 2)(*given)
  with jax.set_mesh(nxp.make_mesh(MESH)):
    found = with_gradients(functools.partial(nxp.parallel.experts, block=4, buffer=1.0), 2)(*given)
  assert int(found[0][1][2].max()) == 16
  check(found, plain)


def test_dropped_choices_have_no_gradient():
  experts = np.zeros((TOKENS, 1), np.int32)

  def summed(weights, x):
    routing = nxp.parallel.Routing(weights, experts, 0.0, 0.0, jnp.zeros(EXPERTS, jnp.int32))
    y, dropped = nxp.parallel.experts(mark, np.eye(EXPERTS, dtype=np.float32), x, routing, capacity=4.0)
    return y.sum(), dropped

  with jax.set_mesh(nxp.make_mesh(MESH)):
    run = jax.jit(jax.grad(summed, (0, 1), has_aux=True))
    (by_weight, by_x), dropped = run(jnp.ones((TOKENS, 1)), jnp.zeros((TOKENS, 1)))
  own, slots = TOKENS // 8, math.ceil(4.0 * TOKENS / 8 / EXPERTS)
  kept = np.arange(TOKENS) % own < slots
  assert int(dropped) == (~kept).sum() > 0
  np.testing.assert_array_equal(by_weight[:, 0], kept)
  np.testing.assert_array_equal(by_x[:, 0], kept)


def of_each(layer, mapped):
  _, _, router, w = drawn((2, 8), 4)

  def summed(parameters, x):
    run = lambda x, w: jnp.sum(w * layer(gated, parameters, x, nxp.parallel.route(x @ router, 2))[0])
    return jax.vmap(run)(x, w).sum() if mapped else run(x, w)

  return jax.jit(jax.value_and_grad(summed, (0, 1)))


@functools.cache
def wanted_of_each(mapped):
  return of_each(lambda *args: (dense(*args), 0), mapped)(*drawn((2, 8), 4)[:2])


@pytest.mark.cases(5)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("explicit", [False, "data", "expert"])
def test_under_vmap_and_on_a_mesh_with_auto_and_explicit_axes(layer, explicit):
  mesh = nxp.make_mesh(MESH, explicit=explicit)
  with jax.set_mesh(mesh):
    placed = jax.device_put(drawn((2, 8), 4)[:2], NamedSharding(mesh, PartitionSpec()))
    found = of_each(LAYERS[layer], not explicit)(*placed)
  check(found, wanted_of_each(not explicit))


def test_inside_a_shard_map_over_the_batch():
  parameters, x, router, _ = drawn((16,), 4)
  mesh = nxp.make_mesh(MESH)

  def local(x, parameters):
    return nxp.parallel.experts(gated, parameters, x, nxp.parallel.route(x @ router, 2))[0]

  specs = PartitionSpec("data"), PartitionSpec()
  options = {"in_specs": specs, "out_specs": specs[0], "axis_names": {"data"}, "check_vma": False}
  run = jax.shard_map(local, mesh=mesh, **options)
  y = jax.jit(run)(x, parameters)
  np.testing.assert_allclose(y, dense(gated, parameters, x, nxp.parallel.route(x @ router, 2)), atol=1e-5)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
  """`jax.lax.ragged_all_to_all` as documented, by all-gathers; NaN where the two sides disagree."""
  me, mine = jax.lax.axis_index(axis_name), (operand, input_offsets, send_sizes, output_offsets)
  rows, starts, sizes, ends = jax.lax.all_gather(mine, axis_name)
  output = jnp.where((sizes[:, me] == recv_sizes).all(), output, jnp.nan)
  numbers = jnp.arange(len(operand))
  for source in range(len(rows)):
    size = sizes[source, me]
    part = rows[source].at[starts[source, me] + numbers].get(mode="fill")
    to = jnp.where(numbers < size, ends[source, me] + numbers, len(output))
    output = output.at[to].set(part, mode="drop")
  return output


@pytest.fixture
def as_on_tpus(monkeypatch):
  """Programs for TPUs; XLA does not have their all-to-all on CPUs."""
  monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
  monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
  monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, tpu, default: tpu(*args))


@pytest.mark.cases(6)
@pytest.mark.parametrize("layer", ON_TPUS)
@pytest.mark.parametrize("case", ["rounds, odd", "dropless, tensor", "dropless, no axis", "skewed"])
def test_grouped_products_give_the_same(case, layer, as_on_tpus, monkeypatch):
  monkeypatch.setattr(schemes_experts, "TILE", 4)  # or all rows of so small a model are one part
  _, shape, tokens, experts, top_k, _ = SIZES["rounds" if case == "skewed" else case]
  arrays = drawn(tokens, experts)
  if case == "skewed":  # most experts get no token
    arrays[1][..., 0] = 4
    arrays[2][0] = np.linspace(30, 0, experts)
  with jax.set_mesh(nxp.make_mesh(shape)):
    traced = with_gradients(ON_TPUS[layer], top_k).trace(*arrays)
    assert "ragged_dot" in str(traced.jaxpr)
    found = traced.lower().compile()(*arrays)
  check(found, with_gradients(dense, top_k)(*arrays))


# What is sent.


def compiled(layer, mesh, tokens=256, experts=8, top_k=2):
  """The gradients, with the batch over all axes but tensor, and weights over fsdp and tensor too."""
  batch = tuple(name for name in mesh.axis_names if name != "tensor")
  fsdp, tensor = (name if name in mesh.axis_names else None for name in ("fsdp", "tensor"))

  def struct(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

  up = struct((experts, 16, 32), jnp.float32, "expert", fsdp, tensor)
  down = struct((experts, 32, 16), jnp.float32, "expert", tensor, fsdp)
  given = (up, down), struct((tokens, 16), jnp.float32, batch), struct((tokens, experts), jnp.float32, batch)

  def loss(parameters, x, logits):
    weights = dict(zip(["up", "down"], parameters, strict=True))
    y, _ = layer(nxp.parallel.mlp_experts, weights, x, nxp.parallel.route(logits, top_k))
    return (y.astype(jnp.float32) ** 2).sum()

  with jax.set_mesh(mesh):
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()


def sent(program, mesh, kind):
  found = collectives(program.as_text(), dict(mesh.shape))
  return sorted((c.axes, c.bytes * c.times) for c in found if c.kind == kind and c.bytes * c.times > 64)


def test_a_capacity_sends_its_slots_there_and_back_and_their_gradients():
  mesh = nxp.make_mesh(data=2, expert=4)
  program = compiled(functools.partial(nxp.parallel.experts, capacity=1.25), mesh)
  slots = 8 * math.ceil(1.25 * 256 // 8 * 2 / 8)
  assert sent(program, mesh, "all-to-all") == [(("expert",), slots * 16 * 4)] * 4
  assert {c.kind for c in collectives(program.as_text(), dict(mesh.shape))} == {"all-to-all", "all-reduce"}
  weights = 2 * 8 // 4 * 16 * 32 * 4
  assert sum(size for _, size in sent(program, mesh, "all-reduce")) == weights


# The router.


def routed(logits, top_k, score, normalize, bias, groups, top_groups):
  """As a loop over tokens says it: experts, weights, losses and loads."""
  count, chosen, weights = logits.shape[-1], [], []
  flat = logits.reshape(-1, count).astype(np.float64)
  softmax = np.exp(flat) / np.exp(flat).sum(-1, keepdims=True)
  scores = softmax if score == "softmax" else 1 / (1 + np.exp(-flat))
  for own in scores:
    apart = (own + bias).reshape(groups, -1)
    of_group = np.sort(apart, 1)[:, -min(-(-top_k // top_groups), apart.shape[1]) :].sum(1)
    seen = np.argsort(-of_group)[:top_groups]
    among = [g * apart.shape[1] + n for g in seen for n in range(apart.shape[1])]
    chosen.append(sorted(among, key=lambda e: -(own + bias)[e])[:top_k])
    weights.append(own[chosen[-1]] / (own[chosen[-1]].sum() if normalize else 1))
  load = np.bincount(np.ravel(chosen), minlength=count)
  parts = (scores / scores.sum(-1, keepdims=True)).mean(0)
  z_loss = (np.log(np.exp(flat).sum(-1)) ** 2).mean()
  return np.array(chosen), np.array(weights), count * (load / load.sum() * parts).sum(), z_loss, load


ROUTERS = [("softmax", True, 0, (1, 1)), ("sigmoid", False, 1, (1, 1)), ("sigmoid", True, 1, (4, 2)),
           ("softmax", False, 0, (4, 4))]  # fmt: skip


@pytest.mark.parametrize(("score", "normalize", "biased", "groups"), ROUTERS)
def test_a_router_chooses_the_best_and_weighs_them_by_their_scores(score, normalize, biased, groups):
  draw = np.random.default_rng(0).normal
  logits, bias = draw(size=(3, 20, 12)).astype(np.float32), biased * draw(size=12).astype(np.float32) / 4
  options = {"score": score, "normalize": normalize, "groups": groups[0], "top_groups": groups[1]}
  route = functools.partial(nxp.parallel.route, top_k=3, **options)
  with jax.set_mesh(nxp.make_mesh(MESH)):
    found = jax.jit(functools.partial(route, bias=bias))(logits)
  given = found.experts.reshape(-1, 3), found.weights.reshape(-1, 3)
  given += found.auxiliary_loss, found.z_loss, found.load
  for a, b in zip(given, routed(logits, 3, bias=bias, **options), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)
  assert not jax.grad(lambda bias: route(logits, bias=bias).weights.sum())(jnp.asarray(bias)).any()


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
def test_padding_has_no_experts_and_counts_nowhere(explicit):
  parameters, x, router, w = drawn((4, 6), 8)
  lengths = np.array([6, 2, 0, 5])
  mask = np.arange(6) < lengths[:, None]
  x[~mask] = 100

  def losses(x, router, mask, w):
    routing = nxp.parallel.route(x @ router, 2, groups=4, top_groups=2, mask=mask)
    y, dropped = nxp.parallel.experts(gated, parameters, x, routing, block=3)
    value = jnp.sum(jnp.where(mask[..., None], y * w, 0)) + routing.auxiliary_loss + routing.z_loss
    return value, (y, routing, dropped)

  def alone(router):
    routing = nxp.parallel.route(x[mask] @ router, 2, groups=4, top_groups=2)
    y = dense(gated, parameters, x[mask], routing)
    return jnp.sum(y * w[mask]) + routing.auxiliary_loss + routing.z_loss, (y, routing)

  mesh = nxp.make_mesh({"data": 2, "expert": 4}, explicit=explicit)
  with jax.set_mesh(mesh):
    given = [jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))) for v in (x, mask, w)]
    run = jax.jit(jax.value_and_grad(losses, 1, has_aux=True))
    (value, (y, routing, dropped)), gradient = run(given[0], router, *given[1:])
  (expected, (rows, own)), slope = jax.jit(jax.value_and_grad(alone, has_aux=True))(router)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  np.testing.assert_allclose(np.asarray(y)[mask], rows, atol=1e-5)
  np.testing.assert_allclose(gradient, slope, atol=1e-5)
  assert routing.load.tolist() == own.load.tolist()
  assert int(routing.load.sum()) == 2 * mask.sum()
  assert (np.asarray(routing.experts)[~mask] == -1).all()
  assert not np.asarray(routing.weights)[~mask].any()
  assert not np.asarray(y)[~mask].any()
  assert int(dropped) == 0
  nothing = nxp.parallel.route(jnp.ones((2, 4)), 1, mask=jnp.zeros(2, bool))
  assert (float(nothing.auxiliary_loss), float(nothing.z_loss), int(nothing.load.sum())) == (0, 0, 0)


def test_a_bias_that_follows_the_loads_balances_them():
  logits = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32) + np.linspace(2, 0, 8)
  load_of = jax.jit(lambda bias: nxp.parallel.route(logits, 2, score="sigmoid", bias=bias).load)
  bias, loads = jnp.zeros(8), []
  for _ in range(200):
    loads.append(np.asarray(load_of(bias)))
    bias = nxp.parallel.balanced_bias(bias, loads[-1], 0.005)
  assert loads[0].max() > 1.8 * loads[0].mean()
  assert loads[-1].max() < 1.2 * loads[-1].mean()


def up(p, rows, sizes):
  return rows @ p["up"].sum(0)


ROWS = "one row for each row"
ERRORS = [
  ((6, 4, 4), (8, 6), {}, r"6 experts cannot be split.*\n.*8 experts"),
  ((3, 4, 4), (8, 4), {}, r"\['up'\] \(3, 4, 4\)"), ((4, 4, 4), (6, 4), {}, "made for other tokens"),
  ((4, 4, 4), (8, 4), {"capacity": 0.0}, "capacity=0.0 is not a number above 0"),
  ((4, 4, 4), (8, 4), {"capacity": "2"}, "got capacity='2'"),
  ((4, 4, 4), (8, 4), {"buffer": "a"}, "got buffer='a'"),
  ((4, 4, 4), (8, 4), {"capacity": math.inf}, "no capacity=, which drops no token"),
  ((4, 4, 4), (8, 4), {"block": 2.5}, "got block=2.5"), ((4, 3, 4, 4), (8, 4), {}, ROWS),
  ((4, 3, 4, 4), (8, 4), {"capacity": 1.0}, ROWS),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "logits", "options", "message"), ERRORS)
def test_what_does_not_fit_is_refused(shape, logits, options, message):
  given = {"up": jnp.zeros(shape)}, jnp.zeros((8, 4)), nxp.parallel.route(jnp.zeros(logits), 2)
  with jax.set_mesh(nxp.make_mesh(MESH)), pytest.raises(SchemeError, match=message):
    nxp.parallel.experts(up, *given, **options)
