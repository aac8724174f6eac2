"""What reports count in compiled programs, in which arithmetic, and what they say that they do not count."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.report.chips import ENDLESS
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.report.program.cost import cost

DEPTH, WIDTH, WORDS = 4, 64, 512
BATCH = jax.ShapeDtypeStruct((256, WIDTH), jnp.bfloat16)
BF16, F32 = jnp.bfloat16, jnp.float32


class Net(nnx.Module):  # Scanned layers and a head in bfloat16
  def __init__(self):
    self.up = nnx.Param(jnp.zeros((DEPTH, WIDTH, WIDTH)), out_sharding=("layers", "embed", "mlp"))
    self.head = nnx.Param(jnp.zeros((WIDTH, WORDS)), out_sharding=("embed", "mlp"))

  def __call__(self, x):
    x, _ = jax.lax.scan(lambda x, w: (x @ w.astype(BF16), None), x, self.up[...])
    return x @ self.head[...].astype(BF16)


loss = lambda model, batch: jnp.mean(jnp.square(model(batch).astype(F32)))
RULES = nxp.LogicalRules(batch="fsdp", embed="fsdp", mlp=None, layers=None)


# The arithmetic of each product ---------------------------------------------------------------


def test_the_products_of_a_compiled_program_are_counted_by_their_type():
  layout = nxp.plan(Net, nxp.make_mesh(fsdp=8), RULES, optimizer=optax.sgd(0.1))
  report = compile_report(nxp.train_step(loss), layout, batch=BATCH, chip="h100")
  assert report.cost.arithmetic == {"bfloat16": report.cost.flops}


# Convolutions ---------------------------------------------------------------------------------


def program(lowered):
  """The text of a program that no backend has rewritten."""
  return lowered.compiler_ir("hlo").as_hlo_module().to_string()


@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"feature_group_count": 4}, {"kernel_dilation": 2}])
def test_convolutions_have_the_flops_that_jax_counts(options):
  init = lambda: nnx.Conv(8, 16, (3, 3), padding="VALID", use_bias=False, rngs=nnx.Rngs(0), **options)
  images = jax.ShapeDtypeStruct((16, 9, 9, 8), F32)
  model = nnx.eval_shape(init)
  lowered = nnx.jit(lambda model, x: model(x)).lower(model, images).lowered
  counted = lowered.cost_analysis()["flops"]
  assert cost(program(lowered)).flops == counted


@pytest.mark.parametrize(
  "options",
  [
    {"window_strides": (1,), "padding": [(63, 63)]},  # how TPU compilers write a product with two output dims
    {"window_strides": (2,), "padding": "SAME"},
    {"window_strides": (3,), "padding": [(5, -2)], "lhs_dilation": (2,), "rhs_dilation": (3,)},
  ],
  ids=["product", "same", "dilated"],
)
def test_products_with_the_padding_of_a_convolution_are_not_counted(options):
  kernel = jax.ShapeDtypeStruct((64 if len(options) == 2 else 3, 8, 4), F32)
  run = lambda x, w: jax.lax.conv_general_dilated(x, w, **options, dimension_numbers=("NHC", "HIO", "NHC"))
  lowered = jax.jit(run).lower(jax.ShapeDtypeStruct((16, 32, 8), F32), kernel)
  assert cost(program(lowered)).flops == lowered.cost_analysis()["flops"]


# What is not counted is said ------------------------------------------------------------------


def halved(x, w, count):
  return jax.lax.fori_loop(0, count, lambda _, x: 0.5 * (x @ w), x)


@pytest.mark.parametrize("count", ["known", "unknown"])
def test_a_compiled_loop_of_unknown_length_is_listed(count):
  x = jax.ShapeDtypeStruct((8, 8), F32)
  if count == "known":
    text = jax.jit(lambda x: halved(x, x, 7)).lower(x).compile().as_text()
    assert (cost(text).flops, cost(text).uncounted) == (7 * 2 * 8**3, {})
  else:
    text = jax.jit(halved).lower(x, x, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    assert (cost(text).flops, cost(text).uncounted) == (2 * 8**3, {ENDLESS: 1})


# Any program ------------------------------------------------------------------------------------

_FLOATS = ["float16", "bfloat16", "float32"]
_DTYPES = [
  *_FLOATS, "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool", "complex64", "float8_e4m3fn",
  "float8_e5m2", "int4", "uint4",
]  # fmt: skip


def _part(rng, x, deep=0):
  """Some operation on a (4, 4) array, as often of a loop or branch."""
  again = lambda y: _part(rng, y, deep + 1) if deep < 2 else y
  some = jnp.sum(x != jnp.zeros_like(x))  # a number that no compiler knows
  wide = x.astype("float32")
  dtype = rng.choice([*_FLOATS, "int32", "uint8"])
  limit = rng.choice([3, 100] if "int" in dtype else [0.75, 7.5, np.inf, 1e4])
  limit, step = (jnp.asarray(n, dtype) for n in (limit, rng.choice([1, 2, 0.25])))
  first = rng.choice([jnp.zeros((), dtype), some.astype(dtype)])
  loop, branch = jax.lax.while_loop, jax.lax.switch
  kinds = [
    lambda: loop(lambda c: c[0] < limit, lambda c: (c[0] + step, again(c[1])), (first, x))[1],
    lambda: loop(lambda c: (c[0] > 1) & (c[0] < 1000), lambda c: (c[0] * 3, again(c[1])), (some, x))[1],
    lambda: jax.lax.fori_loop(rng.choice([0, -3]), rng.choice([4, 7, some]), lambda i, y: again(y), x),
    lambda: jax.lax.scan(lambda y, z: (again(y), z), x, jnp.zeros((3, 2), x.dtype))[0],
    lambda: jax.lax.cond(some > 3, again, lambda y: y, x),
    lambda: branch(some, [lambda y: y, again, lambda y: y.T], x),
    lambda: jnp.matmul(x, x.T, preferred_element_type="int32") if x.dtype == "int8" else wide @ wide,
    lambda: jax.lax.conv(wide[None, None], wide[None, None, :3, :3], (1, 1), "SAME")[0, 0],
    lambda: x.astype(rng.choice(_DTYPES)),
    lambda: jnp.sort(wide, axis=rng.choice([0, 1])),
    lambda: x[jnp.argsort(wide[0])],
    lambda: jax.lax.dynamic_update_slice(x, x[:2, :2], (some.astype("int32"), jnp.int32(0))),
    lambda: wide.sum(0, keepdims=True) + wide,
  ]
  return rng.choice(kinds)().astype(x.dtype)


@pytest.mark.parametrize("seed", range(10))
def test_any_program_is_counted(seed):
  rng = random.Random(seed)

  def program(x):
    for _ in range(5):
      x = _part(rng, x)
    return x

  struct = jax.ShapeDtypeStruct((4, 4), rng.choice(_DTYPES))
  assert cost(jax.jit(program).lower(struct).compile().as_text()).hbm_bytes >= 0
