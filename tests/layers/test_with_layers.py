"""The calls of layers in a trace, on one device: equal in value, gradient and state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from layers.nets import Layer, Net, X, each, found, host_arrays, in_turn, loss, names, same, trace
from nnx_parallel.core.jaxprs import equations

SCALES = np.linspace(0.5, 2, 12).astype(np.float32).reshape(1, 3, 4)
MASK = jnp.array([True, False, True])[:, None]


def densely(layers, x):
  seen = [x]
  for layer in layers:
    seen.append(layer(sum(seen)))
  return seen[-1]


def mapped(layers, x):
  for layer in layers:
    x = nnx.vmap(lambda layer, x: jnp.tanh(layer.linear(x)), in_axes=(None, 0))(layer, x)
  return layers[0](x)


def two_results(layers, x):
  total = 0.0
  for layer in layers:
    x = layer(x)
    total = total + x.sum()
  return x * total


flags = each(lambda layer, x, n: layer(x, MASK, flag=n % 2 == 1))
factors = each(lambda layer, x, n: layer(x, factor=1.0 + n))
changed_between = each(lambda layer, x, n: layer(x) * (n + 1))
with_more = each(lambda layer, x, n: layer(x, MASK if n % 2 else None, factor=1.0 + n))
mask_for_each = each(lambda layer, x, n: layer(x, jnp.arange(3)[:, None] != n))

RUNS = {
  "in turn": (in_turn, "layers.0 to layers.4: one scan of 5"),
  "reversed": (lambda layers, x: in_turn(reversed(layers), x), "layers.4 to layers.0: one scan of 5"),
  "some skipped": (lambda layers, x: in_turn(layers[1:], x), "layers.1 to layers.4: one scan of 4"),
  "repeated": (lambda layers, x: in_turn([*layers, *layers], x), "one scan of"),
  "one shared": (lambda layers, x: in_turn([layers[0]] * 4, x), "layers.0 to layers.0: one scan of 4"),
  "flags": (flags, "layers.0 to layers.3: one scan of 2, 2 layers each"),
  "a mask for each": (mask_for_each, "one scan of 5"),
  "each result used": (two_results, "one scan of 5"),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", RUNS)
def test_calls_of_layers_keep_their_meaning(name):
  run, scanned = RUNS[name]
  assert scanned in same(Net(5, run), scan_layers=True, remat="full")


def side_by_side(layers, x):
  return sum(layer(x) for layer in layers)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("remat", [None, nxp.Remat("full", every=2), nxp.Remat("full", group=2)], ids=str)
def test_any_depth(depth, remat):
  same(Net(depth, in_turn), scan_layers=True if remat is None else "auto", remat=remat)


@pytest.mark.parametrize(
  ("run", "why"),
  [
    (factors, "layers.0 and layers.1 differ: mul"),
    (
      with_more,
      "layers.0 and layers.1 differ in the arrays that they get: none (4 arrays) / bool[3,1] (5 arrays)",
    ),
    (changed_between, "mul between layers.0 and layers.1 changes an input of the second"),
    (lambda layers, x: in_turn(layers[:3], x), "layers.0 to layers.2: 3 layers, and a scan has 4 or more"),
    (side_by_side, "layers.1 reads no result of layers.0"),
    (densely, "add between layers.0 and layers.1 changes an input of the second"),
    (mapped, ""),
  ],
)
def test_what_is_no_chain_of_equal_layers_is_not_scanned_and_a_step_says_why(run, why):
  assert (f"\n  not scanned: {why}" if why else "") in same(Net(4, run), remat="full")
  assert "scan" not in names(trace(Net(4, run), remat="full")[0])


def test_a_scan_needs_equal_layers():
  text = r"(?s)finds no consecutive equal layers.*mul between layers.0 and layers.1 .*Fix: move it into the"
  with pytest.raises(nxp.errors.TrainError, match=text):
    trace(Net(2, changed_between), scan_layers=True)
  with pytest.raises(nxp.errors.TrainError, match=r"no adjacent modules have one class and structure\n"):
    nxp.with_layers(loss, scan_layers=True)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), X)


class Raw(nnx.Module):  # Holds a plain array, and keeps its input where it is told to
  def __init__(self, rngs, index=0):
    self.linear = nnx.Linear(4, 4, rngs=rngs)
    self.table = jnp.linspace(0.5, 1.5, 4).reshape(1, 1, 4)

  def __call__(self, x, keeps=False):
    if keeps:
      self.seen = nnx.Intermediate(x)
    return x + self.table * jnp.tanh(self.linear(x))


def of_row(model, x):
  return (model(x[None]) ** 2).sum()


IN_TRANSFORMS = {
  "jax.vmap": (lambda model, x: jax.vmap(lambda row: of_row(model, row))(x).sum(), ""),
  "nnx.vmap": (lambda model, x: nnx.vmap(of_row, in_axes=(None, 0))(model, x).sum(), ""),
  "jax.jit": (lambda model, x: jax.jit(lambda x: loss(model, x))(x), ""),
  "nnx.jit": (lambda model, x: nnx.jit(loss)(model, x), ""),
  "jax.grad": (lambda model, x: (jax.grad(lambda x: loss(model, x))(x) ** 2).sum(), ""),
  "jax.checkpoint": (lambda model, x: jax.checkpoint(lambda x: loss(model, x))(x), "; inside jax.checkpoint"),
  "nnx.remat": (lambda model, x: nnx.remat(loss)(model, x), "; inside jax.checkpoint"),
  "jax.lax.map": (lambda model, x: jax.lax.map(lambda row: of_row(model, row), x).sum(), "; inside a scan"),
  "both": (
    lambda model, x: jax.lax.map(jax.checkpoint(lambda row: of_row(model, row)), x).sum(),
    "; inside jax.checkpoint",
  ),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", IN_TRANSFORMS)
def test_layers_inside_another_transform_are_found_and_scanned(name):
  of, where = IN_TRANSFORMS[name]
  done = same(Net(4, in_turn, Raw), of, remat="full")
  assert f"layers.0 to layers.3: one scan of 4; remat full{where}" in done.splitlines()[1]


def test_a_layer_that_makes_variables_in_its_call():
  net = Net(4, lambda layers, x: functools.reduce(lambda x, layer: layer(x, True), layers, x), Raw)
  got = nxp.with_layers(loss, remat="full")(net, X)
  np.testing.assert_allclose(got, loss(net, X), rtol=1e-5)


def in_branch(model, x):
  return jax.lax.cond(x.sum() > 0, lambda x: loss(model, x), lambda x: x.sum(), x)


def test_layers_in_a_branch_are_recomputed_but_not_scanned():
  net = Net(4, in_turn, Raw)
  assert same(net, in_branch, remat="full").endswith("layers.3: remat full in each layer inside cond")
  with pytest.raises(nxp.errors.TrainError, match="scan_layers=True finds no consecutive equal layers"):
    trace(net, of=in_branch, scan_layers=True)


def test_layers_that_are_not_called_are_named():
  of = lambda model, x: (model.layers[0].linear(x) ** 2).sum()
  with pytest.raises(nxp.errors.TrainError, match=r"the loss does not call them as layer\(\.\.\.\)"):
    trace(Net(4, in_turn, Raw), of=of, remat="full")


def test_what_a_loss_only_reads_may_belong_to_a_transform_around_it():
  model, teacher = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(1))
  of = nxp.with_layers(lambda model, x, teacher: ((model(x) - teacher(x)) ** 2).sum(), remat="none")
  found = nnx.grad(lambda model: of(model, X, teacher=teacher))(model)
  jax.tree.map(np.testing.assert_array_equal, found, nnx.grad(of)(model, X, teacher))


class Scaled(Layer):  # Each has a table of its own, which a trace keeps as a constant
  def __call__(self, x):
    return super().__call__(x) * jnp.asarray(np.roll(SCALES, self.index))


class Ruled(Layer):  # Each has a gradient of its own; the text of a trace has its name only
  def __call__(self, x):
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * (self.index + 1),))
    return f(super().__call__(x))


@pytest.mark.parametrize("kind", [Scaled, Ruled])
def test_layers_that_differ_beyond_their_text_are_not_scanned(kind):
  done = same(Net(4, in_turn, kind), remat="full")
  assert "layers.0 and layers.1 differ in a constant, or in a rule of jax.custom_jvp" in done


def test_equality_is_not_that_of_the_text(monkeypatch):
  from jax.extend.core import Jaxpr

  class Alternating(Layer):
    def __call__(self, x):
      return super().__call__(jnp.sin(x) if self.index % 2 else jnp.cos(x))

  monkeypatch.setattr(Jaxpr, "__str__", lambda self: "{ abbreviated }")
  assert "one scan of 2, 2 layers each" in same(Net(4, in_turn, Alternating), scan_layers=True)


class Balanced(Layer):  # A layer that adds to a loss beside it, as mixtures of experts do
  def __call__(self, x, aux):
    x = super().__call__(x)
    return x, aux + (x**2).mean()


def with_aux(first):
  def run(layers, x):
    aux = first
    for layer in layers:
      x, aux = layer(x, aux)
    return x * (1 + aux)

  return run


def test_a_number_that_becomes_an_array():
  array = lambda layers, x: with_aux(jnp.zeros(()))(layers, x)
  assert "layers.0 to layers.4: one scan of 5" in same(Net(5, array, Balanced), scan_layers=True)
  done = same(Net(5, with_aux(0.0), Balanced), scan_layers=True)
  assert "layers.1 to layers.4: one scan of 4" in done
  assert "a number that becomes an array starts from jnp.zeros(()) in the loss" in done


class Counting(Layer):  # Gets an array of which it makes a number
  def __call__(self, x, n):
    return super().__call__(x) / int(n)


def test_a_number_that_python_reads():
  n = jnp.asarray(3)
  net = Net(4, lambda layers, x: functools.reduce(lambda x, f: f(x, n), layers, x), Counting)
  assert "one scan of 4" in same(net, scan_layers=True)


def test_two_shared_layers_in_turn_are_not_stacked():
  jaxpr, used = trace(Net(2, lambda layers, x: in_turn([*layers] * 3, x)), remat="full")
  assert "layers.0 to layers.1: one scan of 3, 2 layers each" in str(used)
  assert not any(eqn.primitive.name == "concatenate" for eqn in equations(jaxpr))


class Other(Layer):  # Another class of the same arrays
  def __call__(self, x):
    return super().__call__(jnp.sin(x))


class Both(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.encoder, self.decoder = (nnx.List([kind(rngs) for _ in range(4)]) for kind in (Layer, Other))

  def __call__(self, x):
    return in_turn([*self.encoder, *self.decoder], x)


def test_layers_of_two_classes_are_no_surprise():
  done = same(Both(), remat="full")
  assert "encoder.0 to encoder.3: one scan of 4" in done
  assert "decoder.0 to decoder.3: one scan of 4" in done
  assert "not scanned" not in done


class Closed(Layer):
  """A gradient that reads an array other than by its arguments, which works as it is written."""

  def __call__(self, x):
    mask = x > 0
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.where(mask, g, 0.0),))
    return f(super().__call__(x))


def test_a_rule_that_closes_over_arrays_is_refused():
  net = Net(4, in_turn, Closed)
  jax.tree.map(np.testing.assert_array_equal, found(net, nxp.with_layers(loss)), found(net, loss))
  with pytest.raises(nxp.errors.TrainError, match=r"a rule of jax\.custom_vjp reads an array"):
    trace(net, remat="full")


NAMED = jax.checkpoint_policies.save_only_these_names("product")
NAMED_ON_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
  names_which_can_be_saved=[], names_which_can_be_offloaded=["product"],
  offload_src="device", offload_dst="pinned_host",
)  # fmt: skip


@pytest.mark.parametrize(("options", "products", "on_host"), [
  ({"remat": "none"}, 0, 0), ({"remat": "full"}, 4, 0), ({"remat": NAMED}, 0, 0),
  ({"remat": NAMED_ON_HOST}, 0, 4), ({"remat": "offload"}, 4, 4),
  ({"remat": nxp.Remat("full", every=2)}, 2, 0), ({"remat": nxp.Remat("full", group=2)}, 4, 0),
], ids=["none", "full", "named", "named on host", "offload", "every second", "groups of 2"])  # fmt: skip
def test_what_each_policy_recomputes_and_moves(options, products, on_host):
  jaxpr, _ = trace(Net(4, in_turn), scan_layers=False, **options)
  plain, _ = trace(Net(4, in_turn))
  assert names(jaxpr).count("dot_general") - names(plain).count("dot_general") == products
  assert host_arrays(jaxpr) == on_host


class NumPy(nnx.Linear):
  def __call__(self, x, places):
    return super().__call__(x)[:, : int(places.max()) + 1]


def of_list(kind, *args):
  rngs = nnx.Rngs(0)
  model = nnx.Dict(layers=nnx.List([kind(rngs) for _ in range(3)]))
  return model, lambda model, x: (each(lambda layer, x, _: layer(x, *args))(model.layers, x) ** 2).sum()


def test_numpy_arguments_of_layers_stay_numpy():
  model, run = of_list(lambda rngs: NumPy(4, 4, rngs=rngs), np.arange(4))
  found = nxp.with_layers(run, remat="full", scan_layers=True)(model, jnp.ones((2, 4)))
  np.testing.assert_allclose(found, run(model, jnp.ones((2, 4))), rtol=1e-6)


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"layers": "typo.*"}, "layers='typo.*' matches no module.\n  modules: layers.* (3), layers"),
    ({"layers": "typo.*", "remat": "none"}, "layers='typo.*' matches no module"),
    ({"scan_layers": 1}, "scan_layers=1 is not a valid choice"),
    ({"remat": False}, "remat=False is not a known policy"),
    (
      {"remat": "dots_saveable"},
      "remat='dots_saveable' is not a known policy.\n  Fix: one of 'as written', 'none', 'dots', 'full',"
      " 'offload', or a policy itself: jax.checkpoint_policies.NAME.",
    ),
    ({"layers": ["blocks.*"]}, "layers=['blocks.*'] is no pattern"),
    ({"attention": "block"}, "attention='block' is not a way to compute attention"),
    ({"attention": 0}, "attention=0 is not a way to compute attention"),
    ({"loss_chunks": 0}, "loss_chunks=0 is not a positive number"),
  ],
)
def test_options_that_mean_nothing_are_refused(options, text):
  model, run = of_list(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  for call in (
    lambda: nxp.with_layers(run, **options)(model, jnp.ones((2, 4))),
    lambda: nxp.train_step(run, **options)(model, optimizer, jnp.ones((2, 4))),
  ):
    with pytest.raises(nxp.errors.TrainError) as error:
      call()
    assert str(error.value).startswith(text)
