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
  wiring,
  without_copies,
)
from nnx_parallel.core.jaxprs import bind, program_of

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


def nested(kinds):
  """A function with each kind of operation inside the one before."""
  run = jnp.sin
  for kind in reversed(kinds):
    run = functools.partial(KINDS[kind], run)
  return run


def walked(function, rule, *args):
  return jax.jit(jax.extend.core.jaxpr_as_fun(rewrite(jax.make_jaxpr(function)(*args), rule)))(*args)[0]


PROGRAMS = [[kind] for kind in KINDS]
PROGRAMS += [["shard_map", kind] for kind in KINDS if kind not in ("shard_map", "constants")]


@pytest.mark.cases(13)
@pytest.mark.parametrize("kinds", PROGRAMS, ids=" ".join)
def test_without_a_rule_the_results_are_those_of_the_program(kinds):
  function = nested(kinds)
  wanted = jax.jit(function)(X)
  trace = jax.make_jaxpr(function)(X)
  np.testing.assert_allclose(interpret(trace, [X])[0], wanted, rtol=1e-5)
  np.testing.assert_allclose(walked(function, lambda eqn, inputs: DEFAULT, X), wanted, rtol=1e-5)


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
  follow=lambda eqn, some: DEFAULT if wiring(eqn).inner else [frozenset().union(*some)] * len(eqn.outvars),
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
