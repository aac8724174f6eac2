"""Generation by a pipeline that goes round: the tokens of a plain loop on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import DecodeError, SchemeError, TrainError
from nnx_parallel.layers import pipeline
from tests.decode import test_generate as plain
from training import placed

NEW, LENGTH, VOCABULARY, FEATURES = plain.NEW, plain.LENGTH, plain.VOCABULARY, plain.FEATURES
PROMPTS, LENGTHS = np.concatenate([plain.PROMPTS] * 2), np.concatenate([plain.LENGTHS] * 2)
LAYOUTS = {
  "stages": {"data": 1, "stage": 8},
  "dp": {"data": 4, "stage": 2},
  "both": {"data": 2, "tensor": 2, "stage": 2},
  "uneven": {"data": 1, "tensor": 2, "stage": 4},
}
pytestmark = [pytest.mark.usefixtures("compiled_here"), pytest.mark.slow]


def rules_for(axes, **more):
  tensor = "tensor" if "tensor" in axes else ()
  names = {"embed": (), "heads": tensor, "mlp": tensor, "vocab": tensor}
  return [nxp.LogicalRules(batch="data", **names, **more), plain.CACHES, nxp.replicate()]


class Listed(plain.Model):
  """Flax's own caches, in a list of layers."""

  def __init__(self, rows, depth):
    super().__init__()
    rngs = nnx.Rngs(1)
    self.blocks = nnx.List([plain.Block(rngs) for _ in range(depth)])
    for block in self.blocks:
      block.attention.init_cache((rows, LENGTH, FEATURES))


def stack(rows, depth, length, rngs):
  """Equal layers with their caches, in one module."""

  @nnx.split_rngs(splits=depth)
  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
  def make(rngs):
    block = plain.Block(rngs)
    block.attention.init_cache((rows, length, FEATURES))
    return block

  return make(rngs)


class Stacked(nnx.Module):
  """Stacked layers, whose caches have their rows in dim 1, and a count of tokens outside of them."""

  def __init__(self, rows, depth, length=LENGTH):
    rngs = nnx.Rngs(2)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.places = nnx.Param(jax.random.normal(rngs.params(), (length, FEATURES)))
    self.seen = nnx.Cache(jnp.zeros((), jnp.int32))
    self.blocks = stack(rows, depth, length, rngs)
    self.head = nnx.Linear(FEATURES, VOCABULARY, rngs=rngs, kernel_init=nnx.initializers.normal(1.0))

  def __call__(self, tokens):
    count = tokens.shape[1]
    places = jax.lax.dynamic_slice_in_dim(self.places[...], self.seen[...], count)
    x = self.embed(tokens) + places[None]
    self.seen[...] += count

    @nnx.scan
    def run(x, block):
      return block(x), None

    for blocks in self.stacks():
      x, _ = run(x, blocks)
    return self.head(x)

  def stacks(self):
    return [self.blocks]


class TwoStacks(Stacked):
  """The layers in two stacks, of which one runs after the other."""

  def __init__(self, rows, depth):
    super().__init__(rows, depth // 2)
    self.blocks_after = stack(rows, depth // 2, LENGTH, nnx.Rngs(5))

  def stacks(self):
    return [self.blocks, self.blocks_after]


def piped(**options):
  return nxp.generator(NEW, **{"pipeline": "stage", **options})


@functools.cache
def expected(init, depth, sampling, stop, prefill=1):
  model = nxp.unsharded(lambda: init(len(PROMPTS), depth))
  generate = nxp.generator(NEW, sampling=sampling, stop=stop)
  lengths = np.maximum(LENGTHS, 3) if prefill > 1 else LENGTHS
  found = generate(model, PROMPTS, lengths=lengths, key=jax.random.key(7))
  return plain.rows(found)


def planned(init, depth, axes):
  """A plan for groups of rows; stacked layers lie on their stages."""
  rules = rules_for(axes)
  if issubclass(init, Stacked):
    heads = "tensor" if "tensor" in axes else None
    caches = (r".*\.cached_(key|value)", ("stage", "data", None, heads, None))
    rules = [
      rules_for(axes, layers="stage")[0],
      nxp.PathRules([caches, (r"blocks.*", ("stage", ...))]),
      rules[2],
    ]
  return nxp.plan(lambda: init(len(PROMPTS) // axes["stage"], depth), nxp.make_mesh(axes), rules)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
  ("init", "depth", "layout"),
  [
    (TwoStacks, 8, "both"),
    (Stacked, 8, "both"),
    (Listed, 6, "uneven"),
    (Listed, 6, "dp"),
    (Stacked, 8, "stages"),
  ],
)
@pytest.mark.parametrize(
  ("sampling", "prefill"), [(plain.DRAWN, 2), (plain.GREEDY, 1)], ids=["drawn", "greedy"]
)
def test_tokens_are_those_of_one_device(init, depth, layout, sampling, prefill):
  model = placed(planned(init, depth, LAYOUTS[layout]))
  whole = expected(init, depth, sampling, ())
  stop = (whole[0][2], whole[3][1])
  generate = piped(sampling=sampling, stop=stop, prefill=prefill)
  lengths = np.maximum(LENGTHS, 3) if prefill > 1 else LENGTHS
  found = generate(model, PROMPTS, lengths=lengths, key=jax.random.key(7))
  assert plain.rows(found) == expected(init, depth, sampling, stop, prefill)
  assert ("2 scans of 4:" in str(generate.layers)) == (init is TwoStacks)


@pytest.mark.nightly
def test_after_a_pipeline_the_axis_of_its_stages_splits_the_batch():
  def plan(batch, layers, rule):
    names = dict.fromkeys(("embed", "heads", "mlp", "vocab"), ())
    rules = [nxp.LogicalRules(batch=batch, layers=layers, **names), nxp.PathRules([rule]), nxp.replicate()]
    return nxp.plan(lambda: Stacked(len(PROMPTS), 2), nxp.make_mesh(data=4, stage=2), rules)

  training = plan("data", "stage", (r"blocks\..*", ("stage", ...)))
  rows = r".*\.cached_(key|value)", (None, "batch", None, None, None)
  model = nxp.reshard(placed(training), plan(("data", "stage"), (), rows))
  assert model.blocks.attention.cached_key[...].sharding.shard_shape((2, 16, 9, 8, 2))[1] == 2
  found = nxp.generator(NEW, prefill=2)(model, PROMPTS, lengths=np.maximum(LENGTHS, 3))
  assert plain.rows(found) == expected(Stacked, 2, plain.GREEDY, (), 2)


class Windowed(nnx.Module):
  """A layer with a window of keys and values that is given to it; fit for Explicit axes."""

  def __init__(self, rngs):
    normal = nnx.initializers.normal(0.5)

    def weight(names, *shape):
      return nnx.Param(normal(rngs.params(), shape, jnp.float32), out_sharding=names)

    self.query, self.key, self.value = (weight(("embed", "heads", None), FEATURES, 8, 4) for _ in range(3))
    self.out = weight(("heads", None, "embed"), 8, 4, FEATURES)

  def __call__(self, x, position, cache):
    def made(weight):
      weight = nxp.constrain(weight[...], None, "heads", None)
      return nxp.constrain(jnp.einsum("bf,fhd->bhd", x, weight), "batch", "heads", None)

    here = (jnp.arange(plain.WINDOW) == position % plain.WINDOW)[None, :, None, None]
    new = [made(self.key), made(self.value)]
    k, v = (jnp.where(here, x[:, None], old) for x, old in zip(new, cache, strict=True))
    seen = (jnp.arange(plain.WINDOW) <= position)[None, None]
    weights = nnx.softmax(jnp.where(seen, jnp.einsum("bhd,bshd->bhs", made(self.query), k), -jnp.inf))
    y = nxp.constrain(jnp.einsum("bhs,bshd->bhd", weights, v), "batch", None, None)
    out = jnp.einsum("bhd,hdf->bf", y, nxp.constrain(self.out[...], None, None, None))
    return x + jnp.tanh(nxp.constrain(out, "batch", None)), (k, v)


class Given(nnx.Module):
  """Its caches are an argument, one for each layer."""

  def __init__(self, depth):
    rngs, normal = nnx.Rngs(3), nnx.initializers.normal(1.0)
    self.embed = nnx.Param(normal(rngs.params(), (VOCABULARY, FEATURES)), out_sharding=(None, None))
    self.blocks = nnx.List([Windowed(rngs) for _ in range(depth)])
    self.head = nnx.Param(normal(rngs.params(), (FEATURES, VOCABULARY)), out_sharding=(None, None))

  def __call__(self, tokens, position, caches):
    one = nxp.constrain(jax.nn.one_hot(tokens[:, 0], VOCABULARY), "batch", None)
    x = nxp.constrain(one @ self.embed[...], "batch", None)
    after = []
    for block, cache in zip(self.blocks, caches, strict=True):
      x, cache = block(x, position, cache)
      after.append(cache)
    return (x @ self.head[...])[:, None], after


def windows(depth, batch, length):
  del length
  empty = nxp.constrain(jnp.zeros((batch, plain.WINDOW, 8, 4)), "batch", None, "heads", None)
  return [(empty, empty)] * depth


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("layout", "explicit"), [("dp", True), ("both", False), ("both", True)])
def test_caches_that_are_an_argument(layout, explicit):
  depth, axes = 4, LAYOUTS[layout]
  options = {"call": Given.__call__, "cache": functools.partial(windows, depth)}
  want = nxp.generator(NEW, **options)(nxp.unsharded(lambda: Given(depth)), PROMPTS, lengths=LENGTHS)
  rules = rules_for(axes)[::2]
  model = placed(nxp.plan(lambda: Given(depth), nxp.make_mesh(axes, explicit=explicit), rules))
  found = piped(**options)(model, PROMPTS, lengths=LENGTHS)
  assert plain.rows(found) == plain.rows(want)


class Recomputed(Listed):
  """Its layers are under `nnx.remat`, which returns every Variable that it gets."""

  def __init__(self, rows, depth):
    super().__init__(rows, depth)
    for block in self.blocks:
      block.__class__ = RecomputedBlock


class RecomputedBlock(plain.Block):
  __call__ = nnx.remat(plain.Block.__call__)


@pytest.mark.nightly
def test_layers_under_remat():
  want = expected(Listed, 6, plain.GREEDY, ())
  whole = nxp.unsharded(lambda: Recomputed(len(PROMPTS), 6))
  assert plain.rows(nxp.generator(NEW)(whole, PROMPTS, lengths=LENGTHS)) == want
  model = placed(planned(Recomputed, 6, LAYOUTS["dp"]))
  assert plain.rows(piped()(model, PROMPTS, lengths=LENGTHS)) == want
  single = nxp.unsharded(lambda: Recomputed(1, 6))
  assert plain.rows(nxp.generator(NEW, slots=4)(single, PROMPTS, lengths=LENGTHS)) == want


class Recurrent(nnx.Module):
  """No attention: a state of each layer, and one outside that the last layer changes."""

  def __init__(self, rows):
    rngs = nnx.Rngs(4)
    self.embed = nnx.Embed(VOCABULARY, FEATURES, rngs=rngs)
    self.last = nnx.Cache(jnp.zeros((rows, FEATURES)))
    self.layers = nnx.List([Cell(rows, rngs) for _ in range(5)])

  def __call__(self, tokens):
    x = self.embed(tokens) + self.last[...][:, None]
    for layer in self.layers:
      x = layer(x)
    self.last[...] = x[:, -1] / 2
    return self.embed.attend(x)


class Cell(nnx.Module):
  def __init__(self, rows, rngs):
    self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
    self.state = nnx.Cache(jnp.zeros((rows, FEATURES)))

  def __call__(self, x):
    self.state[...] = jnp.tanh(self.linear(x[:, 0]) + self.state[...])
    return x + self.state[...][:, None]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
  "rules", [nxp.presets.pipeline(min_size=8), nxp.LogicalRules(batch="data")], ids=["split", "whole"]
)
def test_states_that_are_no_attention(rules):
  mesh = nxp.make_mesh(data=2, stage=4)
  model = placed(nxp.plan(lambda: Recurrent(len(PROMPTS) // 4), mesh, rules))
  want = nxp.generator(NEW)(nxp.unsharded(lambda: Recurrent(len(PROMPTS))), PROMPTS, lengths=LENGTHS)
  assert plain.rows(piped()(model, PROMPTS, lengths=LENGTHS)) == plain.rows(want)


def test_one_device_is_one_stage():
  model = nxp.unsharded(lambda: Listed(len(PROMPTS), 6))
  assert plain.rows(piped()(model, PROMPTS, lengths=LENGTHS)) == expected(Listed, 6, plain.GREEDY, ())


def test_a_tick_sends_the_activations_of_one_group():
  axes = {"data": 2, "stage": 4}
  generate = piped()
  prompts = jax.ShapeDtypeStruct(PROMPTS.shape, "int32")
  report = nxp.compile_report(generate, planned(Stacked, 8, axes), batch=prompts)
  weights = 2 * (4 * 16 * 16 + 3 * 16 + 16 + 2 * 16 * 32 + 32 + 16 + 2 * 16) * 4
  caches = 8 * (2 * 4 * LENGTH * FEATURES + 1) * 4
  (line,) = report.layers
  assert line.startswith("a scan of 8: 4 stages of 2 layers over stage, 4 groups of rows go round;")
  held = f"{caches / 1024:.4g} KiB of caches and {weights / 1024:.4g} KiB of weights"
  assert line.endswith(f"on each stage {held}")
  assert str(generate.layers).endswith(line)
  rows = len(PROMPTS) // 4 // 2
  sent = {(c.kind, c.bytes) for c in report.collectives if "stage" in c.axes}
  one = rows * FEATURES * 4
  assert sent == {("collective-permute", one), ("all-gather", 4 * one)}


@pytest.mark.nightly
@pytest.mark.slow
def test_weights_split_over_the_stages_go_to_theirs_once():
  axes = {"data": 2, "stage": 4}
  names = nxp.LogicalRules(batch="data", embed="stage", heads=(), mlp=(), vocab=())
  rules = [names, plain.CACHES, nxp.replicate()]
  plan = nxp.plan(lambda: Listed(len(PROMPTS) // 4, 8), nxp.make_mesh(axes), rules)
  generate = piped()
  report = nxp.compile_report(generate, plan, batch=jax.ShapeDtypeStruct(PROMPTS.shape, "int32"))
  sent = {(c.kind, c.bytes) for c in report.collectives if "stage" in c.axes}
  kernels = {2 * 16 * 16 * 4, 2 * 16 * 32 * 4}
  assert {n for kind, n in sent if kind == "all-to-all"} >= kernels
  assert max(n for kind, n in sent if kind != "all-to-all") <= 4 * len(PROMPTS) // 8 * VOCABULARY * 4
  done = str(generate.layers)
  assert done.startswith("8 x Block at blocks.*\n  blocks.0 to blocks.7: 4 stages of 2 layers")
  assert done.endswith("of weights, moved there in each call")
  found = generate(placed(plan), PROMPTS, lengths=LENGTHS)
  assert plain.rows(found) == expected(Listed, 8, plain.GREEDY, ())


def test_the_head_is_not_gathered():
  axes = {"tensor": 2, "stage": 4}
  names = nxp.LogicalRules(batch=(), embed=(), heads="tensor", mlp="tensor", vocab="tensor")
  plan = nxp.plan(lambda: Listed(1, 4), nxp.make_mesh(axes), [names, plain.CACHES, nxp.replicate()])
  report = nxp.compile_report(piped(), plan, batch=jax.ShapeDtypeStruct((4, 4), "int32"))
  assert {c.bytes < VOCABULARY * 4 for c in report.collectives if "tensor" in c.axes} == {True}


@pytest.mark.nightly
def test_what_a_waiting_stage_computes_is_unused(monkeypatch):
  def poisoned(result, works):
    def nan(x):
      here = works.reshape(-1, *[1] * (x.ndim - 1))
      return jnp.where(here, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(nan, result)

  monkeypatch.setattr(pipeline, "_marked", poisoned)
  model = placed(planned(Listed, 6, LAYOUTS["dp"]))
  found = piped(prefill=2)(model, PROMPTS, lengths=np.maximum(LENGTHS, 3), key=jax.random.key(7))
  assert plain.rows(found) == expected(Listed, 6, plain.GREEDY, (), 2)


class Unlike(Listed):
  """No two layers beside each other."""

  def __call__(self, tokens):
    return self.head(self.blocks[0](self.embed(tokens)))


class Changing(Listed):
  """Counts its calls outside of any cache."""

  def __init__(self, rows, depth):
    super().__init__(rows, depth)
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, tokens):
    self.calls[...] += 1
    return super().__call__(tokens)


NAMES = {"batch": "data", "embed": (), "heads": (), "mlp": (), "vocab": ()}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"slots": 8}, "slots need one"),
    ({"sampling": nxp.Beams(2)}, "beams need one"),
    ({"pipeline": nxp.Pipeline("stage", virtual_stages=2)}, "virtual_stages=2"),
    ({"pipeline": None, "layers": "blocks.*"}, "names the stages of a pipeline"),
  ],
)
def test_options_that_do_not_fit(options, message):
  with pytest.raises(DecodeError, match=message):
    piped(**options)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize(
  ("init", "rows", "rules", "options", "message"),
  [
    (Listed, 4, {}, {"pipeline": "stages"}, "no axis 'stages'"),
    (Listed, 4, {}, {"layers": "layer.*"}, "matches no module"),
    (Unlike, 4, {}, {}, "needs consecutive equal layers"),
    (Changing, 4, {}, {}, r"the call changed model\.calls"),
    (Listed, 4, {"batch": ("data", "stage")}, {}, "stage splits the batch"),
    (Listed, 4, {"mlp": "data"}, {}, "a stage cannot use model.blocks.0.down"),
    (Listed, 3, {}, {}, "the model's cache is for 3"),
  ],
)
def test_models_that_do_not_fit(init, rows, rules, options, message):
  names = nxp.LogicalRules(**{**NAMES, **rules})
  mesh = nxp.make_mesh(data=2, stage=4)
  model = placed(nxp.plan(lambda: init(rows, 4), mesh, [names, nxp.replicate()]))
  with pytest.raises((DecodeError, SchemeError, TrainError), match=message):
    piped(**options)(model, PROMPTS)


def test_rows_fill_all_groups():
  model = placed(planned(Stacked, 8, {"data": 2, "stage": 4}))
  with pytest.raises(DecodeError, match="12 prompts cannot be split over 8 shards") as error:
    piped()(model, PROMPTS[:12])
  assert "a group for each of 4 stages" in str(error.value)
