"""Keys of programs: equal for equal programs, and different where a program computes something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.core.keys import Keys, identity, value_of_constant
from nnx_parallel.layers.stacks import differing

X = np.ones(3, np.float32)
TABLE = np.arange(3, dtype=np.float32)


def trace(function, *args):
  return jax.make_jaxpr(function)(*(args or (X,)))


def scaled(slope):
  """`sin`, with a gradient of its own."""
  run = jax.custom_vjp(lambda x: jnp.sin(x))
  run.defvjp(lambda x: (run(x), None), lambda _, g: (slope * g,))
  return run


def sloped(slope):
  run = jax.custom_jvp(lambda x: jnp.sin(x))
  run.defjvp(lambda x, t: (run(*x), slope * t[0]))
  return run


def calls(noted):
  """A function with an effect; each has its own object to note in."""

  def run(x):
    jax.debug.callback(lambda x: noted.append(x), x)
    return x

  return run


NOTED, OTHERS = [], []
SAME = {
  "the same function": [lambda x: jnp.sin(x) * 2, lambda x: jnp.sin(x) * 2],
  "equal constants": [lambda x: x + jnp.asarray(TABLE), lambda x: x + jnp.asarray(TABLE.copy())],
  "other names": [jax.jit(lambda x: x + 1), jax.jit(lambda y: y + 1)],
  "callbacks that close over one object": [calls(NOTED), calls(NOTED)],
  "equal gradients of custom_vjp": [scaled(2.0), scaled(2.0)],
  "equal gradients of custom_jvp": [sloped(2.0), sloped(2.0)],
  "loops": [
    lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0],
    lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0],
  ],
}
DIFFERENT = {
  "another operation": [jnp.sin, jnp.cos],
  "another number": [lambda x: x * 2, lambda x: x * 3],
  "a number of the other sign": [lambda x: x * 0.0, lambda x: x * -0.0],
  "another constant": [lambda x: x + jnp.asarray(TABLE), lambda x: x + jnp.asarray(TABLE + 1)],
  "a constant of another type": [
    lambda x: (x, jnp.asarray(TABLE)),
    lambda x: (x, jnp.asarray(TABLE.view("int32"))),
  ],
  "another input": [lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x],
  "another result": [lambda x: (x, jnp.sin(x)), lambda x: (jnp.sin(x), x)],
  "a result that is a number": [lambda x: (x, 1.0), lambda x: (x, 2.0)],
  "another parameter": [lambda x: x.sum(), lambda x: x[None].sum(0)],
  "another body": [jax.jit(lambda x: x + 1), jax.jit(lambda x: x + 2)],
  "another branch": [
    lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
  ],
  "another length": [
    lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0],
    lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=4)[0],
  ],
  "callbacks that close over two objects": [calls(NOTED), calls(OTHERS)],
  "another gradient of custom_vjp": [scaled(2.0), scaled(3.0)],
  "another gradient of custom_jvp": [sloped(2.0), sloped(3.0)],
  "another gradient inside of a call": [jax.jit(scaled(2.0)), jax.jit(scaled(3.0))],
  "another precision": [
    lambda x: jnp.dot(x, x, precision="highest"),
    lambda x: jnp.dot(x, x, precision="default"),
  ],
}


@pytest.mark.each_case
@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_equal_programs_have_one_identity(one, other):
  assert identity(trace(one)) == identity(trace(other))
  assert hash(identity(trace(one))) == hash(identity(trace(other)))


@pytest.mark.each_case
@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_programs_that_differ_have_two(one, other):
  assert identity(trace(one)) != identity(trace(other))


def test_types_of_inputs_are_part_of_a_program():
  assert identity(trace(jnp.sin)) != identity(trace(jnp.sin, np.ones(4, np.float32)))
  assert identity(trace(jnp.sin)) != identity(trace(jnp.sin, np.ones(3, np.float16)))


def test_gradients_count_only_where_asked():
  """Where only values are compared, a layer may have its rule as another object."""
  keys = Keys(value_of_constant)
  assert keys.of(trace(scaled(2.0))) == keys.of(trace(scaled(3.0)))
  assert keys.of(trace(scaled(2.0))) != keys.of(trace(sloped(2.0)))


def test_shared_keys_are_numbers_of_one_object():
  keys = Keys(value_of_constant)
  found = [keys.of(trace(f)) for f in (jnp.sin, jnp.cos, lambda x: jnp.sin(x))]
  assert found == [("body", 0), ("body", 1), ("body", 0)]


def test_the_values_of_constants():
  key = jax.random.key(0)
  assert value_of_constant(key) == value_of_constant(jax.random.key(0))
  assert value_of_constant(key) != value_of_constant(jax.random.key(1))
  assert value_of_constant(TABLE) != value_of_constant(TABLE.reshape(1, 3))
  assert value_of_constant(np.zeros(2, np.int32)) != value_of_constant(np.zeros(2, np.float32))
  found = []
  jax.make_jaxpr(lambda x, y: found.extend(map(value_of_constant, (x, x, y))))(X, X)
  assert found[0] == found[1] != found[2]


def test_the_context_of_an_operation_is_part_of_its_program():
  draw = lambda key: jax.random.bits(key, (3,))
  key = jax.random.key(0)
  with jax.threefry_partitionable(True):
    one = identity(trace(draw, key))
  with jax.threefry_partitionable(False):
    other = identity(trace(draw, key))
  assert one != other


def test_what_two_operations_of_a_kind_differ_in_is_named():
  first = lambda f, *args: trace(f, *args).eqns[0]
  sums = [first(lambda x, n=n: x.sum(n), np.ones((2, 2), "float32")) for n in (0, 1)]
  assert differing(*sums) == ["axes"]
  assert differing(first(jnp.sin), first(jnp.sin)) == []
  assert differing(first(jax.jit(jnp.sin)), first(jax.jit(jnp.cos))) == []  # they run programs


def test_values_that_cannot_be_hashed_equal_only_themselves():
  keys, one, two = Keys(), [[1]], [[1]]
  held = lambda value: lambda: value
  assert keys.of(held(one)) == keys.of(held(one))
  assert keys.of(held(one)) != keys.of(held(two))
  assert keys.of({"a": 1}) != keys.of({"a": 2})
  assert keys.of((1,)) != keys.of([1])
  assert keys.of(1) != keys.of(1.0) != keys.of(True)
  default = lambda value: lambda x=value: x
  assert keys.of(default(1)) == keys.of(default(1))
  assert keys.of(default(1)) != keys.of(default(2))
