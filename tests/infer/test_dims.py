"""The table of dims, against numbers: what it says of each operation holds for random arrays."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from nnx_parallel.attention.tiling import Grid, Tiles, Untiled
from nnx_parallel.core.jaxprs import bind as _bind
from nnx_parallel.infer import dims
from nnx_parallel.infer.dims import dim_map, moved


def bind(eqn, inputs):
  return [np.asarray(x) for x in _bind(eqn, [jnp.asarray(x) for x in inputs])]


def array(*shape, seed=0):
  return np.random.default_rng(seed).uniform(0.5, 2.0, shape).astype("float32")


X, Y, MATRICES = array(4, 3, 6), array(4, 3, 6, seed=1), array(4, 3, 3) + 4 * np.eye(3, dtype="float32")
ROWS = np.random.default_rng(0).integers(0, 4, (3, 5, 1)).astype("int32")
IMAGE = array(2, 6, 5, 4)


@jax.custom_jvp
def sine(x):
  return lax.sin(x)


sine.defjvp(lambda x, t: (sine(*x), t[0]))


def gather(table, indices, sizes, **dims):
  numbers = lax.GatherDimensionNumbers(start_index_map=(1,), **dims)
  return lax.gather(table, indices, numbers, sizes)


def scatter(how, *dims, **batching):
  numbers = lax.ScatterDimensionNumbers(*dims, **batching)
  return lambda table, indices, updates: how(table, indices, updates, numbers)


def convolution(x, kernel, **options):
  return lax.conv_general_dilated(
    x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
  )


CASES = [
  ("sin", "abc->abc", lax.sin, X),
  ("mul", "abc,abc->abc", lax.mul, X, Y),
  ("max", "abc,->abc", lambda x: lax.max(x, 1.0), X),
  ("clamp", ",abc,->abc", lambda x: lax.clamp(0.8, x, 1.2), X),
  ("select_n", "abc,abc,abc->abc", lambda x, y: lax.select_n(x > 1, x, y), X, Y),
  ("custom_jvp_call", "abc->abc", sine, X),
  ("optimization_barrier", "abc,de->abc,de", lambda x, y: lax.optimization_barrier((x, y)), X, array(2, 3)),
  ("transpose", "abc->cab", lambda x: lax.transpose(x, (2, 0, 1)), X),
  ("broadcast_in_dim", "ab->acb", lambda x: lax.broadcast_in_dim(x, (4, 5, 6), (0, 2)), array(4, 6)),
  ("broadcast_in_dim", "a_->ab", lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), array(4, 1)),
  ("squeeze", "a_b->ab", lambda x: lax.squeeze(x, (1,)), array(4, 1, 6)),
  ("iota", "->a_b", lambda: lax.broadcasted_iota("float32", (4, 3, 6), 1)),
  ("reduce_sum", "abc->ac", lambda x: x.sum(1), X),
  ("reduce_max", "abc->b", lambda x: lax.reduce_max(x, (0, 2)), X),
  ("reduce_prod", "abc->ab", lambda x: x.prod(2), X),
  ("argmax", "abc->ab", lambda x: lax.argmax(x, 2, jnp.int32), X),
  ("cumsum", "aBc->aBc", lambda x: lax.cumsum(x, 1), X),
  ("cumlogsumexp", "abC->abC", lambda x: lax.cumlogsumexp(x, 2), X),
  ("sort", "abC,abC->abC,abC", lambda x, y: lax.sort((x, y), num_keys=1), X, Y),
  ("top_k", "abC->abC,abC", lambda x: lax.top_k(x, 2), X),
  ("rev", "Abc->Abc", lambda x: lax.rev(x, (0,)), X),
  ("concatenate", "aBc,aBc->aBc", lambda x, y: lax.concatenate([x, y], 1), X, Y),
  ("split", "Abc->Abc,Abc", lambda x: lax.split(x, (1, 3), axis=0), X),
  ("stack", "abc,abc->ab_c", lambda x, y: jnp.stack([x, y], 2), X, Y),
  ("unstack", "a_b->ab,ab,ab", lambda x: jnp.unstack(x, axis=1), X),
  ("slice", "abC->abC", lambda x: x[:, :, 1:4], X),
  ("pad", "aBc,->aBc", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0), (0, 0, 0))), X),
  ("dynamic_slice", "aBc,,,->aBc", lambda x, n: lax.dynamic_slice_in_dim(x, n, 2, 1), X, np.int32(1)),
  ("dynamic_update_slice", "aBc,aBc,,,->aBc",
   lambda x, y, n: lax.dynamic_update_slice_in_dim(x, y, n, 1), X, array(4, 2, 6), np.int32(1)),
  ("reduce_window_max", "aBc->aBc",
   lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 1), (1, 1, 1), "VALID"), X),
  ("cholesky", "a__->a__", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), MATRICES @ MATRICES.mT),
  ("triangular_solve", "a__,a__->a__",
   lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True), MATRICES, X),
  ("fft", "ab_->ab_", lambda x: jnp.fft.fft(x), X.astype("complex64")),
  ("dot_general", "ab,bc->ac", lax.dot, array(4, 5), array(5, 6)),
  ("dot_general", "abc,dbc->bad", lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((1,), (1,)))),
   X, array(5, 3, 6)),
  ("dot_general", "abc,cbd->ad", lambda x, y: lax.dot_general(x, y, (((1, 2), (1, 0)), ((), ()))), X,
   array(6, 3, 5)),
  ("ragged_dot_general", "Ab,_bc,_->Ac", lax.ragged_dot, array(6, 4), array(2, 4, 5),
   np.array([2, 4], "int32")),
  ("conv_general_dilated", "aBCd,__de->aBCe", convolution, IMAGE, array(3, 3, 4, 8)),
  ("conv_general_dilated", "aBCD,____->aBCD",
   lambda x, y: convolution(x, y, feature_group_count=4), IMAGE, array(3, 3, 1, 8)),
  ("gather", "aBc,de_->adec",
   lambda x, n: gather(x, n, (4, 1, 6), offset_dims=(0, 3), collapsed_slice_dims=(1,)), X, ROWS % 3),
  ("gather", "ABc,de_->dec", lambda x, n: lax.gather(
    x, n, lax.GatherDimensionNumbers((2,), (0, 1), (0, 1)), (1, 1, 6)), X, ROWS.repeat(2, -1) % 3),
  ("gather", "a_b,cd_->a_cdb",
   lambda x, n: gather(x, n, (4, 2, 6), offset_dims=(0, 1, 4), collapsed_slice_dims=()), X, ROWS % 2),
  ("gather", "aBc,ad_->adc", lambda x, n: gather(
    x, n, (1, 1, 6), offset_dims=(2,), collapsed_slice_dims=(1,), operand_batching_dims=(0,),
    start_indices_batching_dims=(0,)), array(3, 4, 6), ROWS),
  ("scatter-add", "Ab,cd_,cdb->Ab", scatter(lax.scatter_add, (2,), (0,), (0,)), array(4, 6), ROWS,
   array(3, 5, 6)),
  ("scatter-add", "aBc,ad_,adc->aBc", scatter(
    lax.scatter_add, (2,), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,)),
   array(3, 4, 6), ROWS, array(3, 5, 6)),
  ("reshape", "a+bc->a+_bc", lambda x: x.reshape(2, 2, 3, 6), X),
  ("reshape", "ab+_->ab+", lambda x: x.reshape(4, 18), X),
]  # fmt: skip


def traced(name, run, args):
  """The first operation of that name, and its inputs."""
  jaxpr = jax.make_jaxpr(run)(*args)
  known = dict(zip((*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars), (*args, *jaxpr.consts), strict=True))
  eqns = [*jaxpr.jaxpr.eqns]
  while eqns:
    eqn = eqns.pop(0)
    inputs = [np.asarray(read(known, v)) for v in eqn.invars]
    if eqn.primitive.name.replace("scatter_add", "scatter-add") == name:
      return eqn, inputs
    if eqn.primitive.name in ("jit", "pjit"):
      inner = eqn.params["jaxpr"].jaxpr
      known |= dict(zip(inner.invars, inputs, strict=True))
      eqns = [*inner.eqns, *eqns]
    else:
      known |= dict(zip(eqn.outvars, bind(eqn, inputs), strict=True))
  raise AssertionError(f"no {name}")


def read(known, var):
  return var.val if hasattr(var, "val") else known[var]


def changed(arrays, factors, factor, change, keep=lambda x: True):
  """The arrays with a change along their dim of that factor."""
  return [
    change(x, own.index(factor)) if factor in own and keep(x) else x
    for x, own in zip(arrays, factors, strict=True)
  ]


def close(found, wanted):
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.each_case
@pytest.mark.parametrize(
  ("name", "text", "run", "args"),
  [pytest.param(*case[:3], case[3:], id=f"{case[0]} {case[1]}") for case in CASES],
)
def test_the_table_is_right_about_numbers(name, text, run, args):
  eqn, inputs = traced(name, run, args)
  found = dim_map(eqn)
  assert str(found) == text
  results = bind(eqn, inputs)
  rng = np.random.default_rng(3)
  plain = {f for own in (*found.operands, *found.results) for f in own if f is not None}
  for factor in plain - found.mixed - found.major:
    size = next(
      x.shape[own.index(factor)]
      for x, own in zip((*inputs, *results), (*found.operands, *found.results), strict=True)
      if factor in own
    )
    order = rng.permutation(size)
    moved_inputs = changed(inputs, found.operands, factor, lambda x, d: np.take(x, order, d))  # noqa: B023
    moved_results = changed(results, found.results, factor, lambda x, d: np.take(x, order, d))  # noqa: B023
    if name == "argmax" and factor in found.reduced:
      continue
    close(bind(eqn, moved_inputs), moved_results)  # in another order, the same in that order
    if factor in found.reduced:
      _check_reduced(eqn, inputs, found, factor, results)
    else:
      _check_local(eqn, inputs, found, factor, results)


def _check_local(eqn, inputs, found, factor, results):
  """A position of the results depends on the same position of the operands."""

  def others(x, d):
    away = np.roll(x, 1, d)
    np.moveaxis(away, d, 0)[0] = np.moveaxis(x, d, 0)[0]
    return away

  def first(x, d):
    return np.take(x, [0], d)

  other = bind(eqn, changed(inputs, found.operands, factor, others))
  close(changed(other, found.results, factor, first), changed(results, found.results, factor, first))


def _check_reduced(eqn, inputs, found, factor, results):
  """The results of two blocks of a reduced dim make the whole one."""
  name = eqn.primitive.name
  ways = {"reduce_max": (-np.inf, np.maximum), "reduce_prod": (1.0, np.multiply)}
  fill, join = ways.get(name, (0.0, np.add))

  def block(keep):
    def change(x, d):
      part = np.full_like(x, fill)
      np.moveaxis(part, d, 0)[keep] = np.moveaxis(x, d, 0)[keep]
      return part

    return bind(eqn, changed(inputs, found.operands, factor, change, lambda x: x.dtype.kind == "f"))

  start = inputs[0] if name.startswith("scatter") else 0.0
  pairs = zip(block(slice(None, 1)), block(slice(1, None)), strict=True)
  close([join(a, b) - start for a, b in pairs], results)


@pytest.mark.cases(15)
@pytest.mark.parametrize(
  ("name", "run", "args"), [pytest.param(c[0], c[2], c[3:], id=f"{c[0]} {c[1]}") for c in CASES]
)
def test_a_block_of_a_result_is_made_from_blocks(name, run, args):
  eqn, inputs = traced(name, run, args)
  result = bind(eqn, inputs)[0]
  for d, size in enumerate(result.shape):
    grid, label = Grid({"dim": size}, {"dim": max(1, size // 2)}), (("dim", d, 1),)
    tiles = Tiles(types.SimpleNamespace(eqns=[eqn]), grid, lambda var, own: False)
    try:
      tiles.need(eqn.outvars[0], label, strict=lambda _: True)
    except Untiled:
      continue
    values = dict(zip([id(v) for v in eqn.invars], inputs, strict=True))
    for n in range(grid.count("dim")):
      places = {"dim": n}
      known = {leaf: grid.take(jnp.asarray(values[id(leaf[0])]), leaf[1], places) for leaf in tiles.leaves}
      found = tiles.value(eqn.outvars[0], label, known, places)
      close([found], [grid.take(jnp.asarray(result), label, places)])


UNMAPPED = frozenset((
  # They hold programs.
  "call", "closed_call", "cond", "custom_lin", "custom_linear_solve", "custom_vjp_call", "eval_jaxpr", "jit",
  "reduce", "reduce_window", "remat2", "scan", "select_and_scatter", "while",
  # They send: dims of a shard are not those of the array.
  "all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all",
  # Random numbers depend on the place in the whole array.
  "random_fold_in", "random_gamma", "random_seed", "random_split", "rng_bit_generator", "rng_uniform",
  "threefry2x32",
  # Effects, and arrays without operands.
  "after_all", "create_token", "empty2", "get", "swap",
  # Linear algebra that mixes dims in other ways.
  "eig", "hessenberg", "polynomial", "tridiagonal",
))  # fmt: skip
"""Operations of jax that the table leaves out on purpose."""


def test_each_operation_of_jax_is_in_the_table_or_left_out_by_name():
  known = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
  assert known - dims._RULES.keys() <= UNMAPPED, "a new operation: put it into the table, or into UNMAPPED"
  assert not UNMAPPED & dims._RULES.keys()


def test_random_bits_depend_on_the_key_at_their_place():
  draw = jax.vmap(lambda key: jax.random.bits(key, (3, 2)))
  eqns = jax.make_jaxpr(draw)(jax.random.split(jax.random.key(0), 4)).eqns
  (eqn,) = (eqn for eqn in eqns if eqn.primitive.name == "random_bits")
  assert str(dim_map(eqn)) == "a->a__"


def test_what_is_not_in_the_table_has_no_map():
  eqn = jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda _, x: x * 2, x))(X).eqns[-1]
  assert dim_map(eqn) is None


@pytest.mark.parametrize(
  ("before", "after", "text"),
  [
    ((8, 16), (8, 4, 4), "ab+->ab+_"),
    ((8, 4, 4), (8, 16), "ab+_->ab+"),
    ((8, 6), (4, 12), "a+_->a+_"),
    ((1, 8), (8,), "_a->a"),
    ((8,), (1, 1, 8), "a->__a"),
    ((), (1,), "->_"),
    ((2, 3, 4), (6, 4), "a+_b->a+b"),
  ],
)
def test_a_reshape_keeps_the_major_dims_of_its_groups(before, after, text):
  (eqn,) = jax.make_jaxpr(lambda x: lax.reshape(x, after))(jnp.zeros(before)).eqns
  assert str(dim_map(eqn)) == text


def test_a_part_of_a_dim_keeps_its_place_in_a_reshape():
  assert moved(1, 1, 6, (4, 6), (24,)) == (0, 4)
  assert moved(0, 1, 4, (4, 6), (2, 12)) is None
  assert moved(0, 2, 3, (24,), (2, 12)) == (1, 1)
