"""Optimizer state is created like parameters: in its layout, for every optimizer, with the eager values."""

import inspect
import warnings

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import nnx_parallel as nxp


class Net(nnx.Module):  # One kernel with names, one without, and a vector
  def __init__(self, rngs: nnx.Rngs):
    self.up = nnx.Linear(128, 256, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")})
    self.down = nnx.Linear(256, 128, rngs=rngs)


net = lambda: Net(nnx.Rngs(0))


def is_kernel(params: optax.Params) -> optax.Params:
  return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


def label(params: optax.Params) -> optax.Params:
  return jax.tree.map(lambda keep: "decay" if keep else "plain", is_kernel(params))


OPTIMIZERS = {
  "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=64),
  "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2), optax.ema(0.9)),
  "dog": optax.contrib.dog(1e-2),
  "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
  "lbfgs": optax.lbfgs(memory_size=3, linesearch=None), "masked": optax.masked(optax.adam(1e-2), is_kernel),
  "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
  "multi_transform": optax.multi_transform({"decay": optax.adamw(0.1), "plain": optax.sgd(0.1, 0.9)}, label),
  "muon": optax.contrib.muon(1e-2), "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
}  # fmt: skip


def eager(tx: optax.GradientTransformation) -> tuple[Net, nnx.Optimizer]:
  with nnx.use_eager_sharding(False):
    model = net()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_state_is_created_in_its_layout(explicit):
  tx = optax.named_chain(*OPTIMIZERS.items())
  rules = [nxp.LogicalRules(embed=None, mlp="tensor"), nxp.fsdp(min_size=64)]
  plan = nxp.plan(net, nxp.make_mesh(fsdp=4, tensor=2, explicit=explicit), rules, optimizer=tx)
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)
  ours, theirs = (jax.tree.leaves(nnx.state(node)) for node in (optimizer, eager(tx)[1]))
  for left, right in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(left, right, strict=True)
  whole = [leaf.name for leaf in plan.leaves if leaf.root == "optimizer" and leaf.bytes_per_device > 2048]
  assert [name for name in whole if np.prod(plan[name].shards) == 1] == []


def shipped() -> dict[str, optax.GradientTransformation]:
  """What optax makes of nothing but a rate; the gradient noise of `noisy_sgd` also wants a key."""
  made = {"noisy_sgd": optax.noisy_sgd(1e-2, key=jax.random.key(0))}
  for name, make in [*vars(optax).items(), *vars(optax.contrib).items()]:
    signature = inspect.signature(make) if inspect.isfunction(make) else None
    if signature and "GradientTransformation" in str(signature.return_annotation):
      needs = {p.name for p in signature.parameters.values() if p.default is p.empty}
      if needs in ({"learning_rate"}, set()) and name not in made:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
          made[name] = make(**dict.fromkeys(needs, 1e-2))
  return made


def test_every_optimizer_of_optax_is_laid_out_as_its_parameters():
  found = shipped()
  assert len(found) > 80
  rules = [nxp.LogicalRules(embed=None, mlp="tensor"), nxp.fsdp(min_size=64)]
  tx = optax.named_chain(*found.items())
  plan = nxp.plan(net, nxp.make_mesh(fsdp=4, tensor=2), rules, optimizer=tx)
  for leaf in plan.of("optimizer").values():
    same = [x for path, x in plan.of("model").items() if x.shape == leaf.shape and path == leaf.parameter]
    assert [x.spec for x in same] == [leaf.spec] * len(same), leaf.name
    if "galore" not in leaf.name:  # its projections have shapes of their own
      assert same or np.prod(leaf.shape) < 2048 or np.prod(leaf.shards) > 1, leaf.name
