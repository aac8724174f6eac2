"""Models that state no shardings, on meshes with Explicit axes: what `jax.make_mesh` makes by default."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx_parallel as nxp
from benchmarks.explicit import ALONE, FSDP, SHARDED, WITH_OPTIONS, Decoder, next_token, planned, trained
from training import placed

ON_EXPLICIT = ["explicit", "mixed"]


@functools.cache
def on_auto_axes(name, options):
  return trained(name, "auto", steps=2, **dict(options))[0]


def assert_parity(name, kind, **options):
  wanted = on_auto_axes(name, tuple(options.items()))
  losses, step = trained(name, kind, steps=2, **options)
  np.testing.assert_allclose(losses, wanted, rtol=1e-6)
  assert wanted[0] != wanted[1]
  assert "computed on Auto axes: nothing states a sharding" in str(step.layers)
  return step


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ON_EXPLICIT)
@pytest.mark.parametrize("name", ALONE)
def test_a_model_trains_as_on_auto_axes(name, kind):
  assert_parity(name, kind)


ZERO_1 = {"decoder, ZeRO-1": ("decoder", {"zero": 1})}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("case", WITH_OPTIONS | ZERO_1)
def test_each_option_computes_what_it_does_on_auto_axes(case):
  name, options = (WITH_OPTIONS | ZERO_1)[case]
  assert_parity(name, "mixed" if name.startswith("of ") else "explicit", **options)


# Made where they are entered: `jax.set_mesh` acts when it is called.
ACTIVE = {
  "mesh": lambda plan: jax.set_mesh(plan.mesh),
  "scope": lambda plan: plan.scope(),
  "nothing": lambda plan: contextlib.nullcontext(),
}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("active", ACTIVE)
def test_gradients_are_right_on_explicit_axes(active):
  plan, batch, loss = planned("decoder", "explicit")
  model, optimizer = placed(plan)
  with ACTIVE[active](plan):
    found = nxp.train_step(loss).check_gradients(model, optimizer, batch)
  assert found
  assert "by forward mode" in str(found)


def test_a_step_is_lowered_on_an_abstract_mesh():
  plan = nxp.plan(Decoder, nxp.abstract_mesh(FSDP, explicit=True), SHARDED, optimizer=optax.adam(1e-2))
  batch = jax.ShapeDtypeStruct((16, 8), jnp.int32)
  step = nxp.train_step(next_token, remat="full")
  assert "reshard" not in step.lower(plan, batch=batch).as_text()
  assert "computed on Auto axes" in str(step.layers)
