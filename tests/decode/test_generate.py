"""Generation on every layout gives the tokens of a plain loop on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from training import placed

BATCH, WIDTH, NEW, VOCABULARY, FEATURES, LENGTH = 8, 4, 6, 32, 16, 9


def kernel(*names):
  return {"out_sharding": names}


class Block(nnx.Module):  # Attention with flax's own cache, and an MLP
  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
    names = {"kernel_metadata": kernel("embed", "heads", None)}
    names |= {"out_kernel_metadata": kernel("heads", None, "embed")}
    self.attention = nnx.MultiHeadAttention(8, FEATURES, decode=True, rngs=rngs, **names)
    self.attention.init_cache((BATCH, LENGTH, FEATURES))
    self.up = nnx.Linear(FEATURES, 32, rngs=rngs, kernel_metadata=kernel("embed", "mlp"))
    self.down = nnx.Linear(32, FEATURES, rngs=rngs, kernel_metadata=kernel("mlp", "embed"))

  def __call__(self, x):
    x = x + self.attention(self.norm(x))
    return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    options = {"kernel_init": nnx.initializers.normal(1.0), "kernel_metadata": kernel("embed", "vocab")}
    self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs, **options)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.head(x)


LAYOUTS = {"both": {"fsdp": 4, "tensor": 2}, "dp": {"data": 8}, "fsdp": {"fsdp": 8}, "tensor": {"tensor": 8}}
LOGICAL = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
CACHES = nxp.PathRules([(r".*\.cached_(key|value)", ("batch", None, "heads", None))])


def rules_for(axes):
  names = {name: (axis if axis in axes else ()) for name, axis in LOGICAL.items()}
  batch = tuple(axis for axis in axes if axis != "tensor")
  return [nxp.LogicalRules(batch=batch, **names), CACHES, nxp.replicate()]


PROMPTS = np.asarray(jax.random.randint(jax.random.key(1), (BATCH, WIDTH), 0, VOCABULARY))
LENGTHS = np.array([4, 1, 3, 2, 4, 2, 1, 3])


@functools.cache
def whole():
  """The logits of every position, without a cache."""
  model = nxp.unsharded(Model)
  model.set_attributes(decode=False)

  @jax.jit
  def run(tokens):
    x = model.embed(tokens)
    for block in model.blocks:
      x = x + block.attention(block.norm(x), mask=nnx.make_causal_mask(tokens))
      x = x + block.down(nnx.gelu(block.up(x)))
    return model.head(x)

  return run


def logits_of(tokens):
  padded = np.zeros((1, WIDTH + NEW), np.int32)
  padded[0, : len(tokens)] = tokens
  return whole()(padded)[0, len(tokens) - 1]


@functools.cache
def expected(sampling, stop):
  """A plain loop over rows and tokens on one device."""
  found = []
  for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    tokens, key = [*map(int, prompt[:length])], jax.random.fold_in(jax.random.key(7), row)
    for n in range(NEW):
      chosen = int(choose(logits_of(tokens), sampling, jax.random.fold_in(key, n)))
      tokens.append(chosen)
      if chosen in stop:
        break
    found.append(tokens[length:])
  return found


def choose(logits, sampling, key):
  if not sampling.temperature:
    return np.argmax(logits)
  logits = np.asarray(logits) / sampling.temperature
  order = np.argsort(-logits)
  kept = order[: sampling.top_k]
  chances = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
  kept = kept[: 1 + np.searchsorted(np.cumsum(chances), sampling.top_p)]
  only = np.full_like(logits, -np.inf)
  only[kept] = logits[kept]
  return jax.random.categorical(key, jnp.asarray(only))


def rows(result):
  tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
  for row, length in zip(tokens, lengths, strict=True):
    assert not row[length:].any()
  return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


GREEDY, DRAWN = nxp.Sampling(), nxp.Sampling(temperature=0.9, top_k=12, top_p=0.8)


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_a_plain_loop(layout):
  axes = LAYOUTS[layout]
  model = placed(nxp.plan(Model, nxp.make_mesh(axes), rules_for(axes)))
  for sampling in (GREEDY, DRAWN):
    stop = (expected(sampling, ())[0][2],)
    generate = nxp.generator(NEW, sampling=sampling, stop=stop)
    for _ in range(2):  # the second one starts from a used cache
      result = generate(model, PROMPTS, lengths=LENGTHS, key=jax.random.key(7))
      assert rows(result) == expected(sampling, stop)
  cached = model.blocks[0].attention.cached_key[...].sharding
  heads = "tensor" if "tensor" in axes else None
  assert cached.spec[2] == heads
  shards = int(np.prod([n for a, n in axes.items() if a != "tensor"]))
  assert cached.shard_shape((BATCH, LENGTH, 8, 2))[0] == BATCH // shards


WINDOW = 3


class Grouped(nnx.Module):
  """Two queries for each key, a window of positions, and a cache that is an argument; fit for Explicit."""

  def __init__(self):
    rngs, normal = nnx.Rngs(0), nnx.initializers.normal(0.5)
    weight = lambda names, *shape: nnx.Param(normal(rngs.params(), shape, jnp.float32), out_sharding=names)
    self.embed = weight((None, "embed"), VOCABULARY, FEATURES)
    self.query = weight(("embed", "heads", None, None), FEATURES, 8, 2, 4)
    self.key = weight(("embed", "heads", None), FEATURES, 8, 4)
    self.value = weight(("embed", "heads", None), FEATURES, 8, 4)
    self.head = weight(("heads", None, None, None), 8, 2, 4, VOCABULARY)

  def __call__(self, tokens, position, cache):
    part = lambda x, equation, weight, *names: jnp.einsum(equation, x, nxp.constrain(weight[...], *names))
    x = part(jax.nn.one_hot(tokens[:, 0], VOCABULARY), "bv,vf->bf", self.embed, None, None)
    q = part(x, "bf,fhgd->bhgd", self.query, None, "heads", None, None)
    new = [part(x, "bf,fhd->bhd", w, None, "heads", None) for w in (self.key, self.value)]
    here = (jnp.arange(WINDOW) == position % WINDOW)[None, :, None, None]
    k, v = (jnp.where(here, x[:, None], old) for x, old in zip(new, cache, strict=True))
    seen = (jnp.arange(WINDOW) <= position)[None, None, None]
    weights = nnx.softmax(jnp.where(seen, jnp.einsum("bhgd,bshd->bhgs", q, k), -jnp.inf))
    y = jnp.einsum("bhgs,bshd->bhgd", weights, v)
    y = nxp.constrain(y, "batch", None, None, None)
    logits = part(y, "bhgd,hgdv->bv", self.head, None, None, None, None)
    return logits[:, None], (k, v)


def ring(batch, length):
  """A window is shorter than what is generated."""
  assert length > WINDOW
  empty = nxp.constrain(jnp.zeros((batch, WINDOW, 8, 4)), "batch", None, "heads", None)
  return empty, empty


def of_window():
  """The plain loop: each row and token by itself, on one device, with the last keys of all positions."""
  model = nxp.unsharded(Grouped)
  embed, query, key, value, head = (
    np.asarray(x[...], np.float64) for x in (model.embed, model.query, model.key, model.value, model.head)
  )
  found = []
  for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
    tokens = [*map(int, prompt[:length])]
    for _ in range(NEW):
      x = embed[tokens[-WINDOW:]]
      q = np.einsum("f,fhgd->hgd", x[-1], query)
      scores = np.einsum("hgd,sf,fhd->hgs", q, x, key)
      weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
      y = np.einsum("hgs,sf,fhd->hgd", weights, x, value)
      tokens.append(int(np.argmax(np.einsum("hgd,hgdv->v", y, head))))
    found.append(tokens[length:])
  return found


@pytest.mark.cases(2)
@pytest.mark.parametrize(
  ("layout", "explicit"), [("dp", False), ("fsdp", True), ("tensor", False), ("both", True)]
)
def test_a_cache_that_is_an_argument(layout, explicit):
  axes = LAYOUTS[layout]
  model = placed(nxp.plan(Grouped, nxp.make_mesh(axes, explicit=explicit), rules_for(axes)[::2]))
  generate = nxp.generator(NEW, call=stating if explicit else Grouped.__call__, cache=ring)
  assert rows(generate(model, PROMPTS, lengths=LENGTHS)) == of_window()
  assert ("Explicit" in str(generate.layers)) == explicit


def stating(model, tokens, position, cache):
  """The same, with a sharding that only Explicit axes take."""
  whole = jax.reshard(model.head[...], jax.P(None, None, None, None))
  axis = jax.sharding.get_abstract_mesh().axis_names[0]
  logits, cache = model(jax.reshard(tokens, jax.P(axis)), position, cache)
  return logits + 0 * whole.sum(), cache


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["explicit", "mixed"])
@pytest.mark.parametrize("layout", ["fsdp", "both"])
def test_a_stock_model_on_explicit_axes(layout, kind):
  axes, explicit = LAYOUTS[layout], jax.sharding.AxisType.Explicit
  kinds = [explicit, *[explicit if kind == "explicit" else jax.sharding.AxisType.Auto] * (len(axes) - 1)]
  mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(*kinds,))
  model = placed(nxp.plan(Model, mesh, rules_for(axes)))
  generate = nxp.generator(NEW, sampling=DRAWN)
  for _ in range(2):
    found = generate(model, PROMPTS, lengths=LENGTHS, key=jax.random.key(7))
    assert rows(found) == expected(DRAWN, ())
  assert found.tokens.sharding.mesh == mesh
  assert "computed on Auto axes" in str(generate.layers)


def test_of_equal_logits_as_many_are_drawn_from_as_asked():
  logits, keys = jnp.zeros((64, 24), jnp.bfloat16), jax.random.split(jax.random.key(0), 64)
  for sampling, count in ((nxp.Sampling(1.0, top_k=1), 1), (nxp.Sampling(1.0, top_k=3), 3)):
    assert len({*sampling.choose(logits, keys).tolist()}) == count
  assert len({*nxp.Sampling(1.0, top_p=0.2).choose(logits, keys).tolist()}) == 5


def test_equal_prompts_of_several_shards_draw_different_tokens():
  axes = LAYOUTS["dp"]
  model = placed(nxp.plan(Model, nxp.make_mesh(axes), rules_for(axes)))
  generate = nxp.generator(NEW, sampling=nxp.Sampling(temperature=3.0))
  found = rows(generate(model, np.ones((BATCH, 1), np.int32), key=jax.random.key(0)))
  assert len(set(map(tuple, found))) == BATCH


class Counting(nnx.Module):  # Its cache counts the tokens that it has read; its logits repeat the last token
  def __init__(self, kind=nnx.Cache):
    self.read = kind(jnp.zeros((), jnp.int32))

  def __call__(self, tokens):
    self.read[...] += 1
    return jax.nn.one_hot(tokens, VOCABULARY)


def test_it_ends_when_every_row_has_ended_and_compiles_once():
  model, traced = Counting(), []

  def call(model, tokens, position):
    traced.append(position)
    return model(tokens)

  generate = nxp.generator(100, stop=[3, 4], call=call)
  result = generate(model, np.array([[3, 3], [1, 4]]))
  assert rows(result) == [[3], [4]]
  assert int(model.read[...]) == 2
  count = len(traced)
  before = model.read[...]
  assert rows(generate(model, np.array([[4, 0], [2, 4]]), lengths=np.array([1, 2]))) == [[4], [4]]
  assert len(traced) == count
  assert before.is_deleted()


def attention(length=4):
  model = nnx.MultiHeadAttention(1, 2, decode=True, rngs=nnx.Rngs(0))
  model.init_cache((2, length, 2))
  return model


ONES = np.ones((2, 3), np.int32)
WRONG = {
  "no cache": (lambda: nxp.generator(1)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ONES), "has no nnx.Cache"),
  "too long": (lambda: nxp.generator(3)(attention(), ONES), "max_new_tokens=2"),
  "no room": (lambda: nxp.generator(1)(attention(2), ONES), "need a cache of length 3; it has 2"),
  "batch": (lambda: nxp.generator(1)(attention(), np.ones((3, 1), int)), "3 prompts, and .* is for 2"),
  "stop": (lambda: nxp.generator(1, stop=[2.0]), r"got stop=\[2\.0\]"),
  "prompts": (lambda: nxp.generator(1)(Counting(), np.ones((2, 3))), "prompts are float64"),
  "large prompts": (lambda: nxp.generator(1)(Counting(), np.full((1, 2), 2**31)),
    "prompts: 2147483648 to 2147483648 do not fit in int32"),
  "large requests": (lambda: nxp.generator(1)(Counting(), ONES, requests=np.array([1, 2**40])),
    "requests: 1 to 1099511627776 do not fit"),
  "one prompt": (lambda: nxp.generator(1)(Counting(), np.ones(3, int)), r"shape \(3,\)"),
  "lengths": (lambda: nxp.generator(1)(Counting(), ONES, lengths=np.array([0, 1])), "has length 0"),
  "number of lengths": (lambda: nxp.generator(1)(Counting(), ONES, lengths=np.array([1])),
    "each of 2 prompts"),
  "key": (lambda: nxp.generator(1, sampling=DRAWN)(Counting(), ONES), "no key is given"),
  "state": (lambda: nxp.generator(1)(WithState(), ONES), "changed model.count, which no nnx.Cache"),
  "logits": (lambda: nxp.generator(1, call=lambda m, x, p: m(x)[:, 0])(Counting(), ONES),
    r"returned \(2, 32\)"),
  "module": (lambda: nxp.generator(1)(nnx.state(Counting()), ONES), "Fix: model: a live module"),
  "nothing new": (lambda: nxp.generator(0), "max_new_tokens=0"),
  "no count": (lambda: nxp.generator(None), "max_new_tokens=None"),
  "a fraction": (lambda: nxp.generator(1, prefill=2.5), "prefill=2.5"),
  "seed": (lambda: nxp.generator(1, sampling=DRAWN)(Counting(), ONES, key=0), "key=0 is not a key"),
  "side": (lambda: nxp.generator(1, padding="both"), "got padding='both'"),
  "cache": (lambda: nxp.generator(1, cache=ring), "no call= takes it"),
  "temperature": (lambda: nxp.Sampling(temperature=-1.0), "temperature=-1.0 is out of range"),
  "filter": (lambda: nxp.Sampling(top_k=3), "need a temperature"),
}  # fmt: skip


class WithState(Counting):
  def __init__(self):
    super().__init__()
    self.count = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, tokens):
    self.count[...] += 1
    return super().__call__(tokens)


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
  call, text = WRONG[case]
  with pytest.raises(nxp.errors.DecodeError, match=text):
    call()


def test_a_raw_key_is_not_split_as_rows_are():
  model = placed(nxp.plan(Counting, nxp.make_mesh(data=8), [nxp.replicate()]))
  prompts = np.tile(ONES, (4, 1))
  generate = nxp.generator(2, sampling=DRAWN)
  raw, typed = (generate(model, prompts, key=key) for key in (jax.random.PRNGKey(3), jax.random.key(3)))
  np.testing.assert_array_equal(raw.tokens, typed.tokens)
