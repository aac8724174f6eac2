"""Models x layouts x options: each trains as one device does, whose losses and norms are in `golden.json`.

    python tests/test_matrix.py --update        makes the numbers again

A layout is compiled once and compared with numbers; the models and losses are those of `searches/seams.py`.
"""

import contextlib
import functools
import itertools
import json
import sys
from pathlib import Path

if __name__ == "__main__":
  sys.path[:0] = [str(Path(__file__).parents[1])]
  import conftest  # noqa: F401 - eight devices

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.testing import run_training, with_gradient_norms
from searches.seams import LAYOUTS, LENGTH, LOSSES, TOKENS, Model

pytestmark = [pytest.mark.usefixtures("as_users_have_it"), pytest.mark.slow]
GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 3
MODELS = {
  "plain": ((), "mean"), "attention": (("attention",), "weighted"),
  "tied head": (("tied head", "integer table"), "masked mean"), "statistics": (("statistics",), "mean"),
  "dropout": (("dropout", "attention"), "mean"), "scan": (("scan over layers",), "sum"),
  "uneven": (("uneven width", "scale in layers"), "mean"),
  "shared layer": (("shared layer", "tables in a tuple"), "mean"),
  "attributes": (("numbered attributes", "table in a dict"), "balance"), "contrast": ((), "contrast"),
}  # fmt: skip
OPTIONS = {
  "as written": {}, "ZeRO-1": {"zero": 1}, "ZeRO-2": {"zero": 2}, "2 microbatches": {"microbatches": 2},
  "ZeRO-2, 4 microbatches": {"zero": 2, "microbatches": 4}, "remat": {"remat": "full"},
  "dots, scanned": {"remat": "dots", "scan_layers": True}, "blockwise": {"attention": "blockwise"},
  "loss in chunks": {"loss_chunks": 2}, "offload": {"remat": "offload"}, "diagnostics": {"diagnostics": True},
  "Explicit": {"explicit": True}, "loss scale": {"scaled": True}, "clipped": {"clipped": True},
}  # fmt: skip
PIPELINES = {
  "GPipe": {"order": "gpipe"},
  "1F1B": {"order": "1f1b"},
  "1F1B, activations kept": {"order": "1f1b", "recompute": False},
}
REFUSED = {
  ("scan over layers", "remat"), ("scan over layers", "scan_layers"), ("shared layer", "scan_layers"),
  ("shared layer", "remat"), ("statistics", "scan_layers"), ("dropout", "scan_layers"),
}  # fmt: skip
"""Features and options that a step refuses together."""


def fits(model, option):
  """Whether the option has something to do in the model."""
  features, loss = MODELS[model]
  if "attention" in option and "attention" not in features:
    return False
  if "loss_chunks" in option and loss not in ("mean", "masked mean", "weighted"):
    return False
  return not any((feature, name) in REFUSED for feature, name in itertools.product(features, option))


def cells():
  """Each model on each layout, with the options in turn; each option is on each layout, of some model."""
  turn = 0
  for layout, model in itertools.product(LAYOUTS, MODELS):
    options = PIPELINES if "stage" in LAYOUTS[layout] else OPTIONS
    if "stage" in LAYOUTS[layout] and model not in ("plain", "attention", "uneven", "contrast"):
      continue
    names = [name for name, option in options.items() if fits(model, option)]
    for _ in range(1 if "stage" in LAYOUTS[layout] else 2):
      yield model, layout, names[turn % len(names)]
      turn += 1


CELLS = list(dict.fromkeys(cells()))
EVERYDAY = CELLS[:: len(CELLS) // 6]


@functools.cache
def init(model):
  features, _ = MODELS[model]
  case = type("Case", (), {"features": frozenset(features), "layers": 2})
  return lambda: Model(case, nnx.Rngs(0))


def batches():
  for step in range(STEPS):
    rng = np.random.default_rng(step)
    x, y = rng.integers(0, TOKENS, (2, 16, LENGTH)).astype(np.int32)
    yield {"x": x, "y": y, "w": (rng.random((16, LENGTH)) < 0.5).astype(np.float32)}


def trained(model, sizes, options):
  """Losses, and the norm of each gradient in each step."""
  options = dict(options)
  explicit, zero = options.pop("explicit", False), options.pop("zero", 0)
  tx = optax.sgd(0.02, momentum=0.9)
  if options.pop("clipped", False):
    tx = optax.chain(optax.clip_by_global_norm(1e3), tx)  # no gradient is as long
  tx = with_gradient_norms(tx)
  tx = nxp.with_loss_scale(tx, initial=8.0) if options.pop("scaled", False) else tx
  if "stage" in sizes:
    options = {"pipeline": nxp.Pipeline("stage", **options), "microbatches": 4}
  devices = jax.devices()[: int(np.prod([*sizes.values()]))]
  mesh = nxp.make_mesh(sizes, devices=devices, explicit=explicit)
  split = [axis for axis in ("tensor", "fsdp") if axis in sizes]
  rules = [nxp.LogicalRules(batch=tuple(axis for axis in ("data", "fsdp") if axis in sizes))]
  rules.append(nxp.fsdp(tuple(split), min_size=16) if split else nxp.replicate())
  plan = nxp.plan(init(model), mesh, rules, optimizer=tx, zero=zero, uneven="next")
  return run_training(plan, LOSSES[MODELS[model][1]], batches(), **options)


def microbatches_of(layout, option):
  """One device takes as many: statistics, random numbers and contrasts depend on them."""
  return 4 if "stage" in LAYOUTS[layout] else OPTIONS[option].get("microbatches", 1)


@functools.cache
def golden():
  return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
  ("model", "layout", "option"),
  [pytest.param(*cell, marks=[pytest.mark.everyday] * (cell in EVERYDAY)) for cell in CELLS],
)
def test_a_model_trains_as_on_one_device(model, layout, option, request):
  if "stage" in LAYOUTS[layout]:
    request.getfixturevalue("compiled_here")
  wanted = golden()[f"{model}, {microbatches_of(layout, option)}"]
  found = trained(model, LAYOUTS[layout], (OPTIONS | PIPELINES)[option])
  np.testing.assert_allclose(found.losses, wanted["losses"], rtol=1e-4)
  norms = wanted["norms"]
  assert found.norms.keys() == norms.keys()
  if "scaled" in OPTIONS.get(option, {}):
    return  # the scale hides the record of norms: its own tests compare them
  whole = np.sqrt(sum(norm**2 for norm in norms.values()))
  for path, norm in found.norms.items():
    assert norm == pytest.approx(norms[path], rel=1e-3, abs=1e-5 * whole), path


def test_each_option_is_on_each_layout_and_each_model_too():
  assert {model for model, *_ in CELLS} == {*MODELS}
  assert {option for *_, option in CELLS} == {*OPTIONS, *PIPELINES}
  for layout in LAYOUTS:
    assert len({option for _, where, option in CELLS if where == layout}) >= min(3, len(PIPELINES))


def main():
  """Writes the numbers of one device."""
  made = {}
  for model, layout, option in CELLS:
    count = microbatches_of(layout, option)
    if (key := f"{model}, {count}") not in made:
      with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        run = trained(model, {"data": 1}, {"microbatches": count})
      norms = {path: float(f"{norm:.7g}") for path, norm in run.norms.items()}
      made[key] = {"losses": [float(f"{loss:.8g}") for loss in run.losses], "norms": norms}
      print(key, made[key]["losses"], flush=True)
  GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
  main()
