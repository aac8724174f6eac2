"""Random programs with control flow in control flow: what a walk says and does holds for all of them.

A program takes three arrays and returns three. It is drawn from a seed, with one function for `sin`, so
that the same program with another function says what a rule for `sin` must give.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx_parallel as nxp
from nnx_parallel.core.interpret import (
  DEFAULT,
  Facts,
  facts_of,
  find_forwarded,
  inline_calls,
  interpret,
  read,
  rewrite,
  wiring,
  without_copies,
)
from nnx_parallel.core.jaxprs import equations, is_call, without_unused

INPUTS = [jnp.linspace(0.1, 1.0, 4), jnp.linspace(-1.0, 0.5, 4), jnp.linspace(0.3, 2.0, 4)]


def compute(rng, of, depth):
  """One element-wise step."""
  k, i, j, product = *rng.integers(0, 3, 3), rng.integers(2)

  def step(xs):
    new = of(xs[i]) * xs[j] if product else of(xs[i]) + 0.5
    return [new if n == k else x for n, x in enumerate(xs)]

  return step


def permute(rng, of, depth):
  order = rng.permutation(3)
  return lambda xs: [xs[n] for n in order]


def call(rng, of, depth):
  inner = steps(rng, of, depth - 1)
  return lambda xs: jax.jit(lambda *xs: inner(list(xs)))(*xs)


def checkpoint(rng, of, depth):
  inner = steps(rng, of, depth - 1)
  return lambda xs: jax.checkpoint(lambda *xs: inner(list(xs)))(*xs)


def branch(rng, of, depth):
  inner, which = [steps(rng, of, depth - 1) for _ in range(3)], rng.integers(3)

  def step(xs):
    index = jnp.isfinite(xs[0]).all().astype("int32") - 1 + jnp.int32(which)  # which, as no trace can know
    return jax.lax.switch(index, [lambda *xs, run=run: run(list(xs)) for run in inner], *xs)

  return step


def scan(rng, of, depth):
  """A constant, a carry and rows; the rows made are the carry, the rows read, or new ones."""
  inner, backwards, made = steps(rng, of, depth - 1), bool(rng.integers(2)), rng.integers(3)

  def step(xs):
    fixed, first, rows = xs

    def body(carry, row):
      _, after, new = inner([fixed, carry, row])
      return jnp.tanh(after), (new, carry, row)[made]

    last, found = jax.lax.scan(body, first, jnp.stack([rows, -rows]), reverse=backwards)
    return [fixed, last, found[1]]

  return step


def loop(rng, of, depth):
  """A `while`, whose condition reads one array and whose body reads another."""
  inner = steps(rng, of, depth - 1)

  def step(xs):
    bound, fixed, first = xs
    state = jax.lax.while_loop(
      lambda state: (state[0] < 3) & (bound.sum() < 1e6),
      lambda state: (state[0] + 1, jnp.tanh(inner([fixed, state[1], state[1]])[2])),
      (0, first),
    )
    return [bound, fixed, state[1]]

  return step


def custom_vjp(rng, of, depth):
  inner = steps(rng, of, depth - 1)
  run = jax.custom_vjp(lambda *xs: tuple(inner(list(xs))))
  run.defvjp(lambda *xs: (run(*xs), None), lambda _, slopes: tuple(2 * slope for slope in slopes))
  return lambda xs: list(run(*xs))


def custom_jvp(rng, of, depth):
  inner = steps(rng, of, depth - 1)
  run = jax.custom_jvp(lambda *xs: tuple(inner(list(xs))))
  run.defjvp(lambda xs, slopes: (run(*xs), tuple(3 * slope for slope in slopes)))
  return lambda xs: list(run(*xs))


def on_devices(rng, of, depth):
  inner = steps(rng, of, depth - 1)
  own = jax.P("data")

  def step(xs):
    run = jax.shard_map(
      lambda *xs: tuple(inner(list(xs))), mesh=nxp.make_mesh(data=2, model=4, explicit=False), in_specs=own,
      out_specs=own,
    )  # fmt: skip
    return list(run(*xs))

  return step


NESTED = [call, checkpoint, branch, scan, custom_vjp, custom_jvp]


def steps(rng, of, depth, more=()):
  """A function of a list of three arrays."""
  kinds = [compute, compute, permute, *(NESTED if depth else ()), *more]
  some = [kind(rng, of, depth) for kind in rng.choice(kinds, 2 + (depth == 2))]
  return lambda xs: functools.reduce(lambda xs, step: step(xs), some, xs)


def drawn(seed, of=jnp.sin, more=(loop, on_devices)):
  run = steps(np.random.default_rng(seed), of, 2, more)
  return lambda *xs: tuple(run(list(xs)))


def traced(function):
  return jax.make_jaxpr(function)(*INPUTS)


def computed(trace, *inputs):
  """The results as XLA computes them."""
  return jax.jit(jax.extend.core.jaxpr_as_fun(trace))(*(inputs or INPUTS))


def assert_same(found, wanted):
  for ours, theirs in zip(found, wanted, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


KEPT = ("reverse", "length", "cond_nconsts", "body_nconsts", "in_specs", "out_specs", "prevent_cse")


def operations(trace):
  """All operations, with types and with parameters that decide what they do."""
  return [
    (eqn.primitive.name, [str(v.aval) for v in eqn.outvars], [str(eqn.params.get(key)) for key in KEPT])
    for eqn in equations(trace)
  ]


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(20))
def test_without_a_rule_a_walk_changes_nothing(seed):
  trace = traced(drawn(seed))
  again = rewrite(trace, lambda eqn, inputs: DEFAULT)
  assert operations(again) == operations(trace)
  wanted = computed(trace)
  assert_same(computed(again), wanted)
  assert_same(interpret(trace, INPUTS), wanted)


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(20))
def test_a_rule_gives_the_program_with_another_function(seed):
  rule = lambda eqn, inputs: [jnp.cos(*inputs)] if eqn.primitive.name == "sin" else DEFAULT
  found = rewrite(traced(drawn(seed)), rule)
  assert not [eqn for eqn in equations(found) if eqn.primitive.name == "sin"]
  assert_same(computed(found), computed(traced(drawn(seed, jnp.cos))))


@pytest.mark.cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_walk_keeps_gradients_also_those_of_custom_rules(seed):
  gradients = lambda run: jax.jit(jax.grad(lambda xs: sum(x.sum() for x in run(*xs))))(INPUTS)
  function = drawn(seed, more=())
  again = jax.extend.core.jaxpr_as_fun(rewrite(traced(function), lambda eqn, inputs: DEFAULT))
  assert_same(gradients(again), gradients(function))


DEPENDS = Facts(
  constant=lambda _: frozenset(),
  follow=lambda eqn, some: DEFAULT if wiring(eqn).inner else [frozenset().union(*some)] * len(eqn.outvars),
  join=lambda a, b: a | b,
)
"""Which inputs a value depends on."""


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(20))
def test_what_changes_a_result_is_among_its_facts(seed):
  trace = traced(drawn(seed))
  known = facts_of(trace, [frozenset({n}) for n in range(3)], DEPENDS)
  facts = [read(var, known, DEPENDS.constant) for var in trace.jaxpr.outvars]
  wanted = computed(trace)
  for n in range(3):
    others = computed(trace, *(x * 0.7 + 0.1 if k == n else x for k, x in enumerate(INPUTS)))
    for fact, before, after in zip(facts, wanted, others, strict=True):
      assert n in fact or np.array_equal(before, after)


def test_facts_leave_out_what_changes_nothing():
  """Not each result depends on each input; else the test above could not fail."""
  left_out = 0
  for seed in range(12):
    trace = traced(drawn(seed))
    known = facts_of(trace, [frozenset({n}) for n in range(3)], DEPENDS)
    left_out += sum(3 - len(read(var, known, DEPENDS.constant)) for var in trace.jaxpr.outvars)
  assert left_out > 20


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(20))
def test_simpler_forms_of_a_program_compute_the_same(seed):
  trace = traced(drawn(seed))
  wanted = computed(trace)
  for n, value in zip(find_forwarded(trace), wanted, strict=True):
    assert n is None or np.array_equal(value, INPUTS[n])
  flat = inline_calls(trace, is_call)
  assert not any(map(is_call, flat.eqns))
  shorter = without_unused(without_copies(flat))
  assert len(shorter.eqns) <= len(flat.eqns)
  for one in (flat, without_copies(trace), without_unused(trace), shorter):
    assert_same(computed(one), wanted)
