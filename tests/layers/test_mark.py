"""The marks of layers: a class stays the user's, and flax's transforms keep the marks of modules."""

import functools
import inspect
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from layers.nets import Layer, Net, X, host_arrays, in_turn, loss, names, same, trace
from nnx_parallel.core.jaxprs import equations, is_marked
from nnx_parallel.layers.layers import LayerOptions
from nnx_parallel.layers.mark import is_batched, marked
from nnx_parallel.layers.stacks import Stacks


class Block(nnx.Module):  # One product
  def __init__(self, rngs):
    self.linear = nnx.Linear(4, 4, rngs=rngs)

  def __call__(self, x, *, scale: float = 1.0):
    return scale * jnp.tanh(self.linear(x))


REGISTRY = {}


class Registered(nnx.Module):  # A base whose subclasses must have a new name
  def __init_subclass__(cls, named, **options):
    super().__init_subclass__(**options)
    if named in REGISTRY:
      raise ValueError(f"{named} is registered twice")
    REGISTRY[named] = cls


class Named(Registered, named="block"):
  __init__ = Block.__init__

  def __call__(self, x):
    return jnp.tanh(self.linear(x))


class Plain(nnx.Module, pytree=False):  # Is no pytree
  __init__ = Block.__init__

  def __call__(self, x):
    return jnp.tanh(self.linear(x))


class Inner(Layer):  # Calls its base
  def __call__(self, x):
    return super().__call__(x) * 2


class Inherited(Inner):
  """Has the `__call__` of its base."""


class Recomputed(nnx.Module):  # Its `__call__` is not a plain function
  __init__ = Block.__init__
  __call__ = nnx.jit(lambda self, x: jnp.tanh(self.linear(x)))


class Other(nnx.Module):
  __init__ = Block.__init__

  def __call__(self, x):
    return jnp.sin(self.linear(x))


@functools.cache
def factor(kind):
  return {Block: 2.0, Plain: 3.0}[kind]


@functools.singledispatch
def applied(block, x):
  raise TypeError(type(block))


applied.register(Block)(lambda block, x: x + block(x))


def through(call):
  return lambda layers, x: functools.reduce(lambda x, layer: call(layer, x), layers, x)


def stacked_in_the_call(layers, x):
  stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
  return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)


def with_signature(layers, x):
  assert str(inspect.signature(layers[0])) == "(x, *, scale: float = 1.0)"
  assert [*inspect.signature(Block.__call__).parameters] == ["self", "x", "scale"]
  assert pickle.loads(pickle.dumps(Layer)) is Layer
  return in_turn(layers, x)


CLASSES = {
  "exact class": (Block, through(lambda b, x: x + b(x) if type(b) is Block else b(x))),
  "class attribute": (Block, through(lambda b, x: x + b(x) if b.__class__ is Block else b(x))),
  "table": (Block, through(lambda b, x: {Block: lambda: x + b(x), Other: lambda: b(x)}[type(b)]())),
  "registry": (Named, through(lambda b, x: x + b(x) if type(b) is REGISTRY["block"] else b(x))),
  "cache": (Block, through(lambda b, x: b(x) * factor(type(b)))),
  "single dispatch": (Block, through(applied)),
  "no pytree": (Plain, through(lambda b, x: b(x) * factor(type(b)))),
  "name": (Block, through(lambda b, x: x + b(x) if type(b).__qualname__ == "Block" else b(x))),
  "structures": (Block, stacked_in_the_call), "signature": (Block, with_signature), "base": (Inner, in_turn),
  "inherited": (Inherited, in_turn),
  "base called directly": (Inherited, through(lambda b, x: x + Layer.__call__(b, x))),
  "jitted call": (Recomputed, in_turn),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_of_a_layer_is_the_users(name):
  kind, run = CLASSES[name]
  before = [(vars(c).copy(), c.__subclasses__()) for c in (kind, Layer, nnx.Module)]
  net = Net(4, run, lambda rngs, n: kind(rngs))
  done = same(net, remat="full", scan_layers=False)
  assert "remat full in each layer" in done
  assert [(vars(c), c.__subclasses__()) for c in (kind, Layer, nnx.Module)] == before
  jaxpr, _ = trace(net, remat="full", scan_layers=False)
  plain, _ = trace(net)
  assert names(jaxpr).count("tanh") > names(plain).count("tanh")


class Scaled(Layer):  # Has a factor
  def __call__(self, x):
    return super().__call__(x) * 0.5


class Failing(Layer):  # Raises
  def __call__(self, x):
    raise ValueError("no layer")


def test_an_exception_leaves_the_class_as_it_was():
  net = Net(2, in_turn, Failing)
  before = vars(Failing).copy()
  with pytest.raises(ValueError, match="no layer"):
    nxp.with_layers(loss, remat="full")(net, X)
  assert vars(Failing) == before
  assert all(type(layer) is Failing for layer in net.layers)


def test_threads_mark_their_own_models():
  """Two trace at once, and the thread that began first ends first; a third calls the class as it is."""
  results, nets = {}, {kind: Net(4, in_turn, Layer) for kind in ("first", "second", "plain")}
  nets["scaled"] = Net(4, in_turn, Scaled)
  inside, call = threading.Barrier(4, timeout=60), Layer.__call__

  def slow(model, x):
    inside.wait()
    value = loss(model, x)
    inside.wait()
    return value

  def run(kind):
    options = {} if kind == "plain" else {"remat": "full"}
    results[kind] = trace(nets[kind], of=slow, **options)[0]

  threads = [threading.Thread(target=run, args=(kind,)) for kind in nets]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert Layer.__call__ is call
  for kind, net in nets.items():
    options = {} if kind == "plain" else {"remat": "full"}
    assert str(results[kind]) == str(trace(net, **options)[0])


class Parts(nnx.Module):  # A block of parts whose names end in numbers
  def __init__(self, rngs):
    self.part1, self.part2 = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return x + self.drop(jnp.tanh(self.part2(jnp.sin(self.part1(x)))))


def nnx_scan(model, x):
  return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model.blocks)


def lax_scan(model, x):
  graphdef, state = nnx.split(model.blocks)
  return jax.lax.scan(lambda x, state: (nnx.merge(graphdef, state)(x), None), x, state)[0]


def lax_scan_of_parameters(model, x):
  graphdef, params, rest = nnx.split(model.blocks, nnx.Param, ...)
  rest = jax.tree.map(lambda a: a[0], rest)
  return jax.lax.scan(lambda x, p: (nnx.merge(graphdef, p, rest, copy=True)(x), None), x, params)[0]


def of_residuals(model, x):
  def step(x, block):
    x = x + block(x)
    return x, x.mean()

  x, means = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(x, model.blocks)
  return x * means.sum()


def backwards(model, x):
  step = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, reverse=True)
  return step(x, model.blocks)


def in_vmap(model, x):
  return nnx.vmap(lambda model, x: nnx_scan(model, x[None])[0], in_axes=(None, 0))(model, x)


def clone(model, x):
  return nnx_scan(nnx.Dict(blocks=nnx.clone(model.blocks)), x)


SCANS = [nnx_scan, lax_scan, lax_scan_of_parameters, of_residuals, backwards, in_vmap, clone]


class Stacked(nnx.Module):  # Blocks that `nnx.vmap` makes, stacked along an axis of their Parameters
  def __init__(self, run=nnx_scan, depth=4, axis=0, kind=Parts):
    make = nnx.vmap(kind, in_axes=0, out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}))
    self.blocks = make(nnx.Rngs(0).split(depth))
    self.run = run

  def __call__(self, x):
    return self.run(self, x)


def along_the_second_axis(model, x):
  axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
  return nnx.scan(lambda b, x: b(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(model.blocks, x)


@pytest.mark.cases(4)
@pytest.mark.parametrize("run", [*SCANS, along_the_second_axis])
def test_stacked_layers_keep_their_marks_in_a_scan(run):
  net = Stacked(run, axis=int(run is along_the_second_axis))
  done = same(net, remat="full")
  where = "of the model's scan of 4" if run is not in_vmap else ""
  assert done.strip().startswith(f"blocks: remat full in each layer {where}".strip())
  jaxpr, plain = trace(net, remat="full")[0], trace(net)[0]
  assert names(jaxpr).count("tanh") - names(plain).count("tanh") == 1  # in the body of the scan


def in_python(model, x):
  for n in range(4):
    x = jax.tree.map(lambda a, n=n: a[n], model.blocks)(x)
  return x


def test_slices_of_stacked_layers_that_python_calls_are_scanned():
  done = same(Stacked(in_python, kind=Block), remat="full")
  assert done.strip() == "blocks to blocks: one scan of 4; remat full"


@pytest.mark.parametrize("stacks", [True, False])
def test_slices_of_other_modules_are_marked_only_where_asked(stacks):
  net = Stacked(in_python, kind=Block)
  with marked(net, [], nxp.Remat("none"), stacks=stacks):
    program = jax.make_jaxpr(net)(X)
  assert any(map(is_marked, equations(program))) == stacks


class Tall(nnx.Sequential):  # Layers in a list, or stacked
  def __init__(self, rngs, depth=4):
    super().__init__(*(Block(rngs) for _ in range(depth)))


def ensemble(model, x):
  return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(model.blocks, x).sum(0)


def test_a_member_of_an_ensemble_is_no_layer_but_has_layers():
  net = Stacked(ensemble, depth=3, kind=Tall)
  assert "blocks.layers.0 to blocks.layers.3: remat full in each layer\n" in same(net, remat="full")
  with pytest.raises(nxp.errors.TrainError, match="finds no layer in the loss"):
    trace(Stacked(ensemble, kind=Block), remat="full")


def test_parts_of_a_stacked_layer_are_no_layers():
  """Norms in a list, for example, whose stacked scales look like matrices."""
  assert trace(Stacked(), remat="full")[1].found == ()
  assert str(trace(Stacked(), remat="none")[1]) == "as written"


def test_the_carry_of_a_scan_of_the_model_is_offloaded():
  net = Stacked()
  assert same(net, remat="offload").strip() == "blocks: remat offload in each layer of the model's scan of 4"
  jaxpr = trace(net, remat="offload")[0]
  assert host_arrays(jaxpr) == 1
  assert names(jaxpr).count("tanh") - names(trace(net)[0]).count("tanh") == 1
  # A scan keeps its passes apart, and a barrier in each pass would stop fusions.
  assert {e.params["prevent_cse"] for e in equations(jaxpr) if "prevent_cse" in e.params} == {False}


def test_marks_of_equal_layers_are_equal_for_a_jit_of_the_model():
  """Else it would be traced for each of them."""
  calls = []

  @nnx.jit
  def of(layer, x):
    calls.append(layer)
    return layer(x)

  def run(layers, x):
    for layer in layers:
      x = of(layer, x)
    return x

  trace(Net(4, run, lambda rngs, n: Layer(rngs)), remat="full")
  assert len(calls) == 1


@pytest.mark.parametrize("remat", [nxp.Remat("full", every=2), nxp.Remat("dots", group=2)], ids=str)
def test_a_scan_of_the_model_has_one_body(remat):
  with pytest.raises(nxp.errors.TrainError, match=r"does not apply to a scan of the model(.|\n)*nnx\.List"):
    trace(Stacked(), remat=remat)


class Mixed(Stacked):  # A scan over arrays, a part of its own under a checkpoint, and blocks
  def __init__(self):
    super().__init__(kind=Block)
    self.kernels = nnx.Param(jnp.ones((3, 4, 4)) / 4)

  def __call__(self, x):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.kernels[...])[0]
    return nnx_scan(self, jax.checkpoint(jnp.sin)(x))


def test_what_stays_as_written_is_said():
  checkpoint = "  parts under nnx.remat or jax.checkpoint: as written"
  assert str(trace(Mixed(), remat="none")[1]) == checkpoint
  assert str(trace(Mixed(), remat="full")[1]).splitlines() == [
    "  a scan of 3 without modules: as written; nnx.remat on its body recomputes it",
    checkpoint,
    "  blocks: remat full in each layer of the model's scan of 4",
  ]


def test_a_policy_inside_a_checkpoint_of_the_model_says_so():
  def run(model, x):
    graphdef, state = nnx.split(model.blocks)
    layer = jax.checkpoint(lambda x, state: nnx.merge(graphdef, state)(x))
    return jax.lax.scan(lambda x, state: (layer(x, state), None), x, state)[0]

  done = str(trace(Stacked(run, kind=Block), remat="dots")[1])
  assert done.endswith("of the model's scan of 4, inside jax.checkpoint, which stays as written")


BODIES = [
  lambda net, x: jax.checkpoint(jnp.sin)(x @ net.kernels[...][0]),
  lambda net, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, net.kernels[...])[0],
]


@pytest.mark.parametrize("body", BODIES, ids=["checkpoint", "scan"])
def test_a_policy_for_nothing_but_what_stays_as_written_is_refused(body):
  with pytest.raises(nxp.errors.TrainError, match=r"other scans, and parts under nnx\.remat, stay as"):
    trace(Mixed(), of=lambda net, x: body(net, x).sum(), remat="full")


class Recomputing(Block):  # Is recomputed as the model is written
  __call__ = nnx.remat(lambda self, x: jnp.tanh(self.linear(x)))


def test_a_checkpoint_of_the_model_stays_within_another_policy():
  net = Net(4, in_turn, lambda rngs, n: Recomputing(rngs))
  said = "parts under nnx.remat or jax.checkpoint: as written"
  assert said in same(net, remat="dots")
  assert said in same(net, remat="none")
  assert said not in same(net, remat="full")
  assert said not in same(Net(4, in_turn, lambda rngs, n: Block(rngs)), remat="dots")
  counts = {p: names(trace(net, remat=p, scan_layers=False)[0]).count("tanh") for p in (None, "none", "full")}
  assert counts["none"] == counts[None] == counts["full"]


def printing(layer, x, out):
  jax.debug.callback(lambda mean, out=out: out.append(float(mean)), x.mean())
  jax.debug.print("mean {}", x.mean())
  return jnp.tanh(layer.linear(x))


OUT = []


class Printing(Block):
  def __call__(self, x):
    return printing(self, x, OUT)


class Keeping(Block):
  def __init__(self, rngs, n):
    super().__init__(rngs)
    self.n = n

  def __call__(self, x):
    return printing(self, x, lambda: self.n)


def test_layers_that_print_are_scanned():
  net = Net(4, in_turn, lambda rngs, n: Printing(rngs))
  OUT.clear()
  value = nxp.with_layers(loss, scan_layers=True)(net, X)
  jax.effects_barrier()
  assert len(OUT) == 4
  np.testing.assert_allclose(value, loss(net, X), rtol=1e-6)
  assert "layers.0 to layers.3: one scan of 4" in str(trace(net, scan_layers=True)[1])


def test_callbacks_that_differ_are_named():
  net = Net(4, in_turn, Keeping)
  said = "layers.0 and layers.1 differ: debug_callback partitioned=False with another callback"
  assert said in str(trace(net, remat="full")[1])


def with_options(model, batch, train, *, scale=1.0, names=("x",), heads=None):
  assert isinstance(train, bool)
  x = batch[names[0]] * (heads or 1)
  return (model(x) ** 2).sum() * scale if train else model(x).sum()


@pytest.mark.parametrize("options", [{}, {"remat": "full"}, {"scan_layers": True}], ids=str)
def test_a_changed_loss_takes_flags_and_keywords(options):
  net, batch = Net(4, in_turn, lambda rngs, n: Block(rngs)), {"x": X, "kind": "text"}
  changed = nxp.with_layers(with_options, **options)
  for args, more in (
    ((batch, True), {"scale": 2.0}),
    ((batch, False), {}),
    ((batch,), {"train": True, "heads": 2}),
  ):
    np.testing.assert_allclose(changed(net, *args, **more), with_options(net, *args, **more), 1e-4)
  scale = jax.grad(lambda s: changed(net, batch, True, scale=s))(2.0)
  np.testing.assert_allclose(scale, with_options(net, batch, True), rtol=1e-5)


def test_a_second_model_of_a_changed_loss_changes_too():
  """A teacher in another argument, whose layers count their calls."""
  distill = lambda model, teacher, x: ((model(x) - teacher(x)) ** 2).sum()
  (a, b), (c, d) = ((Net(2, in_turn), Net(2, in_turn)) for _ in range(2))
  distill(a, b, X)
  nxp.with_layers(distill, remat="full")(c, d, X)
  for plain, changed in ((a, c), (b, d)):
    jax.tree.map(np.testing.assert_allclose, nnx.state(plain), nnx.state(changed))


class Towers(nnx.Module):
  """Two towers of layers, or one that is called twice; their random streams may be shared."""

  def __init__(self, depth, twice, kind=Block):
    rngs = nnx.Rngs(0)
    self.a, self.b, self.twice = Tall(rngs, depth), Tall(rngs, depth), twice

  def __call__(self, x):
    return self.a(x) + (self.a if self.twice else self.b)(jnp.cos(x))


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("twice", [False, True])
def test_towers_are_not_the_layers_of_a_chain(depth, twice):
  done = str(trace(Towers(depth, twice), scan_layers=True)[1])
  other = "a" if twice else "b"
  for tower in ("a", other):
    assert f"{tower}.layers.0 to {tower}.layers.{depth - 1}: one scan of {depth}\n" in done + "\n"
  assert f"{other}.layers.0 reads no result of a.layers.{depth - 1}" in done


def test_a_tower_is_a_pipeline():
  net = Towers(4, False)

  def marked(x):
    with LayerOptions(scan_layers=True).marking(net):
      return net(x)

  assert Stacks(jax.make_jaxpr(marked)(X)).largest().name == "a.layers.0 to a.layers.3"


def test_a_hidden_dim_of_vmap_is_seen():
  seen = []
  jax.vmap(lambda x, y: seen.extend(map(is_batched, (x, y))) or x, in_axes=(0, None))(X, X)
  jax.jit(lambda x: seen.append(is_batched(x)) or x)(X)
  jax.jit(lambda x: jax.lax.scan(lambda c, row: (c, seen.append(is_batched(row))), 0, x))(X)
  assert seen == [True, False, False, False]
