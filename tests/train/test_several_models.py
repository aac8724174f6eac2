"""Several models in one step: a GAN and a distillation, against loops written by hand."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from train.models import Net, Normed
from training import placed

STEPS = 15

RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed=nxp.LogicalRules.first("fsdp", None), mlp="tensor")


def make(init, tx=None, **options):
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  plan = nxp.plan(init, mesh, RULES, optimizer=tx, uneven="next", **options)
  made = placed(plan)
  return (plan, *made) if tx is not None else (plan, made)


generator = lambda: Net(nnx.Rngs(0), 4, out=2)
discriminator = lambda: Net(nnx.Rngs(1), 2, out=1)


def gen_loss(models, batch):
  return optax.sigmoid_binary_cross_entropy(
    models["disc"](models["gen"](batch["noise"])), jnp.ones((32, 1))
  ).mean()


def disc_loss(models, batch):
  real = models["disc"](batch["real"])
  fake = models["disc"](models["gen"](batch["noise"]))
  losses = optax.sigmoid_binary_cross_entropy(real, jnp.ones((32, 1)))
  losses += optax.sigmoid_binary_cross_entropy(fake, jnp.zeros((32, 1)))
  return losses.mean(), {"real": nxp.weighted(jax.nn.sigmoid(real).sum(), 32.0)}


def points():
  rng = np.random.default_rng(0)
  return [
    {
      "real": (rng.normal(size=(32, 2)) * 0.1 + 2).astype(np.float32),
      "noise": rng.normal(size=(32, 4)).astype(np.float32),
    }
    for _ in range(STEPS)
  ]


def gan_by_hand():
  """The generator first, then the discriminator against the generator that was just updated."""
  models = {"gen": nxp.unsharded(generator), "disc": nxp.unsharded(discriminator)}
  optimizers = {
    "gen": nnx.Optimizer(models["gen"], optax.adam(1e-2), wrt=nnx.Param),
    "disc": nnx.Optimizer(models["disc"], optax.sgd(0.1), wrt=nnx.Param),
  }

  @nnx.jit
  def step(models, optimizers, batch):
    losses = []
    for key, loss_fn in (("gen", gen_loss), ("disc", lambda m, b: disc_loss(m, b)[0])):
      alone = lambda model, key=key, loss_fn=loss_fn: loss_fn({**models, key: model}, batch)
      loss, grads = nnx.value_and_grad(alone)(models[key])
      optimizers[key].update(models[key], grads)
      losses.append(loss)
    return losses

  return models, np.array([step(models, optimizers, batch) for batch in points()])


@pytest.mark.slow
def test_a_gan_equals_a_loop_written_by_hand():
  expected, losses = gan_by_hand()
  gen_plan, gen, gen_opt = make(generator, optax.adam(1e-2))
  disc_plan, disc, disc_opt = make(discriminator, optax.sgd(0.1), zero=1)
  step = nxp.train_step({"gen": gen_loss, "disc": disc_loss})
  found = []
  for host in points():
    batch = nxp.shard_batch(host, gen_plan)
    metrics = step({"gen": gen, "disc": disc}, {"gen": gen_opt, "disc": disc_opt}, batch)
    found.append((float(metrics["gen/loss"]), float(metrics["disc/loss"])))
  assert set(metrics) == {"gen/loss", "disc/loss", "disc/real"}
  np.testing.assert_allclose(found, losses, rtol=1e-5)
  for got, want in ((gen, expected["gen"]), (disc, expected["disc"])):
    for x, y in zip(jax.tree.leaves(nnx.state(got)), jax.tree.leaves(nnx.state(want)), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
  assert len(step.compiles) == 1
  nxp.check_layout(gen, gen_plan, optimizer=gen_opt)
  nxp.check_layout(disc, disc_plan, optimizer=disc_opt)


teacher = lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(1))


def distill(models, x):
  return ((models["student"](x) - jax.lax.stop_gradient(models["teacher"](x))) ** 2).mean()


OTHERS = {
  "replicate": lambda mesh: placed(nxp.plan(teacher, mesh, nxp.replicate())),
  "fsdp": lambda mesh: placed(nxp.plan(teacher, mesh, nxp.fsdp(min_size=0))),
  "preset": lambda mesh: placed(nxp.plan(teacher, mesh, nxp.presets.fsdp_tensor(min_size=0))),
  "other names": lambda mesh: placed(nxp.plan(teacher, mesh, RULES.replace(embed=None, mlp=None))),
  "padded": lambda mesh: placed(nxp.plan(teacher, mesh, RULES, uneven="pad")),
  "no plan": lambda mesh: teacher(),
}


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("other", OTHERS)
def test_a_student_gets_one_devices_gradients_beside_a_teacher_whose_plan_has_other_rules(other):
  def norms(mesh, made):
    tx = nxp.testing.with_gradient_norms(optax.sgd(0.1))
    rules = RULES if mesh.size > 1 else RULES.replace(unknown="replicate")
    plan = nxp.plan(lambda: Normed(nnx.Rngs(0)), mesh, rules, optimizer=tx)
    student, optimizer = placed(plan)
    step = nxp.train_step(distill)
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    models = {"student": student, "teacher": made(mesh)}
    loss = step(models, {"student": optimizer}, nxp.shard_batch(x, plan))["loss"]
    return [float(loss), *np.asarray(optimizer.opt_state.norms[...])]

  one = nxp.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  wanted = norms(one, OTHERS["replicate"])
  np.testing.assert_allclose(norms(nxp.make_mesh(data=2, fsdp=2, tensor=2), OTHERS[other]), wanted, rtol=1e-5)


WAYS = {
  "examples": [nxp.LogicalRules(batch=axes) for axes in ("data", ("data", "fsdp"))],
  "inputs": [nxp.InputRules(map_2d=("data", axis)) for axis in (None, "tensor")],
  "positions": [nxp.LogicalRules(batch="data", seq=axis) for axis in ("tensor", "fsdp")],
}


@pytest.mark.parametrize("what", WAYS)
def test_models_whose_plans_split_the_batch_differently_are_an_error(what):
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  plans = [nxp.plan(teacher, mesh, rules, optimizer=optax.sgd(0.1)) for rules in WAYS[what]]
  (a, optimizer), (b, _) = map(placed, plans)
  step = nxp.train_step(lambda models, x: ((models["a"](x) - models["b"](x)) ** 2).mean())
  with pytest.raises(nxp.errors.TrainError, match=f"split the {what} differently") as caught:
    step({"a": a, "b": b}, {"a": optimizer}, np.ones((8, 16), np.float32))
  assert "make each plan with the same rule" in str(caught.value)


@pytest.mark.slow
def test_any_number_of_equal_models_share_one_program_and_none_is_kept():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  plan = nxp.plan(lambda: Net(nnx.Rngs(0), 8, out=4), mesh, RULES, optimizer=optax.adam(1e-2))
  models = [placed(plan) for _ in range(3)]
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  batch = nxp.shard_batch(np.ones((8, 8), np.float32), plan)
  for _ in range(2):
    losses = [float(step(*pair, batch)["loss"]) for pair in models]
  assert len({*losses}) == 1
  assert [str(compiled) for compiled in step.compiles] == ["call 0: first call"]
  dropped = models.pop(0)[0]
  gone = weakref.ref(dropped), weakref.ref(dropped.up)
  del dropped
  gc.collect()
  assert [ref() for ref in gone] == [None, None]


def test_a_dict_of_flax_is_one_model(tmp_path):
  init = lambda: nnx.Dict(w=nnx.Param(jnp.eye(4)), net=Net(nnx.Rngs(0), 4, out=4))
  plan, model, optimizer = make(init, optax.sgd(0.1))
  loss, x = lambda model, x: (model["net"](x @ model["w"]) ** 2).mean(), jnp.ones((8, 4))
  assert nxp.check_gradients(model, x, loss)
  before = nxp.train_step(loss)(model, optimizer, x)["loss"]
  with nxp.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, model, optimizer)
    model, _ = checkpointer.restore(plan)
  assert nxp.eval_step(loss)(model, x)["loss"] < before
