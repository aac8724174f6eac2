"""`check_gradients` finds each kind of wrong gradient, and raises no false alarm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import arrays_of, assert_same_arrays
from nnx_parallel.verify.check_gradients import coarsest
from training import placed

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
RULES = nxp.LogicalRules(batch=("data", "fsdp"))
X = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")


def same(x: jax.Array) -> jax.Array:
  return x


class Block(nnx.Module):  # A norm and a gated pair of layers, with something between them
  def __init__(self, scale: Any, middle: Callable[[jax.Array], jax.Array] = same):
    rngs = nnx.Rngs(0)
    self.norm = nnx.RMSNorm(16, rngs=rngs, scale_metadata={"out_sharding": (scale,)})
    names = [{"out_sharding": pair} for pair in (("fsdp", "tensor"), ("tensor", "fsdp"))]
    self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs, kernel_metadata=names[0])
    self.down = nnx.Linear(32, 16, rngs=rngs, kernel_metadata=names[1])
    self.middle = middle

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(nnx.gelu(self.middle(self.up(self.norm(x)))))


loss_fn = lambda model, x: (model(x) ** 2).mean()


def trained(init: Callable[[], nnx.Module], tx: Any = None, **options: Any) -> tuple[Any, Any, Any]:
  plan = nxp.plan(init, nxp.make_mesh(MESH), RULES, optimizer=tx or optax.sgd(0.1), **options)
  return plan, *placed(plan)


def check(init: Any, loss: Any = loss_fn, shape: tuple[int, ...] = (16, 16), **options: Any) -> Any:
  plan = nxp.plan(init, nxp.make_mesh(MESH), RULES)
  x = np.random.default_rng(0).normal(size=shape).astype("float32")
  return nxp.check_gradients(placed(plan), nxp.shard_batch(x, plan), loss, **options)


@pytest.mark.slow
def test_norm_scale_over_tensor_on_three_axes_is_found_and_named():
  found = check(lambda: Block("tensor"))
  assert not found
  assert found.wrong == ("norm.scale",)
  assert found.layouts == {"norm.scale": jax.P("tensor")}
  wrong = r"(?s)the gradients on this layout are wrong.*norm\.scale.*Fix: nxp\.train_step, or "
  with pytest.raises(nxp.errors.TrainError, match=wrong):
    found.raise_if_wrong()


def test_each_gradient_of_a_right_layout_is_right():
  found = check(lambda: Block(None))
  assert found
  assert all(look.difference < 1e-5 for look in found.comparisons)
  assert [look.name for look in found.comparisons] == ["down.bias", "down.kernel", "norm.scale", "up.kernel"]


def test_model_is_unchanged_and_random_numbers_are_not_used_up():
  class Dropping(Block):
    def __init__(self):
      super().__init__(None, nnx.Dropout(0.5, rngs=nnx.Rngs(1)))

  plan = nxp.plan(Dropping, nxp.make_mesh(MESH), RULES)
  model = placed(plan)
  before = arrays_of(model)
  assert nxp.check_gradients(model, nxp.shard_batch(X, plan), loss_fn)
  assert_same_arrays(arrays_of(model), before)


class Grouped(nnx.Module):
  def __init__(self):
    self.conv = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=nnx.Rngs(0))

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.conv(x)


@pytest.mark.slow
def test_grouped_convolution_in_a_jit_of_ones_own_is_found():
  found = check(Grouped, shape=(8, 4, 4, 8))
  assert found.wrong == ("conv.kernel",)
  assert found.comparisons[-1].factor == pytest.approx(2)
  assert "2 times the derivative" in str(found)


def in_reverse(change: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
  """The identity, whose reverse rule does something else; forward mode can pass it."""
  identity = lambda x: jax.custom_derivatives.linear_call(lambda _, x: x, lambda _, g: change(g), (), x)
  return identity


def with_own_rule(change: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
  """The identity as a `custom_vjp`, which forward mode cannot pass."""

  @jax.custom_vjp
  def identity(x: jax.Array) -> jax.Array:
    return x

  identity.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
  return identity


def double(g: jax.Array) -> jax.Array:
  return 2 * g


def without_sum(g: jax.Array) -> jax.Array:
  """Each device of `data` keeps its own part: the sum over the axis is missing in all gradients below."""
  mine = lambda g: g * (jax.lax.axis_index("data") == 0).astype(g.dtype)
  spec = jax.P(("data", "fsdp"))
  return jax.shard_map(mine, mesh=nxp.make_mesh(MESH), in_specs=spec, out_specs=spec, check_vma=False)(g)


@pytest.mark.cases(4)
@pytest.mark.parametrize("wrap", [in_reverse, with_own_rule])
@pytest.mark.parametrize(
  ("change", "factor"), [(double, 2.0), (jnp.zeros_like, 0.0), (without_sum, None)], ids=lambda x: str(x)[:16]
)
def test_wrong_reverse_rule_is_found_in_what_lies_before_it(wrap: Any, change: Any, factor: float | None):
  found = check(lambda: Block(None, wrap(change)))
  assert found.wrong == ("norm.scale", "up.kernel")
  last = next(look for look in found.comparisons if look.leaves == ("up.kernel",))
  assert ("the rule of identity is not the derivative" in found.fix) == (wrap is with_own_rule)
  assert factor is None or last.factor == pytest.approx(factor, abs=1e-4)
  assert factor != 0 or "the gradient is 0, and the derivative is not" in last.why


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{"microbatches": 4}, {"microbatches": 2, "gradients": "scattered"}])
def test_step_with_options_is_checked(options: dict[str, Any]):
  class Net(Block):  # With dropout and a layer to recompute: each microbatch draws numbers of its own
    def __init__(self):
      super().__init__(None, in_reverse(double))
      self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
      return self.dropout(nnx.remat(Block.__call__)(self, x))

  plan, model, optimizer = trained(Net, optax.adam(1e-3), zero=2)
  weighted = lambda model, x: nxp.weighted((model(x) ** 2).sum(), (x[:, 0] > 0).sum().astype(jnp.float32))
  found = nxp.train_step(weighted, **options).check_gradients(model, optimizer, nxp.shard_batch(X, plan))
  assert found.wrong == ("norm.scale", "up.kernel")
  looks = [look for look in found.comparisons if look.leaves in (("norm.scale",), ("up.kernel",))]
  assert {round(look.factor, 3) for look in looks} == {2}


@pytest.mark.slow
def test_each_of_several_models_is_checked():
  plan, first, one = trained(lambda: Block(None))
  _, second, two = trained(lambda: Block(None, in_reverse(double)))
  losses = {"a": lambda models, x: loss_fn(models["a"], x), "b": lambda models, x: loss_fn(models["b"], x)}
  x = nxp.shard_batch(X, plan)
  models, optimizers = {"a": first, "b": second}, {"a": one, "b": two}
  found = nxp.train_step(losses).check_gradients(models, optimizers, x)
  assert found.wrong == ("b.norm.scale", "b.up.kernel")
  with pytest.raises(nxp.errors.TrainError, match="there is a loss for 'b', and no optimizer"):
    nxp.train_step(losses).check_gradients(models, {"a": one}, x)


def test_loss_scale_and_frozen_parameters():
  class Half(nnx.Module):
    def __init__(self):
      self.up = nnx.Linear(16, 32, dtype=jnp.float16, rngs=nnx.Rngs(0))
      self.down = nnx.Linear(32, 16, dtype=jnp.float16, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
      return self.down(nnx.gelu(self.up(x))).astype(jnp.float32)

  only = lambda path, _: path[0] == "down"
  plan, model, optimizer = trained(Half, nxp.with_loss_scale(optax.sgd(0.1)), wrt=nnx.All(nnx.Param, only))
  found = nxp.train_step(loss_fn).check_gradients(model, optimizer, nxp.shard_batch(X, plan))
  assert found
  assert found.dtype == "float16"
  assert [look.name for look in found.comparisons] == ["down.bias", "down.kernel"]


@pytest.mark.slow
def test_loss_that_xla_gets_wrong_is_found():
  """A product comes out with the examples of other devices, forwards; where it gathers, it does not."""

  class Product(nnx.Module):
    def __init__(self):
      kernel = jax.random.normal(jax.random.key(0), (32, 32))
      self.kernel = nnx.Param(kernel, out_sharding=("fsdp", "tensor"))

    def __call__(self, x: jax.Array) -> jax.Array:
      x = nxp.constrain(x, "batch", "tensor")
      return nxp.constrain(x @ self.kernel[...].T, "batch", "tensor")

  found = check(Product, lambda model, x: (jnp.sin(model(x)) * x).mean(), (16, 32))
  assert not found
  assert found.loss_verdict == "wrong"
  assert abs(found.losses["by forward mode"] - found.losses["with the gradient"]) > 1e-3
  assert str(found).count(": wrong\n") == 1


@pytest.mark.slow
def test_examples_that_depend_on_each_other_are_no_alarm():
  def contrastive(model: Any, x: jax.Array) -> jax.Array:
    y = model(x)
    return -jnp.diag(jax.nn.log_softmax(y @ y.T)).mean()

  found = check(lambda: Block(None), contrastive)
  assert found.loss_verdict == "right"


def test_gradient_that_is_not_finite_is_wrong():
  found = check(lambda: Block(None, lambda x: jnp.sqrt(x * 0)))
  assert not found
  assert {"norm.scale", "up.kernel"} <= set(found.wrong)
  assert "wrong: not finite" in str(found)
  with pytest.raises(nxp.errors.TrainError, match=r"Fix: .*jax_debug_nans"):
    found.raise_if_wrong()


@pytest.mark.slow
def test_equal_layers_have_one_row():
  two = lambda: nnx.List([Block(None), Block(None)])
  found = check(two, lambda m, x: loss_fn(m[1], m[0](x)))
  assert found
  assert found.comparisons[0].name == "*.down.bias"
  assert found.comparisons[0].leaves == ("0.down.bias", "1.down.bias")


@pytest.mark.slow
def test_padded_and_tied_leaves():
  class Tied(nnx.Module):
    def __init__(self):
      names = {"out_sharding": ("tensor", "fsdp")}
      self.embed = nnx.Embed(13, 16, rngs=nnx.Rngs(0), embedding_metadata=names)
      self.head = self.embed.embedding

    def __call__(self, tokens: jax.Array) -> jax.Array:
      return self.embed(tokens) @ self.head[...].T

  plan = nxp.plan(Tied, nxp.make_mesh(MESH), RULES, uneven="pad")
  model = placed(plan)
  tokens = nxp.shard_batch(np.arange(32, dtype=np.int32).reshape(16, 2) % 13, plan)
  found = nxp.check_gradients(model, tokens, loss_fn)
  assert found
  assert found.comparisons[0].leaves == ("embed.embedding",)
  assert model.embed.embedding.get_raw_value().shape == (14, 16)


def test_explicit_axes_and_the_shardings_that_a_loss_states():
  mesh = nxp.make_mesh(data=8, explicit=True)
  plan = nxp.plan(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), mesh, nxp.replicate())
  model, x = placed(plan), nxp.shard_batch(X, plan)
  assert nxp.check_gradients(model, x, lambda model, x: loss_fn(model, jax.reshard(x, jax.P("data"))))
  with jax.set_mesh(mesh):
    assert nxp.check_gradients(model, x, loss_fn)


ROUND = [(None, "cpu", "float32"), (None, "tpu", "bfloat16"), (None, "gpu", "float16"),
         ("highest", "tpu", "float32")]  # fmt: skip


@pytest.mark.parametrize(("precision", "platform", "dtype"), ROUND)
def test_products_of_float32_round_as_the_chip_does_by_default(precision: Any, platform: str, dtype: str):
  with jax.default_matmul_precision(precision):
    assert coarsest(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2))), platform) == dtype
  assert coarsest(jax.make_jaxpr(jnp.sin)(jnp.ones(2)), platform) == "float32"


def scale_by_largest(g: jax.Array) -> jax.Array:
  """Not linear, so that no derivative has this transpose."""
  return g / abs(g).max()


def straight_through(x: jax.Array, change: Callable[[jax.Array], jax.Array] = same) -> jax.Array:
  """Rounds; its gradient is no derivative, on purpose."""

  @jax.custom_vjp
  def quantized(x: jax.Array) -> jax.Array:
    return (x * 16).astype(jnp.int8).astype(x.dtype) / 16

  quantized.defvjp(lambda x: (quantized(x), None), lambda _, g: (change(g),))
  return quantized(x)


@pytest.mark.slow
def test_rounding_with_a_rule_of_its_own_is_no_alarm():
  found = check(lambda: Block(None, straight_through))
  assert found
  assert found.loss_verdict == "right"
  assert {look.verdict for look in found.comparisons} == {"right"}
  assert "quantized: rounds, so that its reverse rule is taken at its word" in str(found)
  found = check(lambda: Block(None, lambda x: straight_through(x, scale_by_largest)))
  assert found.comparisons[0].verdict == "not decided"
  assert "the reverse rule of quantized, which rounds, is not linear" in found.summary


@pytest.mark.nightly
@pytest.mark.slow
def test_each_of_many_equal_layers_is_looked_at():
  class Deep(nnx.Module):
    def __init__(self):
      self.layers = nnx.List([nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(n)) for n in range(20)])

    def __call__(self, x: jax.Array) -> jax.Array:
      for n, layer in enumerate(self.layers):
        x = x + x @ (in_reverse(double) if n == 18 else same)(layer.kernel[...]) * 0.1
      return x

  found = check(Deep)
  assert found.wrong == ("layers.18.kernel",)
