"""What is easily written wrong in the first minutes: each call is answered with the one that works."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import assert_same_training, run_training


class MLP(nnx.Module):
  def __init__(self, rngs):
    self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)


def init():
  return MLP(nnx.Rngs(0))


def loss(model, batch):
  return model.up(batch).mean()


RNGS = nnx.Rngs(0)
MESH = functools.cache(lambda: nxp.make_mesh(fsdp=8))
PLAN = functools.cache(lambda: nxp.plan(init, MESH(), nxp.fsdp(min_size=1)))
X = np.ones((8, 8), np.float32)


def optimizer():
  return nnx.Optimizer(init(), optax.sgd(0.1), wrt=nnx.Param)


def fit(batches=(X,), **options):
  """A run whose arguments are wrong, to be called."""
  return lambda: nxp.fit(nxp.train_step(loss), init(), optimizer(), batches, progress=False, **options)


CALLS = {
  "an nnx.Optimizer": (lambda: nxp.plan(init, MESH(), optimizer=optimizer()),
    "must be an optax transformation, but is an nnx.Optimizer",
    "optimizer=optimizer.tx; nxp.create_sharded_model(plan) returns"),
  "an optimizer that was not called": (lambda: nxp.plan(init, MESH(), optimizer=optax.adamw),
    "is the function adamw, which was not called", "optimizer=optax.adamw(1e-3)"),
  "a learning rate": (lambda: nxp.plan(init, MESH(), optimizer=0.02),
    "must be an optax transformation, but is 0.02", "optimizer=optax.adamw(0.02)"),
  "a class": (lambda: nxp.plan(MLP, MESH()), "init must take no arguments, and MLP needs rngs",
    "lambda: MLP(rngs=nnx.Rngs(0))"),
  "a partial": (lambda: nxp.plan(functools.partial(nnx.Linear, 8), MESH()),
    "init must take no arguments, and Linear needs out_features, rngs",
    "lambda: Linear(..., out_features=..., rngs=nnx.Rngs(0))"),
  "a builtin class": (lambda: nxp.plan(dict, MESH()), "init returned a dict", "return the module itself"),
  "a number": (lambda: nxp.plan(3, MESH()), "and not of type int", "lambda: MyModule(...,"),
  "rngs from outside": (lambda: nxp.plan(lambda: MLP(RNGS), MESH()),
    "init changes a Variable that was made outside of it", "lambda: MyModule(..., rngs=nnx.Rngs(0))"),
  "rngs in a partial": (
    lambda: nxp.create_sharded_model(functools.partial(nnx.Linear, 8, 8, rngs=RNGS), MESH()),
    "Cannot mutate RngCount", "make it inside of init"),
  "an abstract module": (lambda: nxp.plan(lambda: nnx.eval_shape(init), MESH()),
    "init returned a module without values", "return the module itself"),
  "a value read in init": (lambda: nxp.plan(lambda: nnx.Dict(scale=float(jnp.ones(3).sum())), MESH()),
    "init needs the value of an array", "np.sqrt in place of jnp.sqrt"),
  "an array for numpy in init": (lambda: nxp.plan(lambda: nnx.Param(np.asarray(jnp.ones(3))), MESH()),
    "init needs the value of an array", "as numbers with numpy"),
  "rules that were not called": (lambda: nxp.plan(init, MESH(), [nxp.fsdp]),
    "the function fsdp was not called", "fsdp()"),
  "an optimizer as rules": (lambda: nxp.plan(init, MESH(), optax.sgd(0.1)),
    "rules got an optax transformation", "plan(init, mesh, rules, optimizer=...)"),
  "a number of devices": (lambda: nxp.make_mesh(data=4, devices=4), "devices=4 is not a list of devices",
    "devices=jax.devices()[:4]"),
  "a mesh of pairs": (lambda: nxp.make_mesh([("data", 2), ("fsdp", 4)]), "written as name=size",
    "make_mesh(data=2, fsdp=4)"),
  "one plan to compare": (lambda: assert_same_training(loss, PLAN(), [X]),
    "needs plans by name and batches.\n  given a value of type Plan, and 1 batches",
    'assert_same_training(loss_fn, {"fsdp": plan}, batches)'),
  "a module's path": (lambda: PLAN()["up"], "no leaf 'up'.\n  in it: up.bias, up.kernel", "plan.leaves"),
  "a pattern as in a shell": (lambda: nxp.PathRules([("*.kernel", ("fsdp", None))]),
    "path rule '*.kernel' is not a regular expression", r"PathRules([('.*\\.kernel', ('fsdp', None))])"),
  "a window as in a shell": (lambda: nxp.PathRules([(("*", "up"), None)]), "is not a regular expression",
    "PathRules([(('.*', 'up'), None)])"),
  "a mesh to reshard": (lambda: nxp.reshard(init(), MESH()),
    "reshard needs a plan, and got a value of type Mesh",
    "reshard(model, plan), with plan = nxp.plan(init, mesh, rules)"),
  "a module to from_arrays": (lambda: nxp.from_arrays(init(), PLAN()),
    "from_arrays needs arrays by path, and got a value of type MLP",
    "for a live module, nxp.reshard(model, plan)"),
  "swapped, from_arrays": (lambda: nxp.from_arrays(PLAN(), {}),
    "from_arrays needs a plan, and got a value of type dict", "from_arrays(arrays, plan)"),
  "swapped, check_layout": (lambda: nxp.check_layout(PLAN(), init()),
    "check_layout needs a plan, and got a value of type MLP",
    "check_layout(model, plan, optimizer=optimizer)"),
  "inputs for a mesh": (lambda: nxp.infer_rules(init, X), "is not a mesh", "nxp.make_mesh(data=-1)"),
  "training without an optimizer": (lambda: run_training(PLAN(), loss, [X]),
    "a plan without an optimizer cannot be trained", "optimizer=optax.sgd(0.1)"),
  "a loss to compile": (lambda: nxp.compile_report(loss, PLAN(), batch=X),
    "compile_report needs a step, and cannot lower loss",
    "compile_report(nxp.train_step(loss_fn), plan, batch=batch)"),
  "a mesh to compile for": (lambda: nxp.compile_report(nxp.train_step(loss), MESH(), batch=X),
    "compile_report needs a plan", "compile_report(step, plan, batch=batch)"),
  "a mesh to estimate": (lambda: nxp.memory_plan(MESH(), loss, X), "memory_plan needs a plan",
    "memory_plan(plan, loss_fn, batch)"),
  "a step to estimate": (lambda: nxp.memory_plan(PLAN(), nxp.train_step(loss), X),
    "a memory plan reads the loss function, but got a TrainStep", "the loss function of the train step"),
  "the rules before the mesh": (lambda: nxp.plan(init, nxp.fsdp(), MESH()), "the mesh comes before the rules",
    "nxp.plan(init, mesh, rules)"),
  "a text to train": (lambda: nxp.plan(init, MESH(), nxp.fsdp(), optimizer=optax.sgd(0.1), wrt="up"),
    "wrt='up' selects none", "wrt=nnx.PathContains('up')"),
  "a batch rule over no axis": (lambda: nxp.plan(init, MESH(), nxp.LogicalRules(batch="batch")),
    "the rule for 'batch' can never apply", "batch='fsdp'"),
  "an optimizer for an evaluation": (lambda: nxp.eval_step(loss)(init(), optimizer(), X),
    "the step of nxp.eval_step takes no optimizer", "step(model, batch)"),
  "one batch to evaluate": (lambda: nxp.evaluate(nxp.eval_step(loss), init(), X),
    "evaluate needs an iterable of batches", "[batch]"),
  "one batch to train on": (fit(batches=X), "fit needs an iterable of batches", "[batch]"),
  "batches without a position": (fit(batches=lambda: [X]), "batches is called with the number of samples",
    "batches=lambda samples: nxp.batches(source, plan, batch=..., start=samples)"),
  "a step to evaluate with": (fit(evaluate=nxp.eval_step(loss), eval_every=1),
    "evaluate is called with no arguments",
    "evaluate=lambda: nxp.evaluate(eval_step, model, nxp.batches(held_out, plan))"),
  "plans of several models": (fit(plan={"a": 1}), "fit takes one plan", "plan=plans['a']"),
  "no batch at all": (fit(batches=[], steps=2), "there is no batch for step 1 of 2", 'last="pad"'),
  "a policy of no meaning": (lambda: next(nxp.batches([X], PLAN(), batch=8, last="pads")),
    "last: 'drop' or 'pad' or 'keep'", "what to do with a last batch"),
  "a mesh to compare": (lambda: PLAN().diff(MESH()), "plan.diff needs a plan", "plan.diff(other)"),
  "no batch to compile": (lambda: nxp.compile_report(nxp.train_step(loss), PLAN(), X),
    "needs a batch.\n  1 other arguments", "batch=jax.ShapeDtypeStruct("),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_the_call_that_works(name):
  call, what, fix = CALLS[name]
  with pytest.raises(nxp.NnxParallelError) as caught:
    call()
  said, _, mended = str(caught.value).partition("\n  Fix: ")
  assert what in said
  assert fix in mended


def test_a_checkpointer_does_not_print_the_model(tmp_path):
  with nxp.Checkpointer(tmp_path) as checkpoints:
    with pytest.raises(nxp.errors.CheckpointError) as caught:
      checkpoints.save(init(), 5)
    assert str(caught.value) == (
      "a MLP is not a step from 0 up.\n  Fix: a number below 2**63 comes first: save(100, model, optimizer)."
    )
    checkpoints.save(5, init())
    with pytest.raises(nxp.errors.CheckpointError, match=r"into init: it has [^\n]*\n  Fix:"):
      checkpoints.restore(init)
