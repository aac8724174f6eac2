"""The table of defects names tests that exist; and tests of those that have no better place."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.text import page_width, print_text
from nnx_parallel.errors import CheckpointError, LayoutMismatchError, RecipeError, SchemeError, TrainError

HERE = Path(__file__).parent


def test_the_table_of_defects_names_tests():
  named = re.findall(r"`([a-z_/0-9]+\.py)(?:::([a-z0-9_]+))?`", (HERE / "DEFECTS.md").read_text())
  assert len(named) > 40
  for file, name in named:
    text = (HERE / file).read_text()
    assert not name or f"\ndef test_{name}(" in text or f"\ndef {name}(" in text, f"{file}::{name}"


X = np.ones((8, 8), np.float32)
linear = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
loss_fn = lambda model, x: (model(x) ** 2).mean()


def made():
  model = linear()
  return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-3)], ids=["sgd", "adam"])
def test_equal_plans_share_a_program(optimizer):
  mesh, step = nxp.make_mesh(fsdp=8), nxp.train_step(loss_fn)
  for _ in range(3):
    step(*nxp.create_sharded_model(nxp.plan(linear, mesh, nxp.fsdp(min_size=0), optimizer=optimizer)), X)
  assert len(step.compiles) == 1
  other = nxp.plan(linear, mesh, nxp.replicate(), optimizer=optimizer)
  step(*nxp.create_sharded_model(other), X)
  assert len(step.compiles) == 2


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_loss_that_switches_the_mode_is_told_the_ways_that_work(mode):
  model = nnx.Sequential(linear(), nnx.Dropout(0.5, deterministic=mode == "train", rngs=nnx.Rngs(0)))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

  def loss(model, x):
    getattr(model, mode)()
    return loss_fn(model, x)

  with pytest.raises(TrainError, match=rf"nnx\.view\(model, deterministic={mode == 'eval'}\)"):
    nxp.train_step(loss)(model, optimizer, X)
  seen = nxp.train_step(lambda model, x: loss_fn(nnx.view(model, deterministic=mode == "eval"), x))
  seen(model, optimizer, X)


def test_a_layout_that_an_own_step_lost_names_the_call_that_keeps_it():
  mesh = nxp.make_mesh(model=8)
  plan = nxp.plan(lambda: nnx.Linear(32, 1, use_bias=False, rngs=nnx.Rngs(0)), mesh, nxp.replicate())
  model = nxp.create_sharded_model(plan)
  x = jax.device_put(np.ones((8, 32), np.float32), jax.NamedSharding(mesh, jax.P(None, "model")))

  def update(model, x, keep):
    grads = nnx.grad(loss_fn)(model, x)
    new = model.kernel[...] - 0.1 * grads.kernel[...]
    model.kernel[...] = jax.lax.with_sharding_constraint(new, plan["kernel"].sharding) if keep else new

  step = nnx.jit(update, static_argnums=2)
  step(model, x, True)
  nxp.check_layout(model, plan)
  model.kernel.set_value(jax.device_put(model.kernel[...], jax.NamedSharding(mesh, jax.P("model"))))
  with pytest.raises(LayoutMismatchError, match=r"with_sharding_constraint\(x, plan\[path\]\.sharding\)"):
    nxp.check_layout(model, plan)


SAVED = {
  "the optimizer first": (lambda model, optimizer: (optimizer, model), "optimizer before the model"),
  "nnx.split": (lambda model, _: (nnx.split(model),), "nnx.GraphDef, which holds no arrays"),
  "keys of two types": (lambda *_: ({1: X, "a": X},), "keys of one type"),
}


@pytest.mark.each_case
@pytest.mark.parametrize(("given", "text"), SAVED.values(), ids=SAVED)
def test_what_is_no_content_of_a_checkpoint(tmp_path, given, text):
  with nxp.Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match=text):
    checkpointer.save(1, *given(*made()))


def test_a_path_with_two_colons(tmp_path):
  model, optimizer = made()
  with nxp.Checkpointer(tmp_path / "run::1") as checkpointer:
    checkpointer.save(1, model, optimizer)
    assert checkpointer.steps() == [1]


def test_adapters_are_added_to_all_layers_or_to_none():
  model = nnx.Sequential(linear(), linear())
  nxp.interop.add_lora(model, "layers.1", rank=2, rngs=nnx.Rngs(0))
  with pytest.raises(CheckpointError, match=r"layers\.1 has an adapter already"):
    nxp.interop.add_lora(model, "layers.*", rank=2, rngs=nnx.Rngs(0))
  assert not hasattr(model.layers[0], "lora")


FITS = {
  "extra": ({"extra": lambda: None}, "extra\\(\\) returned a NoneType"),
  "profile": ({"profile": (5, 6)}, "starts at step 5, and the run ends at step 1"),
  "evaluate": ({"evaluate": lambda: None}, "metrics=None"),
}


@pytest.mark.each_case
@pytest.mark.parametrize(("options", "text"), FITS.values(), ids=FITS)
def test_what_a_run_gets_from_functions_is_looked_at(tmp_path, options, text):
  step, given = nxp.train_step(loss_fn), made()
  with nxp.Checkpointer(tmp_path) as checkpointer, pytest.raises(TrainError, match=text):
    nxp.fit(step, *given, [X], steps=1, checkpointer=checkpointer, progress=False, **options)


def test_threads_that_read_samples_are_one_at_least():
  plan = nxp.plan(linear, nxp.make_mesh(data=8))
  with pytest.raises(TrainError, match="threads=0"):
    nxp.batches([*X], plan, batch=8, threads=0)


@pytest.mark.each_case
@pytest.mark.parametrize("key", ["num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_config_without_layers_heads_or_words(tmp_path, key):
  config = json.loads((HERE / "interop/references/llama/config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps({**config, key: -1}))
  with pytest.raises(RecipeError, match=f"{key}=-1"):
    nxp.interop.from_config(tmp_path, nnx.Rngs(0))


def test_an_input_rule_of_none_replicates():
  rules = nxp.InputRules(map_2d=None, map_3d=("data", None, None))
  plan = nxp.plan(linear, nxp.make_mesh(data=8), [rules, nxp.replicate()])
  assert plan.batch_spec(2) == jax.P(None, None)
  assert plan.batch_spec(3) == jax.P("data", None, None)


def test_a_process_without_stdout_prints_nothing(monkeypatch):
  monkeypatch.setattr(sys, "stdout", None)
  print_text("text")
  assert page_width() > 0


def test_parts_of_a_loss_are_no_more_than_its_tokens():
  """More would divide by zero in XLA, which ends the process."""
  given = np.ones((2, 3, 4), np.float32), np.ones((4, 8), np.float32), np.zeros((2, 3), np.int32)
  nxp.parallel.vocabulary_cross_entropy(*given, parts=6)
  with pytest.raises(SchemeError, match="parts=7"):
    nxp.parallel.vocabulary_cross_entropy(*given, parts=7)
