"""Constraints on activations: on every kind of mesh, and never from a stale compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import NamedSharding, P

import nnx_parallel as nxp
from nnx_parallel import LogicalRules, constrain, use_rules
from nnx_parallel.errors import ShardingError
from nnx_parallel.testing import assert_same_training

RULES = LogicalRules(batch="data", embed="tensor", seq=None)
OTHER = LogicalRules(batch="tensor", embed="data", seq=None)
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
  return nxp.make_mesh(data=2, tensor=4, explicit=request.param == "explicit")


def spec(x):
  return P(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))


def test_without_a_mesh_the_array_comes_back():
  assert constrain(X, "batch", "embed") is X
  assert jax.jit(lambda x: constrain(x, "batch", "embed") * 2)(X).sharding.is_fully_replicated
  with use_rules(RULES):
    assert constrain(X, "batch", "embed") is X


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_inside_and_outside_of_jit(mesh, run):
  x = jax.device_put(X, NamedSharding(mesh, P()))
  with use_rules(RULES, mesh):
    y = run(lambda x: constrain(x, "batch", "embed"))(x)
  assert spec(y) == P("data", "tensor")
  np.testing.assert_array_equal(y, X)


def test_under_set_mesh_the_rules_need_no_mesh(mesh):
  with jax.set_mesh(mesh), use_rules(RULES):
    y = constrain(jnp.asarray(X), "batch", "embed")
    z = jax.jit(lambda x: constrain(x + 1, "seq", "embed"))(y)
  assert spec(y) == P("data", "tensor")
  assert spec(z) == P(None, "tensor")


def test_a_mesh_and_no_rules_is_never_a_silent_no_op(mesh):
  x = jax.device_put(X, NamedSharding(mesh, P("data")))
  message = r"there is a mesh, and no rules are in scope for 'batch'[\s\S]*with plan\.scope\(\)"
  with pytest.raises(ShardingError, match=message):
    constrain(x, "batch", "embed")
  with pytest.raises(ShardingError, match=message):
    jax.jit(lambda x: constrain(x, "batch", "embed"))(x)
  with jax.set_mesh(mesh), pytest.raises(ShardingError, match=message):
    jax.jit(lambda x: constrain(x, "batch", "embed"))(X)


def transform(name):
  inner = jax.jit(lambda x: constrain(x * 2, "batch", "embed"))
  body = lambda carry, _: (constrain(carry * 2, "batch", "embed"), None)
  return {
    "jit in jit": inner,
    "checkpoint": jax.checkpoint(lambda x: constrain(x * 2, "batch", "embed")),
    "scan": lambda x: jax.lax.scan(body, x, None, length=1)[0],
    "cond": lambda x: jax.lax.cond(x[0, 0] < 1, inner, lambda x: x, x),
  }[name]


@pytest.mark.parametrize("name", ["jit in jit", "checkpoint", "scan", "cond"])
@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_a_scope_inside_the_traced_function_reaches_inner_traces(name):
  mesh, inner = nxp.make_mesh(data=2, tensor=4), transform(name)

  def step(rules):
    def run(x):
      with use_rules(rules, mesh):
        return inner(x)

    return jax.jit(run)

  # The inner function is the same object, traced under two rules.
  first, second = step(RULES).lower(X), step(OTHER).lower(X)
  assert first.as_text() != second.as_text()
  for lowered, wanted in ((first, (4, 2)), (second, (2, 4))):
    y = lowered.compile()(X)
    assert y.sharding.shard_shape((8, 8)) == wanted
    np.testing.assert_array_equal(y, X * 2)


def test_gradients_pass_and_keep_the_layout():
  mesh = nxp.make_mesh(data=2, tensor=4)
  with use_rules(RULES, mesh):
    grad = jax.jit(jax.grad(lambda x: (constrain(x, "batch", "embed") ** 2).sum()))(X)
    eager = jax.grad(lambda x: (constrain(x, "batch", "embed") ** 2).sum())(X)
  assert spec(grad) == P("data", "tensor")
  np.testing.assert_array_equal(grad, 2 * X)
  np.testing.assert_array_equal(eager, 2 * X)


@pytest.mark.auto_axes("its shard_map gets arrays of other types")
def test_inside_shard_map_manual_axes_are_left_out():
  mesh = nxp.make_mesh(data=2, tensor=4)
  seen = []

  def body(x):
    seen.append(x.shape)
    return constrain(x, "batch", "embed")

  with jax.set_mesh(mesh), use_rules(RULES):
    whole = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"))
    part = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    np.testing.assert_array_equal(jax.jit(whole)(X), X)
    y = jax.jit(part)(X)
  assert set(seen) == {(4, 8)}
  assert spec(y) == P("data", "tensor")


def test_scopes_nest_and_end():
  mesh = nxp.make_mesh(data=2, tensor=4)
  with use_rules(RULES, mesh):
    with use_rules(OTHER, mesh):
      assert spec(constrain(X, "batch", "embed")) == P("tensor", "data")
    assert spec(constrain(X, "batch", "embed")) == P("data", "tensor")
    with pytest.raises(RuntimeError, match="user"), use_rules(OTHER, mesh):
      raise RuntimeError("user")
    assert spec(constrain(X, "batch", "embed")) == P("data", "tensor")
  assert constrain(X, "batch", "embed") is X


SEEN = []


@jax.custom_vjp
def noted(x):
  return x


def backward(_, cotangent):
  SEEN.append(jax.sharding.get_abstract_mesh().axis_names)
  return (jax.lax.with_sharding_constraint(constrain(cotangent, "batch", None), P("data")),)


noted.defvjp(lambda x: (x, None), backward)


class Placing(nnx.Module):  # Lays activations out by the names of the rules, and by jax's own means
  def __init__(self, rngs):
    self.inner = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, x):
    SEEN.append(jax.sharding.get_abstract_mesh().axis_names)
    x = jax.lax.with_sharding_constraint(constrain(self.inner(x), "batch", "mlp"), P("data"))
    return noted(x)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_steps_find_the_rules_and_the_mesh_in_the_model(microbatches):
  rules = [LogicalRules(batch="data", mlp="tensor"), nxp.replicate()]
  mesh = nxp.make_mesh(data=2, tensor=4)
  plan = nxp.plan(lambda: Placing(nnx.Rngs(0)), mesh, rules, optimizer=optax.sgd(0.1))
  loss = lambda model, x: (model(x) ** 2).mean()
  model, optimizer = nxp.create_sharded_model(plan)
  batch = nxp.shard_batch(X / 64, plan)
  evaluate, wanted = nxp.eval_step(loss), (np.asarray(model.inner(X / 64)) ** 2).mean()
  SEEN.clear()
  for same in (model, nnx.clone(model), nnx.view(model, deterministic=True, raise_if_not_found=False)):
    np.testing.assert_allclose(evaluate(same, batch)["loss"], wanted, rtol=1e-6)
  step = nxp.train_step(loss, microbatches=microbatches)
  np.testing.assert_allclose(step(model, optimizer, batch)["loss"], wanted, rtol=1e-6)
  assert set(SEEN) == {("data", "tensor")}
  assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_whoever_traces_a_model_has_the_mesh_of_its_plan_active():
  init, mesh = lambda: Placing(nnx.Rngs(0)), nxp.make_mesh(data=2, tensor=4)
  loss = lambda model, x: (model(x) ** 2).mean()
  rules = [LogicalRules(batch="data", mlp="tensor"), nxp.replicate()]
  plan = nxp.plan(init, mesh, rules, optimizer=optax.sgd(0.1))
  batch = jax.ShapeDtypeStruct((8, 8), "float32")
  SEEN.clear()
  assert nxp.memory_plan(plan, loss, batch).need_bytes > 0
  own = nnx.jit(lambda model, _, x: nnx.grad(loss)(model, x))
  assert nxp.compile_report(own, plan, batch=batch).fits is not False
  assert nxp.train_step(loss).lower(plan, None, batch)
  assert_same_training(loss, {"plan": plan}, [X / 64])
  found = nxp.infer_rules(init, mesh, batch, min_size=1)
  assert [rule.names for rule in found.paths[0].rules] == [("tensor",), (None, "tensor")]
  assert set(SEEN) == {("data", "tensor")}


@pytest.mark.auto_axes("what it expects is of Auto axes")
def test_the_rules_of_the_caller_go_before_those_of_the_model():
  mesh, seen = nxp.make_mesh(data=2, tensor=4), []

  def loss(model, x):
    seen.append(jax.make_jaxpr(lambda x: constrain(x, "batch", "mlp"))(x).eqns[0].params["sharding"].spec)
    return model(x).mean()

  plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh, LogicalRules(batch="data", mlp="tensor"))
  model, evaluate = nxp.create_sharded_model(plan), nxp.eval_step(loss)
  evaluate(model, X)
  with use_rules(LogicalRules(batch="tensor", mlp=None)):
    evaluate(model, X)
  assert seen == [P("data", "tensor"), P("tensor", None)]
  assert str(evaluate.compiles[1]) == "call 1: rules in scope: None -> LogicalRules(batch='tensor', mlp=None)"


def test_a_scope_makes_its_mesh_the_active_one(mesh):
  with use_rules(RULES, mesh):
    assert jax.sharding.get_mesh() == mesh
    with use_rules(RULES, nxp.make_mesh(data=8, tensor=1)):
      assert dict(jax.sharding.get_mesh().shape) == {"data": 8, "tensor": 1}
    assert jax.sharding.get_mesh() == mesh
  assert jax.sharding.get_abstract_mesh().empty
  with jax.set_mesh(nxp.make_mesh(data=8)), use_rules(RULES, mesh):
    assert jax.sharding.get_mesh() == mesh
    with jax.set_mesh(None), use_rules(RULES):
      assert jax.sharding.get_abstract_mesh().empty


def on_shards(mesh):
  body = jax.shard_map(
    lambda x: constrain(x, "bacth", None), mesh=mesh, in_specs=P("data"), out_specs=P("data")
  )
  with use_rules(RULES, mesh):
    jax.jit(body)(X)


def with_rules(*names, shape=(8, 8), mesh=None):
  with use_rules(RULES, mesh):
    jax.jit(lambda x: constrain(x, *names))(np.zeros(shape, np.float32))


REFUSED = {
  "a misspelt name": (lambda mesh: with_rules("bacth", None), r"named 'bacth'[\s\S]*did you mean 'batch'"),
  "also where all axes are manual": (on_shards, "named 'bacth'"),
  "a dim that does not divide": (
    lambda mesh: with_rules("batch", "embed", shape=(2, 6), mesh=mesh),
    r"cannot shard an activation: dim 1 \('embed'\) has length 6",
  ),
  "another number of names": (
    lambda mesh: with_rules("batch"),
    r"1 names for an array of 2 dims[\s\S]*shape \(8, 8\), names \('batch',\)",
  ),
  "rules that do not fit the mesh": (
    lambda mesh: with_rules(mesh=nxp.make_mesh(data=8)),
    "rule for 'embed' can never apply",
  ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_an_error(call, message):
  with pytest.raises(ShardingError, match=message):
    call(nxp.make_mesh(data=2, tensor=4))


def test_a_padded_name_is_left_to_the_compiler_where_it_does_not_divide():
  init = lambda: nnx.Embed(30, 8, rngs=nnx.Rngs(0), embedding_metadata={"out_sharding": ("vocab", None)})
  rules = nxp.LogicalRules(batch="data", vocab="tensor")
  plan = nxp.plan(init, nxp.make_mesh(data=2, tensor=4), rules, uneven="pad")
  with plan.scope():
    laid_out = nxp.constrain(jnp.ones((4, 30)), "batch", "vocab")
  assert laid_out.shape == (4, 30)
