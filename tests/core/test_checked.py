"""The edge of public functions; what they refuse is in test_odd_arguments.py."""

import traceback

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import NnxParallelError


def _init():
  return nxp.constrain(jnp.ones((8, 4)), "batch", "nothing")


def _loss(model, batch):
  return nxp.constrain(model(batch), "batch", "nothing").mean()


def _plan():
  nxp.plan(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8), nxp.fsdp("fspd"))


def _train():
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  nxp.train_step(_loss)(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jnp.ones((8, 4)))


@pytest.mark.parametrize(("call", "frames"), [
  (_plan, ["_plan"]),
  (lambda: nxp.plan(_init, nxp.make_mesh(data=8)), ["<lambda>", "_init"]), (_train, ["_train", "_loss"]),
])  # fmt: skip
@pytest.mark.parametrize("filtering", ["auto", "off"])
def test_a_traceback_of_ours_has_the_frames_of_the_user(call, frames, filtering):
  jax.config.update("jax_traceback_filtering", filtering)
  with nxp.use_rules(nxp.LogicalRules(batch="data")), pytest.raises(NnxParallelError) as caught:
    call()
  jax.config.update("jax_traceback_filtering", "auto")
  names = [(frame.f_code.co_name, frame.f_globals["__name__"]) for frame, _ in traceback.walk_tb(caught.tb)]
  ours = [module for _, module in names if module.startswith("nnx_parallel.")]
  assert [name for name, module in names if module == __name__][1:] == frames
  assert (not ours) == (filtering == "auto")


def test_a_traceback_may_be_as_deep_as_python_allows():
  def deep(left):
    return nxp.make_mesh(data=-2) if left == 0 else deep(left - 1)

  with pytest.raises(nxp.errors.MeshError) as caught:
    nxp.plan(lambda: deep(600), nxp.make_mesh(data=8))
  names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.tb)]
  assert names.count("deep") == 601


@pytest.mark.parametrize(("call", "said"), [
  (lambda: nxp.Pipeline("stage", order="zb"), "order: 'gpipe' or '1f1b' | None"),  # a name, of a dataclass
  (lambda: nxp.generator(max_new_tokens=1, padding="top"), "padding: 'right' or 'left'"),  # Literal itself
  (lambda: nxp.train_step(_loss, gradients="all"), "gradients: 'like_parameters' or 'scattered' | None"),
])  # fmt: skip
def test_a_refused_word_is_told_the_words_that_are_taken(call, said):
  with pytest.raises(NnxParallelError) as caught:
    call()
  assert f"\n  {said}\n" in str(caught.value)
