"""Facts about operations, and edits of traces, against what the programs compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import nnx_parallel as nxp
from nnx_parallel.attention.tiling import call_equation
from nnx_parallel.core import jaxprs
from nnx_parallel.core.jaxprs import open_jaxpr

X = jnp.linspace(0.1, 1.0, 8)


def first(function, *args):
  return jax.make_jaxpr(function)(*args).eqns[0]


def names(eqns):
  return [eqn.primitive.name for eqn in eqns]


MATRIX = jnp.ones((3, 8))
SCANS = {
  "closed over": (lambda c, x: jax.lax.scan(lambda c, x: (c + x * X[0], c), c, x), (1.0, X), (1, 1, 1)),
  "two carried": (
    lambda a, b: jax.lax.scan(lambda c, _: ((c[1], c[0] + 1), None), (a, b), None, length=3),
    (X, X),
    (0, 2, 0),
  ),
  "rows": (lambda x, y: jax.lax.scan(lambda c, row: (c, row[0] * row[1]), None, (x, y)), (X, X), (0, 0, 2)),
  "all": (
    lambda a, b, x: jax.lax.scan(lambda c, row: (c * a + row @ b, row), X[0], x),
    (2.0, X, MATRIX),
    (2, 1, 1),
  ),
  "a carried matrix": (
    lambda m, x: jax.lax.scan(lambda c, row: (c + row, None), m, x),
    (MATRIX, jnp.ones((4, 3, 8))),
    (0, 1, 1),
  ),
}


@pytest.mark.each_case
@pytest.mark.parametrize(("function", "args", "counts"), SCANS.values(), ids=SCANS)
def test_inputs_of_a_scan_are_counted(function, args, counts):
  (eqn,) = (eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "scan")
  found = jaxprs.scan_counts(eqn).split(range(len(eqn.invars)))
  assert tuple(map(len, found)) == counts
  assert sum(found, []) == [*range(len(eqn.invars))]  # noqa: RUF017


def test_what_nobody_reads_goes_and_effects_stay():
  def function(x):
    jnp.cos(x)
    jax.debug.callback(lambda x: None, x)
    y = jnp.tan(x)
    return jnp.sin(x) + jnp.exp(y)

  trace = jax.make_jaxpr(function)(X)
  found = jaxprs.without_unused(trace)
  assert names(found.eqns) == ["debug_callback", "tan", "sin", "exp", "add"]
  np.testing.assert_allclose(jaxpr_as_fun(found)(X)[0], function(X))
  behind = jaxprs.operations_behind(trace.eqns, trace.eqns[-1].invars[:1])
  assert names(behind) == ["sin"]
  assert names(jaxprs.operations_behind(trace.eqns, trace.jaxpr.outvars)) == ["tan", "sin", "exp", "add"]


def test_makers_and_dependents():
  trace = jax.make_jaxpr(lambda x, y: (jnp.sin(x.astype("float16").T) + 1, jnp.cos(y)))(jnp.ones((2, 3)), X)
  x, y = trace.jaxpr.invars
  made = jaxprs.makers(trace)
  cast, turned, sine, add, cosine = trace.eqns
  assert jaxprs.maker(sine.outvars[0], made) is sine
  assert jaxprs.maker(x, made) is None
  assert jaxprs.maker(add.invars[1], made) is None  # a literal
  moves = {"convert_element_type", "transpose"}
  assert jaxprs.origin(sine.invars[0], made, moves) is x
  assert jaxprs.origin(sine.invars[0], made, {"transpose"}) is cast.outvars[0]
  assert jaxprs.origin(sine.outvars[0], made, moves) is sine.outvars[0]
  assert jaxprs.dependents(trace, [y]) == {y, *cosine.outvars}
  assert jaxprs.dependents(trace.eqns, [turned.outvars[0]]) == {
    v for eqn in (turned, sine, add) for v in eqn.outvars
  }


def test_operations_are_bound_again_with_other_parameters():
  (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, (0,)))(jnp.ones((2, 3))).eqns
  (found,) = jaxprs.bind(eqn, [jnp.ones((2, 3))], axes=(1,))
  np.testing.assert_array_equal(found, [3, 3])
  checkpoint = first(jax.checkpoint(jnp.sin), X)
  (found,) = jaxprs.bind(checkpoint, [X], jaxpr=open_jaxpr(jax.make_jaxpr(jnp.cos)(X)))
  np.testing.assert_allclose(found, jnp.cos(X), rtol=1e-6)


def test_a_constraint_is_bound_on_the_mesh_of_an_enclosing_shard_map():
  mesh = nxp.make_mesh(data=2, model=4, explicit=False)
  where = jax.NamedSharding(mesh, jax.P("model"))
  eqn = first(lambda x: jax.lax.with_sharding_constraint(x, where), X)

  def run(x):
    return jaxprs.bind(eqn, [x])[0] * 2

  spec = jax.P("data")
  mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False)
  x = jnp.arange(16.0)
  np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * x)


def test_operations_that_are_traced_again_keep_line_and_names():
  def function(x):
    with jax.named_scope("inner"):
      return jnp.sin(x)

  (eqn,) = jax.make_jaxpr(function)(X).eqns

  def again(x):
    with jax.named_scope("outer"), jaxprs.at_place_of(eqn):
      return jax.lax.cos(x)

  (found,) = jax.make_jaxpr(again)(X).eqns
  assert jaxprs.scope_of(found) == "outer/inner"
  assert jaxprs.place_of(found) == jaxprs.place_of(eqn)
  assert "test_jaxprs.py" in jaxprs.place_of(eqn)
  (other,) = jax.make_jaxpr(jnp.cos)(X).eqns
  assert jaxprs.place_of(other) != jaxprs.place_of(eqn)


def ruled(closed_over):
  run = jax.custom_vjp(lambda x: jnp.sin(x))
  run.defvjp(lambda x: (run(x), x), lambda x, g: (g * closed_over(x),))
  return run


def test_the_gradient_of_an_operation_is_by_its_own_rule():
  eqn = first(ruled(lambda x: 3 * x), X)
  assert jaxprs.has_rule(eqn)
  assert jaxprs.has_reverse_rule(eqn)
  (slope,) = jaxpr_as_fun(jaxprs.gradient_of(eqn))(X)
  np.testing.assert_allclose(slope, jnp.sin(X) * 3 * X, rtol=1e-6)


@pytest.mark.parametrize("reads", [True, False])
def test_a_rule_that_reads_an_array_of_the_trace_is_found(reads):
  """Not by an argument: such a trace cannot be evaluated again."""
  found = []

  def outer(array):
    run = ruled(lambda x: array if reads else x)
    trace = jax.make_jaxpr(lambda z: jax.jit(run)(jnp.cos(z)))(X)
    found.append(jaxprs.reads_tracers(trace, jaxprs.has_rule))
    return array

  jax.make_jaxpr(outer)(X)
  assert (found[0] is not None and jaxprs.has_rule(found[0])) if reads else found == [None]


def test_rules_in_a_shard_map_are_left_out():
  mesh = nxp.make_mesh(data=2, model=4, explicit=False)
  run = ruled(lambda x: x)
  spec = jax.P("data")
  mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
  trace = jax.make_jaxpr(lambda x: jax.jit(run)(x) + mapped(x))(X)
  assert sum(map(jaxprs.has_rule, jaxprs.equations(trace))) == 2
  assert len([*jaxprs.rules(trace, jaxprs.has_rule)]) == 1


def test_a_call_computes_variables_of_a_trace():
  trace = jax.make_jaxpr(lambda x: jnp.exp(jnp.sin(x) * 2))(X)
  sine, double, power = trace.eqns
  new = call_equation(lambda x: [jnp.cos(x) * 3], sine.invars, double.outvars, double)
  changed = open_jaxpr(trace).replace(eqns=[new, power])
  np.testing.assert_allclose(jaxprs.as_function(changed)(X)[0], jnp.exp(3 * jnp.cos(X)), rtol=1e-6)
  assert jaxprs.place_of(new) == jaxprs.place_of(double)


def test_results_of_a_function_come_from_its_trace():
  def run(model, *, scale=2.0):
    return {"twice": model["x"] * scale, "same": model["x"]}

  seen = []

  def evaluate(trace, args):
    seen.append(len(trace.eqns))
    return jaxpr_as_fun(trace)(*jax.tree.leaves(args))

  found = jaxprs.by_trace(run, evaluate)({"x": X})
  assert seen == [1]
  assert found.keys() == {"twice", "same"}
  np.testing.assert_allclose(found["twice"], 2 * X)


def test_types_on_explicit_axes_are_traced_again():
  mesh = nxp.make_mesh(data=4, model=2, explicit=True)
  x = jax.device_put(np.ones((8, 2), np.float32), jax.NamedSharding(mesh, jax.P("data")))
  with jax.set_mesh(mesh):
    trace = jax.make_jaxpr(jnp.sin)(x)
    again = jaxprs.trace_like(jnp.cos, trace)
  assert again.in_avals == trace.in_avals
  assert again.out_avals[0].sharding.spec == jax.P("data", None)


def test_weak_types_are_traced_again():
  trace = jax.make_jaxpr(lambda x, y: x * y)(2.0, jnp.ones(2, jnp.float16))
  again = jaxprs.trace_like(lambda x, y: x * y, trace)
  assert again.out_avals == trace.out_avals
  assert again.out_avals[0].dtype == jnp.float16


def test_bytes_of_arrays():
  assert jaxprs.nbytes(jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)) == 24
  assert jaxprs.nbytes(np.float64(1)) == 8
