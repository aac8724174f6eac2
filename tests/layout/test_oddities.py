"""What real modules hold besides float32 parameters at string paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as Spec

import nnx_parallel as nxp
from nnx_parallel.create.constructor import unsharded
from nnx_parallel.errors import PlanError


class Mine(nnx.Variable):
  """A Variable type of a user's own."""


class Odd(nnx.Module):
  def __init__(self, rngs):
    self.raw = nnx.data(jnp.ones((8, 16)))
    self.rope = nnx.data(jnp.ones((8,), jnp.complex64))
    self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Dict(scale=nnx.Param(jnp.ones(())))])
    self.by_int = nnx.data({1: nnx.Param(jnp.ones(8))})
    self.by_tuple = nnx.data({("a", 2): nnx.Param(jnp.ones((8, 16), jnp.int8))})
    self.mine = Mine(jnp.ones((8,), jnp.float8_e4m3fn))
    self.half = nnx.Param(jnp.ones((16, 8), jnp.bfloat16))
    self.number = nnx.Param(2.0)
    self.nothing = nnx.Variable(None)
    self.absent = None
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.cache = nnx.Cache(jnp.zeros((4, 8)))
    self.lora = nnx.LoRA(8, 4, 8, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.key = nnx.data(jax.random.key(3))
    self.empty = nnx.Dict()
    self.act = jnp.sin


init = lambda: Odd(nnx.Rngs(0))
mesh = lambda: nxp.make_mesh(fsdp=8)
EXPECTED = {
  "by_int.1": ("Param", "float32", Spec("fsdp")), "by_tuple.('a', 2)": ("Param", "int8", Spec(None, "fsdp")),
  "cache": ("Cache", "float32", Spec(None, "fsdp")), "dropout.rngs.count": ("RngCount", "uint32", Spec()),
  "dropout.rngs.key": ("RngKey", "key<fry>", Spec()), "half": ("Param", "bfloat16", Spec("fsdp", None)),
  "key": ("array", "key<fry>", Spec()), "layers.0.kernel": ("Param", "float32", Spec(None, "fsdp")),
  "layers.1.scale": ("Param", "float32", Spec()), "lora.lora_a": ("LoRAParam", "float32", Spec("fsdp", None)),
  "mine": ("Mine", "float8_e4m3fn", Spec("fsdp")), "norm.mean": ("BatchStat", "float32", Spec("fsdp")),
  "number": ("Param", "float32", Spec()), "raw": ("array", "float32", Spec(None, "fsdp")),
  "rope": ("array", "complex64", Spec("fsdp")),
}  # fmt: skip


def test_all_of_it_is_planned():
  plan = nxp.plan(init, mesh(), nxp.fsdp(min_size=4))
  found = {leaf.name: (leaf.kind, str(leaf.dtype), leaf.spec) for leaf in plan.leaves}
  assert {name: found.get(name) for name in EXPECTED} == EXPECTED
  assert not any("nothing" in name or "empty" in name for name in found)


def test_all_of_it_is_created_with_the_values_of_one_device():
  model, alone = nxp.create_sharded_model(init, mesh(), nxp.fsdp(min_size=4)), unsharded(init)
  plan = nxp.plan(init, mesh(), nxp.fsdp(min_size=4))
  ours, theirs = (nnx.to_flat_state(nnx.state(module)) for module in (model, alone))
  assert ours.paths == theirs.paths
  for (path, a), (_, b) in zip(ours, theirs, strict=True):
    if path == ("nothing",):
      assert a.get_value() is None
      continue
    a, b = (leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf for leaf in (a, b))
    assert a.sharding.is_equivalent_to(plan.of("model")[path].sharding, a.ndim)
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_masked_and_empty_optimizer_state():
  label = lambda path, _: "adam" if "kernel" in jax.tree_util.keystr(path) else "frozen"
  labels = functools.partial(jax.tree.map_with_path, label)
  tx = optax.multi_transform({"adam": optax.adam(1e-3), "frozen": optax.set_to_zero()}, labels)
  plan = nxp.plan(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), mesh(), nxp.fsdp(min_size=8), optimizer=tx)
  assert not [leaf.name for leaf in plan.leaves if leaf.root == "optimizer" and leaf.name.endswith("bias")]
  model, optimizer = nxp.create_sharded_model(plan)

  @nnx.jit
  def step(model, optimizer, x):
    grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)

  before = jax.device_get(model.bias[...])
  step(model, optimizer, jnp.ones((4, 8)))
  np.testing.assert_array_equal(jax.device_get(model.bias[...]), before)
  (moment,) = [leaf for leaf in plan.leaves if leaf.name.endswith("mu.kernel")]
  assert moment.spec == Spec(None, "fsdp")


def test_a_variable_that_holds_a_tree_is_refused_with_what_to_do():
  class Tree(nnx.Module):
    def __init__(self):
      self.table = nnx.Param({"a": jnp.ones(8), "b": jnp.ones(8)})

  with pytest.raises(nxp.errors.PlanError, match=r"table holds a dict instead of one arr(.|\n)*nnx.Dict"):
    nxp.plan(Tree, mesh())


def test_a_parameter_may_be_called_like_a_counter_of_the_optimizer():
  init = lambda: nnx.Dict(count=nnx.Param(jnp.ones((8, 8))), other=nnx.Param(jnp.ones((8, 8))))
  plan = nxp.plan(init, mesh(), nxp.fsdp(min_size=0), optimizer=optax.adam(1e-3))
  assert plan["optimizer/opt_state.0.count"].decision.reason == "not parameter state"
  assert plan["optimizer/opt_state.0.mu.count"].parameter == ("count",)


def test_a_transformation_that_keeps_plain_arrays_has_the_layout_of_the_parameters():
  def init(params):
    return {"mu": jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(params)), "count": jnp.zeros((), "int32")}

  tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
  model = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
  plan = nxp.plan(model, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=tx)
  assert plan["optimizer/opt_state.mu.kernel"].parameter == ("kernel",)
  assert plan["optimizer/opt_state.mu.kernel"].spec == plan["kernel"].spec
  assert plan["optimizer/opt_state.count"].parameter is None


class NeedsNumbers(nnx.Module):  # A constructor that reads the value of an array
  def __init__(self, rngs):
    size = int(jnp.prod(jnp.array([4, 8])))
    self.layer = nnx.Linear(size, size, rngs=rngs)


@pytest.mark.auto_axes("a program of its own, for which JAX wants shardings stated")
def test_a_constructor_that_needs_values_is_created_in_the_two_ways_that_the_error_names():
  def eager():
    with jax.ensure_compile_time_eval():
      return NeedsNumbers(nnx.Rngs(0))

  mesh, live = nxp.make_mesh(fsdp=8), NeedsNumbers(nnx.Rngs(0))
  with pytest.raises(nxp.errors.PlanError, match=r"ensure_compile_time_eval\(\)(.|\n)*nnx.clone\(live\)"):
    nxp.plan(lambda: NeedsNumbers(nnx.Rngs(0)), mesh)
  for init in (eager, lambda: nnx.clone(live)):
    model = nxp.create_sharded_model(init, mesh, nxp.fsdp(min_size=0))
    kernel = model.layer.kernel.get_value()
    assert kernel.sharding.spec == Spec(None, "fsdp")
    np.testing.assert_array_equal(kernel, live.layer.kernel[...])


class Block(nnx.Module):
  def __init__(self, drawn=False):
    self.scale = jax.random.normal(jax.random.key(0), (4,)) if drawn else jnp.arange(4.0)
    self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.linear(x) * self.scale[None]


BOXES = {
  "list": lambda: [Block(), Block(True)],
  "dict": lambda: {"b": Block(), "a": Block(True)},
  "tuple in a list": lambda: [Block(), (Block(True),)],
}


@pytest.mark.parametrize("make", BOXES.values(), ids=BOXES)
def test_plain_containers_of_a_module_that_is_no_pytree(make):
  class Stack(nnx.Module, pytree=False):
    def __init__(self):
      self.blocks = make()

    def __call__(self, x):
      for block in jax.tree.leaves(self.blocks, is_leaf=lambda node: isinstance(node, Block)):
        x = block(x)
      return x

  plan = nxp.plan(Stack, nxp.make_mesh(fsdp=4, data=2), nxp.fsdp(min_size=4), optimizer=optax.sgd(0.1))
  assert sum(leaf.root == "model" for leaf in plan.leaves) == 6
  step, loss = nxp.train_step(lambda model, x: (model(x) ** 2).mean()), (Stack()(np.ones((8, 4))) ** 2).mean()
  metrics = step(*nxp.create_sharded_model(plan), np.ones((8, 4), np.float32))
  assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)


class Table:  # A static object: neither a module nor a pytree
  def __init__(self, cos):
    self.cos = cos


class Rotary(nnx.Module):
  def __init__(self, make, box=lambda table: table):
    self.linear, self.table = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), box(Table(make()))

  def __call__(self, x):
    return self.linear(x) * self.table.cos[None]


def evaluated():
  with jax.ensure_compile_time_eval():
    return jnp.cos(jnp.arange(4.0))


@pytest.mark.parametrize("make", [lambda: np.cos(np.arange(4.0, dtype=np.float32)), evaluated])
def test_static_objects_that_hold_arrays(make):
  """jax may not compare them: each trace of the constructor makes another."""
  init = lambda: Rotary(make)
  plan = nxp.plan(init, nxp.make_mesh(fsdp=4, data=2), nxp.fsdp(min_size=4), optimizer=optax.sgd(0.1))
  step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
  loss = (init()(np.ones((8, 4), np.float32)) ** 2).mean()
  for _ in range(2):
    metrics = step(*nxp.create_sharded_model(plan), np.ones((8, 4), np.float32))
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
  assert nxp.plan(init, plan.mesh)["linear.kernel"].spec == Spec(None, None)


def test_a_static_object_with_an_array_that_only_a_trace_has():
  with pytest.raises(PlanError, match=r"table is a Table, static for flax, and its cos is an array"):
    nxp.plan(lambda: Rotary(lambda: jnp.cos(jnp.arange(4.0))), nxp.abstract_mesh(fsdp=4))
