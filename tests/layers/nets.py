"""Small models of equal layers, and how a changed loss is compared with the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import nnx_parallel as nxp
from nnx_parallel.core.jaxprs import equations
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_options

X = jnp.linspace(-1, 1, 24).reshape(2, 3, 4)


class Layer(nnx.Module):  # A product, a mask, a flag, a factor, and a count of its calls
  def __init__(self, rngs, index=0):
    self.linear = nnx.Linear(4, 4, rngs=rngs)
    self.calls = nnx.BatchStat(jnp.zeros(()))
    self.index = index

  def __call__(self, x, mask=None, *, flag=False, factor=1.0):
    self.calls[...] += x.mean()
    x = x + factor * jnp.tanh(checkpoint_name(self.linear(x), "product"))
    x = x if mask is None else jnp.where(mask, x, 0.0)
    return -x if flag else x


class Net(nnx.Module):  # Layers, called by a function of the list and the input
  def __init__(self, depth, run, kind=Layer):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([kind(rngs, n) for n in range(depth)])
    self.run = run

  def __call__(self, x):
    return self.run(self.layers, x)


def in_turn(layers, x):
  for layer in layers:
    x = layer(x)
  return x


loss = lambda model, x: (model(x) ** 2).sum()


def found(net, loss, x=X):
  """Value, gradients and state after the call."""
  graphdef, params, rest = nnx.split(net, nnx.Param, ...)

  @jax.jit
  def run(params, rest, x):
    def value(params):
      model = nnx.merge(graphdef, params, rest, copy=True)
      return loss(model, x), nnx.state(model, nnx.Not(nnx.Param))

    return jax.value_and_grad(value, has_aux=True)(params)

  return run(params, rest, x)


def trace(net, x=X, of=loss, **options):
  """The trace of the gradient with some options, and what was done."""
  graphdef, *state = nnx.split(net, nnx.Param, ...)
  chosen, used = LayerOptions(**options), LayersUsed()

  def value(params, rest, x):
    model = nnx.merge(graphdef, params, rest, copy=True)
    with chosen.marking(model, used):
      return of(model, x)

  return jax.make_jaxpr(jax.grad(with_options(value, chosen, used)))(*state, x), used


def names(jaxpr):
  return [eqn.primitive.name for eqn in equations(jaxpr)]


def numbers(tree):
  """Random keys as numbers."""
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def same(net, of=loss, *, rtol=2e-5, atol=1e-6, **options):
  """Compares a changed loss with the plain one; gives back what was done."""
  got, plain = found(net, nxp.with_layers(of, **options)), found(net, of)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), *map(numbers, (got, plain))
  )
  return str(trace(net, of=of, **options)[1])


def host_arrays(jaxpr):
  """How many arrays are moved to the host's memory."""
  moves = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "device_put"]
  return sum("<host>" in str(eqn.outvars[0].aval) for eqn in moves)


def each(call):
  """Calls each layer with its number."""

  def run(layers, x):
    for n, layer in enumerate(layers):
      x = call(layer, x, n)
    return x

  return run
