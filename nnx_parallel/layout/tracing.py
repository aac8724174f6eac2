"""Runs a user's constructor under a trace, with the same result as eagerly."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.nodes import Path, iter_nodes, path_str, value_of
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer

NEEDS_VALUES = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""Errors of code under a trace that needs the value of an array."""
_WIDE = tuple(map(np.dtype, ("float64", "int64", "uint64", "complex128")))
_PLACES = {
  "sharding_constraint": "sharding",
  "reshard": "dst_sharding",
  "device_put": "devices",
  "jit": "out_shardings",
}
"""Operations that place their results, and the parameter with the sharding."""


@contextlib.contextmanager
def without_mesh() -> Generator[None]:
  """Builds Variables without a mesh, also under an active one; their annotations remain names."""
  with nnx.use_eager_sharding(False), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
    yield


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """A function that builds a module or an optimizer, traced on abstract values.

  Attributes:
    node: the result, with `ShapeDtypeStruct` values.
    program: the closed jaxpr that computes the arrays of the result.
    input_paths: for each input of `program`, its path in the state of the argument.
    output_paths: for each output of `program`, its path in the state of `node`.
  """

  node: Any
  program: Any
  input_paths: tuple[Path, ...]
  output_paths: tuple[Path, ...]


def why_one_program(traces: Iterable[Trace]) -> str:
  """The reason, as a clause, why these traces cannot be sliced; empty if they can."""
  for one in traces:
    if one.program.effects:
      return f"it has side effects ({', '.join(sorted(map(str, one.program.effects)))})"
    results = [var.aval for eqn in one.program.jaxpr.eqns for var in eqn.outvars]
    wide = next((x.dtype for x in results if hasattr(x, "dtype") and x.dtype in _WIDE), None)
    if wide is not None and not jax.config.jax_enable_x64:
      return f"it computes in {wide} under its own jax.enable_x64"
  return ""


def placements(one: Trace) -> dict[Path, PartitionSpec]:
  """The specs of the arrays that the traced function itself places as its last operation on them."""
  jaxpr = one.program.jaxpr
  placed: dict[Any, PartitionSpec] = {}
  for eqn in jaxpr.eqns:
    found: Any = eqn.params[_PLACES[eqn.primitive.name]] if eqn.primitive.name in _PLACES else ()
    for var, sharding in zip(eqn.outvars, found if isinstance(found, tuple) else (found,), strict=False):
      if isinstance(sharding, NamedSharding):
        placed[var] = sharding.spec
  made = zip(one.output_paths, jaxpr.outvars, strict=True)
  return {path: placed[var] for path, var in made if not isinstance(var, Literal) and var in placed}


def trace(build: Callable[..., Any], given: Any = None) -> Trace:
  """Traces a function that builds a module or an optimizer, without a mesh.

  Args:
    build: returns the module; takes `given` when there is one.
    given: an abstract module.
  """
  graphdef: Any = None
  state: Any = {}
  if given is not None:
    graphdef, state = nnx.split(given)

  def run(state: Any) -> Any:
    node = build() if given is None else build(nnx.merge(graphdef, state))
    if not isinstance(node, nnx.Pytree):
      raise PlanError(
        f"init returned a {type(node).__name__}, not an nnx.Module.", fix="return the module itself."
      )
    structure, values = nnx.split(node)
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in jax.tree.leaves(values)):
      raise PlanError(
        "init returned a module without values: it holds jax.ShapeDtypeStruct in place of arrays.",
        fix="return the module itself, not what nnx.eval_shape gives; planning makes no arrays anyway.",
      )
    return structure, values

  with without_mesh():
    program, (built, values) = jax.make_jaxpr(run, return_shape=True)(state)
    return Trace(nnx.merge(built, values), program, _paths(state), _paths(values))


def _paths(state: Any) -> tuple[Path, ...]:
  """The path of each array of a state, in the order in which jax flattens it."""
  arrays, tree = jax.tree.flatten(state)
  numbered = nnx.to_flat_state(jax.tree.unflatten(tree, range(len(arrays)))) if arrays else ()
  found = {i: path for path, leaf in numbered for i in jax.tree.leaves(value_of(leaf))}
  return tuple(found[i] for i in range(len(arrays)))


@contextlib.contextmanager
def _quick_conversions() -> Generator[None]:
  """Keeps tracing linear in the number of random draws under jax 0.10.

  There `jnp.array` reads the `sharding` of each tracer, and tracers read the whole trace for the error
  message (48 transformer blocks: 6 s instead of 1). Newer versions raise at once, as this does.
  """
  if jax.__version_info__ >= (0, 12):
    yield
    return
  # Imported here, because newer versions of jax are free to move it.
  from jax.interpreters.partial_eval import DynamicJaxprTracer

  def refuse(_: Any) -> None:
    raise AttributeError("a traced array has no sharding")

  tracers: Any = DynamicJaxprTracer
  tracers.sharding = property(refuse)
  try:
    yield
  finally:
    with contextlib.suppress(AttributeError):  # another thread was here too
      del tracers.sharding


def run_init(init: Callable[[], nnx.Module], mesh: AnyMesh | None) -> nnx.Module:
  """Runs a constructor under a trace; its constraints may name the axes of `mesh`, as Auto axes.

  flax (0.12) treats an array that was assigned to an attribute without `nnx.data` as static under a trace, so
  that the tracer leaks. Here it is data, as it is eagerly.
  """
  sizes = axis_sizes(mesh) if mesh is not None else {}
  auto = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
  try:
    with _quick_conversions(), nnx.use_eager_sharding(False), jax.sharding.use_abstract_mesh(auto):
      module = init()
  except TraceContextError as error:
    raise PlanError(
      "init changes a Variable that was made outside of it, such as the counter of an nnx.Rngs.",
      details=str(error).split(" (https://")[0],
      fix="make it inside of init: lambda: MyModule(..., rngs=nnx.Rngs(0))",
    ) from error
  except NEEDS_VALUES as error:
    raise PlanError(
      "init needs the value of an array, and there is none under a trace: planning and creating trace init.",
      details=str(error).split("\n")[0],
      fix="compute with numpy what must be known while init runs, for example np.sqrt in place of jnp.sqrt.",
    ) from error
  graph: Any = module
  if isinstance(graph, nnx.Pytree):  # the caller refuses anything else
    loose = [
      (path, node, name)
      for path, node in iter_nodes(graph)
      if isinstance(node, nnx.Pytree)
      for name, value in vars(node).items()
      if any(isinstance(leaf, Tracer) for leaf in _arrays_in(value))
    ]
    if loose:  # rare, and reading the state of a large module takes a while
      data = {id(leaf) for leaf in jax.tree.leaves(nnx.state(graph))}
      for path, node, name in loose:
        _adopt_array(path, node, name, data)
  return module


def _arrays_in(value: Any) -> list[Any]:
  return jax.tree.leaves(value) if isinstance(value, (list, tuple, dict)) else [value]


def _adopt_array(path: Any, node: nnx.Pytree, name: str, data: set[int]) -> None:
  value = getattr(node, name)
  if all(id(leaf) in data for leaf in _arrays_in(value) if isinstance(leaf, Tracer)):
    return
  if isinstance(value, Tracer):
    setattr(node, name, nnx.data(value))
    return
  where = path_str((*path, name))
  raise PlanError(
    f"{where} is a {type(value).__name__} that holds arrays, which flax takes for a static attribute.",
    fix=f"self.{name} = nnx.data(...), or nnx.List / nnx.Dict of nnx.Variable, in {type(node).__name__}.",
  )


def make_optimizer(model: nnx.Module, tx: optax.GradientTransformation, wrt: Any) -> ShardedOptimizer[Any]:
  """Builds an optimizer in which each Variable holds exactly one array; updates work as before.

  flax puts the whole state of one parameter into one Variable, which may then hold a list of arrays (SM3) or
  none (a masked parameter). Such a Variable becomes a list of Variables, or nothing.
  """
  optimizer = ShardedOptimizer(model, tx, wrt=wrt)

  def is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)

  optimizer.opt_state = nnx.data(jax.tree.map(_one_each, optimizer.opt_state, is_leaf=is_variable))
  return optimizer


def _one_each(leaf: Any) -> Any:
  if not isinstance(leaf, nnx.Variable):
    return leaf
  value = leaf.get_raw_value()
  return leaf if hasattr(value, "shape") else jax.tree.map(leaf.copy, value)
