"""Every transformation that optax ships: laid out as planned, and the same numbers on each layout."""

import functools
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.nodes import plain_path
from nnx_parallel.train.update import extra_arguments
from train.models import RULES

RATE = 1e-2
RATED = """
  adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
  novograd
  optimistic_adam_v2 optimistic_gradient_descent polyak_sgd radam rmsprop rprop sgd sign_sgd signum
  sm3 yogi lbfgs acprop ademamix adopt dadapt_adamw madgrad momo momo_adam muon prodigy schedule_free_adamw
  schedule_free_sgd simplified_ademamix sophia
""".split()  # noqa: SIM905
BUILT = {
  "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
  "cocob": lambda: optax.contrib.cocob(),
  "galore": lambda: optax.contrib.galore(RATE, rank=4),
  "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
  "mechanize": lambda: optax.contrib.mechanize(optax.sgd(RATE)),
  "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(RATE), RATE),
  "reduce_on_plateau": lambda: optax.chain(optax.sgd(RATE), optax.contrib.reduce_on_plateau(patience=1)),
  "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(RATE)),
  "normalize": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(RATE)),
  "sam": lambda: optax.contrib.sam(optax.sgd(RATE), optax.sgd(RATE), sync_period=2),
  "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 3),
  "apply_every": lambda: optax.chain(optax.sgd(RATE), optax.apply_every(2)),
  "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(RATE)),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
  "masked": lambda: optax.masked(optax.adam(RATE), matrices),
  "freeze": lambda: optax.chain(optax.sgd(RATE), optax.freeze(matrices)),
  "selective_transform": lambda: optax.selective_transform(optax.adam(RATE), freeze_mask=matrices),
  "partition": lambda: optax.partition({True: optax.adam(RATE), False: optax.set_to_zero()}, matrices),
  "multi_transform": lambda: optax.multi_transform(
    {True: optax.adam(RATE), False: optax.sgd(RATE)}, matrices
  ),
  "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(RATE))),
  "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE)),
  "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(RATE)),
  "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(RATE)),
  "normalize_by_update_norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(RATE)),
  "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(RATE)),
  "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(RATE)),
  "snapshot": lambda: optax.chain(optax.snapshot("before", lambda x: x), optax.sgd(RATE)),
  "measure_with_ema": lambda: optax.chain(
    optax.measure_with_ema(lambda updates: jax.tree.map(jnp.square, updates), 0.9), optax.sgd(RATE)
  ),
  "scale_by_stddev": lambda: optax.chain(optax.scale_by_stddev(), optax.sgd(RATE)),
  "scale_by_distance_over_gradients": lambda: optax.chain(
    optax.scale_by_distance_over_gradients(), optax.sgd(RATE)
  ),
  "scale_by_backtracking_linesearch": lambda: optax.chain(
    optax.sgd(RATE), optax.scale_by_backtracking_linesearch(5)
  ),
  "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
  "lbfgs without search": lambda: optax.lbfgs(RATE, linesearch=None),
  "with_masters": lambda: nxp.with_masters(optax.adam(RATE)),
  "with_ema": lambda: nxp.with_ema(optax.adam(RATE), 0.9),
  "skip_nonfinite": lambda: nxp.skip_nonfinite(optax.adam(RATE)),
}
# What the above are made of, or what passes gradients on without state of their shape.
PARTS = """
  add_decayed_weights chain clip conditionally_mask conditionally_transform flatten identity
  inject_stateful_hyperparams keep_params_nonnegative scale scale_by_adadelta scale_by_adam scale_by_adamax
  scale_by_adan scale_by_amsgrad scale_by_belief scale_by_lbfgs scale_by_learning_rate scale_by_lion
  scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms
  scale_by_polyak scale_by_radam scale_by_rms scale_by_rprop scale_by_rss scale_by_schedule scale_by_sign
  scale_by_sm3 scale_by_trust_ratio scale_by_yogi scale_by_zoom_linesearch set_to_zero stateless
  stateless_with_tree_map trace with_extra_args_support zero_nans scale_by_acprop scale_by_ademamix
  scale_by_adopt scale_by_cocob scale_by_galore scale_by_madgrad scale_by_muon scale_by_simplified_ademamix
""".split()  # noqa: SIM905
REFUSED = {
  "lookahead": "keeps two copies of the parameters; train_step says so",
  "differentially_private_aggregate": "wants one gradient per example, which no step computes",
  "dpsgd": "the same",
  "optimistic_adam": "deprecated for optimistic_adam_v2",
}


def matrices(params):
  return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


class Net(nnx.Module):
  """Two kernels that are padded, one of them square, and a bias; ZeRO splits the state of each."""

  def __init__(self, rngs):
    self.up = nnx.Linear(7, 16, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")})
    names = {"out_sharding": ("mlp", "embed")}
    self.mix = nnx.Linear(15, 15, use_bias=False, rngs=rngs, kernel_metadata=names)


def transformation(name):
  if name in BUILT:
    return BUILT[name]()
  return getattr(optax if hasattr(optax, name) else optax.contrib, name)(RATE)


NAMES = (*RATED, *BUILT)


def test_every_transformation_of_optax_is_classified():
  def makes(function):
    if inspect.isclass(function) or not callable(function) or typing.get_origin(function) is not None:
      return False
    return "GradientTransformation" in str(inspect.signature(function).return_annotation)

  shipped = {
    name
    for module in (optax, optax.contrib)
    for name in dir(module)
    if not name.startswith("_") and makes(getattr(module, name))
  }
  known = {*NAMES, *PARTS, *REFUSED}
  assert not shipped - known, "classify what optax ships now: run it here, or say why not"
  assert not {*RATED, *PARTS, *REFUSED} - shipped


def loss_fn(params, target):
  """A bowl whose middle is `target`: its gradients are the same on every layout, to the last bit."""
  parts = jax.tree.map(lambda p, t: 0.5 * ((p - t[tuple(map(slice, p.shape))]) ** 2).sum(), params, target)
  return functools.reduce(jnp.add, jax.tree.leaves(parts))


def trained(*sizes, **options):
  """Name -> parameters after three steps, all of them in one compiled program."""
  mesh = nxp.make_mesh(
    dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), devices=jax.devices()[: np.prod(sizes)]
  )
  plans = {
    name: nxp.plan(
      lambda: Net(nnx.Rngs(0)), mesh, RULES, optimizer=transformation(name), uneven="pad", **options
    )
    for name in NAMES
  }
  first = plans["sgd"]
  model = nxp.create_sharded_model(first.init, mesh, RULES, uneven="pad")
  start = nnx.as_pure(nnx.state(model, nnx.Param))
  shardings = jax.tree.map(lambda x: x.sharding, start)
  logical = nnx.as_pure(nnx.state(first.abstract_model, nnx.Param))

  def init(name):
    state = transformation(name).init(
      jax.tree.map(lambda x, s: x[tuple(map(slice, s.shape))], start, logical)
    )
    rows = plans[name].of("optimizer")
    return jax.tree_util.tree_map_with_path(
      lambda path, x: placed(x, rows[("opt_state", *plain_path(path))]), state
    )

  def placed(x, row):
    assert x.shape == row.shape
    assert x.dtype == row.dtype
    x = jnp.pad(x, [(0, extra) for extra in row.padding]) if any(row.padding) else x
    return jax.lax.with_sharding_constraint(x, row.sharding)

  def run(name):
    tx = optax.with_extra_args_support(plans[name].live_tx)

    def step(carry, scale):
      params, state = carry
      target = jax.tree.map(lambda x: jnp.where(x == 0, 0.0, jnp.sin(1e3 * x)) * scale, start)
      value_fn = lambda p: loss_fn(p, target)
      loss, grads = jax.value_and_grad(value_fn)(params)
      # What train_step gives to an update.
      extra = extra_arguments(tx, state, {"value": loss, "grad": grads, "value_fn": value_fn})
      updates, state = tx.update(grads, state, params, **extra)
      return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (start, init(name)), jnp.linspace(1.0, 2.0, 3))
    rows = plans[name].of("optimizer")
    jax.tree_util.tree_map_with_path(
      lambda path, x: placed_as(x, rows[("opt_state", *plain_path(path))]), state
    )
    return params

  def placed_as(x, row):
    assert (x.shape, x.dtype) == (row.storage_shape, row.dtype)

  def everything():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return {name: run(name) for name in NAMES}

  with jax.set_mesh(mesh):
    found = jax.jit(everything, out_shardings=dict.fromkeys(NAMES, shardings))()
  return {
    name: [
      np.asarray(x)[tuple(map(slice, s.shape))]
      for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(logical), strict=True)
    ]
    for name, params in found.items()
  }


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)  # two programs of all optimizers: about 20 s of processor time each to compile
def test_every_optimizer_gives_the_same_numbers_padded_and_with_zero():
  one, many = trained(1, 1, 1), trained(2, 2, 2, zero=1)
  wrong = [
    f"{name}: {max(np.abs(a - b).max() for a, b in zip(one[name], many[name], strict=True)):.1e}"
    for name in NAMES
    if not all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(one[name], many[name], strict=True))
  ]
  assert not wrong


def computing(parameters):
  return {"norm": jnp.asarray(float(optax.tree.norm(parameters)))}


BY_HAND = {
  "state without arrays": optax.partition({True: optax.adam(RATE), False: optax.set_to_zero()}, matrices),
  "an init that computes with values": optax.GradientTransformation(
    computing, lambda updates, state, params=None: (optax.tree.scale(-RATE, updates), state)
  ),
}


@pytest.mark.parametrize("tx", BY_HAND.values(), ids=BY_HAND)
def test_an_optimizer_made_by_hand_need_not_be_one_that_a_plan_could_make(tx):
  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  losses = [float(step(model, optimizer, jnp.ones((2, 2)))["loss"]) for _ in range(3)]
  assert losses[2] < losses[0]
  assert len(step.compiles) == 1
