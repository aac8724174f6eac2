"""One walk through the operations of a trace, with whatever control flow it has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import nnx_parallel as nxp
from nnx_parallel.core.interpret import (
  DEFAULT,
  Facts,
  Interpreter,
  facts_of,
  find_forwarded,
  inline_calls,
  interpret,
  rewrite,
  without_copies,
)
from nnx_parallel.core.jaxprs import bind, equations, program_of
from searches import programs

X = jnp.linspace(0.1, 1.0, 8)


@jax.custom_vjp
def halved(x):
  return jnp.sin(x) / 2


halved.defvjp(lambda x: (halved(x), x), lambda x, g: (g * jnp.cos(x) / 2,))


@jax.custom_jvp
def relu(x):
  return jnp.maximum(jnp.sin(x), 0)


relu.defjvp(lambda xs, ts: (relu(*xs), jnp.where(xs[0] > 0, ts[0], 0.0)))


def scanned(body, x):
  def step(carry, row):
    y = body(carry * row)
    return y, y.sum()

  carry, rows = jax.lax.scan(step, x, jnp.arange(3.0), reverse=True)
  return carry * rows.sum()


def looped(body, x):
  done = lambda state: (state[0] < 3) & (jnp.sin(state[1]).sum() < 1e9)
  return jax.lax.while_loop(done, lambda state: (state[0] + 1, body(state[1]) * x), (0, x))[1]


def branched(body, x):
  return jax.lax.switch(jnp.int32(x.sum() > 0), [jnp.cos, body, lambda x: x], x)


def mapped(body, x):
  mesh = nxp.make_mesh(data=2, model=4)
  spec = jax.P("data")
  return jax.shard_map(
    lambda x: body(x) + jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=spec, out_specs=spec
  )(x)


KINDS = {
  "jit": lambda body, x: jax.jit(lambda x: body(x) + 1)(x),
  "remat": lambda body, x: jax.checkpoint(lambda x: jnp.sin(body(x)))(x),
  "scan": scanned,
  "while": looped,
  "cond": branched,
  "custom_vjp": lambda body, x: halved(body(x)),
  "custom_jvp": lambda body, x: relu(body(x)),
  "shard_map": mapped,
  "grad": lambda body, x: jax.grad(lambda x: jax.checkpoint(body)(x).sum())(x),
  "constants": lambda body, x: jax.jit(lambda x: body(x) * np.arange(8.0, dtype=np.float32))(x),
}
SMOOTH = [kind for kind in KINDS if kind != "while"]


def nested(kinds):
  """A function with each kind of operation inside the one before."""
  run = jnp.sin
  for kind in reversed(kinds):
    run = functools.partial(KINDS[kind], run)
  return run


def random_kinds(seed, among, most=3):
  rng = np.random.default_rng(seed)
  return list(rng.choice(among, rng.integers(1, most + 1)))


def walked(function, rule, *args):
  return jax.jit(jax.extend.core.jaxpr_as_fun(rewrite(jax.make_jaxpr(function)(*args), rule)))(*args)[0]


PROGRAMS = [
  *([kind] for kind in KINDS),
  *(["shard_map", kind] for kind in KINDS if kind not in ("shard_map", "constants")),
  *(random_kinds(seed, list(KINDS)) for seed in range(8)),
]


@pytest.mark.cases(13)
@pytest.mark.parametrize("kinds", PROGRAMS, ids=" ".join)
def test_without_a_rule_the_results_are_those_of_the_program(kinds):
  function = nested(kinds)
  wanted = jax.jit(function)(X)
  trace = jax.make_jaxpr(function)(X)
  np.testing.assert_allclose(interpret(trace, [X])[0], wanted, rtol=1e-5)
  np.testing.assert_allclose(walked(function, lambda eqn, inputs: DEFAULT, X), wanted, rtol=1e-5)


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_model_and_its_gradient_are_walked_without_a_change(seed, as_users_have_it):
  """The same operations in the same order, wherever they are, and the same bits."""
  program = programs.draw(programs.SMALL + seed if seed % 2 else seed)
  params, batch = programs.values_of(program, seed)
  trace = jax.make_jaxpr(jax.value_and_grad(lambda p: programs.loss_of(program, p, batch)))(params)
  again = rewrite(trace, lambda eqn, inputs: DEFAULT)
  before, after = ([eqn.primitive.name for eqn in equations(t)] for t in (trace, again))
  assert after == before
  arrays = jax.tree.leaves(params)
  wanted, found = (jax.jit(jax.extend.core.jaxpr_as_fun(t))(*arrays) for t in (trace, again))
  for ours, theirs in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_gradients_of_a_walked_program_are_those_of_the_program(seed):
  function = nested(random_kinds(seed, SMOOTH, 2))
  total = lambda x: function(x).sum()
  found = jax.grad(lambda x: walked(total, lambda eqn, inputs: DEFAULT, x))(X)
  np.testing.assert_allclose(found, jax.grad(total)(X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kinds", PROGRAMS, ids=" ".join)
def test_a_rule_holds_for_an_operation_wherever_it_is(kinds):
  def rule(eqn, inputs):
    return [jnp.tanh(*inputs)] if eqn.primitive.name == "sin" else DEFAULT

  trace = jax.make_jaxpr(nested(kinds))(X)
  before, after = (
    [eqn.primitive.name for eqn in equations(jaxpr)] for jaxpr in (trace, rewrite(trace, rule))
  )
  assert before.count("sin") > 0
  assert after.count("tanh") == before.count("sin")
  assert "sin" not in after


def test_the_results_of_a_rule_are_used():
  double = lambda eqn, inputs: [2 * bind(eqn, inputs)[0]] if eqn.primitive.name == "sin" else DEFAULT
  found = walked(lambda x: scanned(jnp.sin, x), double, X)
  np.testing.assert_allclose(found, scanned(lambda x: 2 * jnp.sin(x), X), rtol=1e-5)


def test_calls_are_flattened_where_asked():
  trace = jax.make_jaxpr(lambda x: KINDS["jit"](functools.partial(KINDS["remat"], jnp.sin), x))(X)
  flat = inline_calls(trace, lambda eqn: eqn.primitive.name in ("jit", "pjit"))
  assert [eqn.primitive.name in ("jit", "pjit") for eqn in flat.eqns] == [False] * 2
  np.testing.assert_allclose(interpret(flat, [X])[0], interpret(trace, [X])[0])


def test_a_rule_may_give_its_own_kind_of_values():
  """A value and its derivative, say; numbers in the program are lifted to such values."""

  def rule(eqn, pairs):
    values, slopes = zip(*pairs, strict=True)
    if eqn.primitive.name in ("jit", "pjit"):
      return interpret(program_of(eqn), pairs, rule, lambda x: (x, 0.0))
    (out,) = bind(eqn, values)
    if eqn.primitive.name == "sin":
      return [(out, jnp.cos(values[0]) * slopes[0])]
    return [(out, slopes[0] + slopes[1])]  # of an addition

  trace = jax.make_jaxpr(lambda x: KINDS["jit"](jnp.sin, x))(X)
  ((value, slope),) = interpret(trace, [(X, jnp.ones_like(X))], rule, lambda x: (x, 0.0))
  np.testing.assert_allclose(value, jnp.sin(X) + 1)
  np.testing.assert_allclose(slope, jnp.cos(X))


DEPENDS = Facts(
  constant=lambda _: frozenset(),
  follow=lambda eqn, some: (
    DEFAULT
    if eqn.primitive.name in ("scan", "while", "cond", "jit", "pjit")
    else [frozenset().union(*some)] * len(eqn.outvars)
  ),
  join=lambda a, b: a | b,
)
"""Which inputs a value depends on."""


def facts_of_results(function, *args):
  trace = jax.make_jaxpr(function)(*args)
  known = facts_of(trace, [frozenset("abc"[n]) for n in range(len(args))], DEPENDS)
  return ["".join(sorted(known[var])) for var in trace.jaxpr.outvars if not isinstance(var, core.Literal)]


def test_facts_go_round_a_loop_until_they_stay_the_same():
  """The third value gets what the first one had two steps ago."""

  def turned(x, y, z):
    return jax.lax.fori_loop(0, 5, lambda _, s: (s[0], s[0] + s[1], s[1]), (x, y, z))

  assert facts_of_results(turned, 1.0, 2.0, 3.0) == ["a", "ab", "abc"]

  def shifted(x, y, z):
    return jax.lax.scan(lambda s, row: ((s[0], s[0] * 2), s[1] + row), (x, y), z)

  assert facts_of_results(shifted, 1.0, 2.0, X) == ["a", "ab", "abc"]


def test_facts_of_branches_are_joined():
  choose = lambda p, x, y: jax.lax.cond(p > 0, lambda x, y: (x * 2, y), lambda x, y: (y, y + 1), x, y)
  assert facts_of_results(choose, 1.0, 2.0, 3.0) == ["bc", "c"]


def test_a_rule_gets_facts_beside_values_also_in_loops():
  """A program in a loop is traced with the facts that the loop settles at."""
  seen = []

  def rule(eqn, inputs, facts):
    if eqn.primitive.name == "sin":
      seen.append("".join(sorted(facts[0])))
    return DEFAULT

  def shifted(x, y, z):
    return jax.lax.scan(lambda s, row: ((s[0], jnp.sin(s[1]) + s[0]), row), (x, y), z)

  trace = jax.make_jaxpr(shifted)(1.0, 2.0, X)
  results, found = Interpreter(rule, DEPENDS)(trace, [1.0, 2.0, X], [frozenset(name) for name in "abc"])
  assert seen == ["b", "ab"]
  assert ["".join(sorted(fact)) for fact in found] == ["a", "ab", "c"]
  for ours, theirs in zip(results, jax.tree.leaves(shifted(1.0, 2.0, X)), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def returned(function, *args):
  trace = jax.make_jaxpr(function)(*args)
  ours = without_copies(trace)
  for x, y in zip(interpret(ours, args), interpret(trace, args), strict=True):
    np.testing.assert_allclose(x, y)
  return find_forwarded(trace)


def test_inputs_that_a_program_returns_are_found():
  assert returned(jax.jit(lambda x, y: (y, x + y, x)), X, X) == [1, None, 0]
  assert returned(lambda x, y: jax.checkpoint(lambda x: (x, jnp.sin(x)))(y), X, X) == [1, None]
  rows = lambda x, z: jax.lax.scan(lambda c, row: (c, (row, c)), x, z)
  assert returned(rows, 1.0, X) == [0, 1, None]
  assert returned(
    lambda p, x, y: jax.lax.cond(p, lambda x, y: (x, y), lambda x, y: (x, x), x, y), True, X, X
  ) == [1, None]
  assert returned(lambda x, y: jax.lax.fori_loop(0, 3, lambda _, s: (s[0], s[0] + 1), (x, y)), 1.0, 2.0) == [
    0,
    None,
  ]


def passed_on(x, row):
  """`row` unchanged, in a way that jax itself does not see, so that a scan gives it as a result."""
  return jax.checkpoint(lambda x, row: (jnp.sin(x), row))(x, row)


def test_rows_that_a_scan_returns_are_its_input():
  assert returned(lambda x, rows: jax.lax.scan(passed_on, x, rows), 1.0, X) == [None, 1]


def test_a_row_that_an_inner_scan_repeats_is_not_the_input():
  def outer(rows):
    inner = lambda row: jax.lax.scan(lambda c, _: passed_on(c, row), 0.0, None, length=3)[1]
    return jax.lax.scan(lambda c, row: (c, inner(row)), 0.0, rows)[1]

  assert returned(outer, X) == [None]


def test_the_result_of_a_custom_rule_is_not_its_input():
  """It has another gradient."""
  reversed_ = jax.custom_vjp(lambda x: x)
  reversed_.defvjp(lambda x: (x, None), lambda _, g: (-g,))
  assert returned(lambda x: reversed_(x), X) == [None]


def test_what_nobody_computed_is_read_as_what_it_is():
  trace = jax.make_jaxpr(lambda x: jnp.sin(jax.jit(lambda x: (x, jnp.cos(x)))(x)[0]))(X)
  assert without_copies(trace).eqns[-1].invars == trace.jaxpr.invars
