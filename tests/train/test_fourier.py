"""Layouts that split the dims of a Fourier transform train as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import assert_same_training

WIDTH, MODES = 16, 4


class Spectral(nnx.Module):  # The product of a Fourier neural operator: of the lowest modes of each channel
  def __init__(self, rngs):
    self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH, MODES, MODES, 2)) * 0.1)

  def __call__(self, x):
    found = jnp.fft.rfft2(x)
    w = self.w[...]
    low = jnp.einsum("bixy,ioxy->boxy", found[:, :, :MODES, :MODES], jax.lax.complex(w[..., 0], w[..., 1]))
    return jnp.fft.irfft2(jnp.zeros_like(found).at[:, :, :MODES, :MODES].set(low), s=x.shape[2:])


class Operator(nnx.Module):
  def __init__(self, rngs):
    self.lift, self.out = nnx.Linear(1, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
    self.layers = nnx.List([Spectral(rngs) for _ in range(2)])

  def __call__(self, x):
    x = self.lift(x)
    for layer in self.layers:
      x = nnx.gelu(jnp.moveaxis(layer(jnp.moveaxis(x, -1, 1)), 1, -1) + x)
    return self.out(x)


RULES = {"channels": (None, "tensor", None, None, None), "modes": (None, None, "tensor", None, None)}


@pytest.mark.each_case
@pytest.mark.parametrize("names", RULES.values(), ids=RULES)
def test_a_fourier_operator_trains_as_on_one_device(names):
  """As XLA lays out its arrays in memory, it cannot compile `channels` on a CPU (`fft_thunk.cc`)."""
  init, x = lambda: Operator(nnx.Rngs(0)), np.random.default_rng(0).normal(size=(8, 16, 16, 1)).astype("f")
  rules = [
    nxp.LogicalRules(batch=("data", "fsdp")),
    nxp.PathRules([(("0", "w"), ("tensor", *[None] * 4)), (("1", "w"), names)]),
    nxp.fsdp(min_size=0, extend=True),
  ]
  plan = nxp.plan(init, nxp.make_mesh(data=2, fsdp=2, tensor=2), rules, optimizer=optax.sgd(0.1))
  assert_same_training(lambda m, x: (m(x) ** 2).mean(), {"split": plan}, [x, x])
