"""Runs a user's constructor under a trace, with the same result as eagerly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from nnx_parallel.core.mesh import AnyMesh, auto_mesh, is_explicit
from nnx_parallel.core.nodes import (
  Path,
  is_rng,
  iter_nodes,
  kind_of,
  merge,
  parts_of_type,
  path_str,
  value_of,
  variables,
)
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import ClosedJaxpr, Leaf, Model, PyTree, State, Var
from nnx_parallel.errors import PlanError
from nnx_parallel.layout import optimizer_layout
from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer
from nnx_parallel.layout.stated import stated_specs, without_shardings

NEEDS_VALUES = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""The errors of code under a trace that needs the value of an array."""
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
  """Builds Variables without a mesh, even if a mesh is active; their annotations remain names."""
  with nnx.use_eager_sharding(False), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
    yield


@dataclasses.dataclass(frozen=True, eq=False)
class Abstract:
  """A module or an optimizer without arrays: its graph definition, and its state of `ShapeDtypeStruct`s."""

  graphdef: nnx.GraphDef[Any]
  state: PyTree

  @functools.cached_property
  def leaves(self) -> dict[Path, Leaf]:
    """Its Variables and raw arrays by path, in flax's order; without empty entries (`MaskedNode`)."""
    flat = nnx.to_flat_state(self.state) if jax.tree.leaves(self.state) else ()
    return {path: leaf for path, leaf in flat if jax.tree.leaves(value_of(leaf))}

  @functools.cached_property
  def node(self) -> Any:
    """The object with a `ShapeDtypeStruct` in each Variable, for code that walks through its modules."""
    return merge(self.graphdef, self.state)

  def chosen(self, wrt: nnx.filterlib.Filter) -> State:
    """The part of the state that a filter chooses."""
    return nnx.filter_state(self.state, wrt)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """A function that builds a module or an optimizer, traced on abstract values."""

  made: Abstract  # the result
  program: ClosedJaxpr  # the closed jaxpr that computes the arrays of the result
  input_paths: tuple[Path, ...]  # for each input of `program`, its path in the state of the argument
  output_paths: tuple[Path, ...]  # for each output of `program`, its path in the state of the result
  # of an optimizer, the paths of its arrays that optax made of a parameter -> the parameter's path
  origins: Mapping[Path, Path] = dataclasses.field(default_factory=dict[Path, Path])
  # of an optimizer, the paths of its arrays whose dim 0 counts matrices (`PerMatrixState.groups`)
  matrices: frozenset[Path] = frozenset()
  # of a module on Explicit axes, the paths of arrays whose type has a sharding -> its spec
  stated: Mapping[Path, PartitionSpec] = dataclasses.field(default_factory=dict[Path, PartitionSpec])


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
  placed: dict[Var, PartitionSpec] = {}
  for eqn in jaxpr.eqns:
    found: Any = eqn.params[_PLACES[eqn.primitive.name]] if eqn.primitive.name in _PLACES else ()
    for var, sharding in zip(eqn.outvars, found if isinstance(found, tuple) else (found,), strict=False):
      if isinstance(sharding, NamedSharding):
        placed[var] = sharding.spec
  made = zip(one.output_paths, jaxpr.outvars, strict=True)
  return {path: placed[var] for path, var in made if not isinstance(var, Literal) and var in placed}


def trace(build: Callable[[Model], Model], given: Abstract) -> Trace:
  """Traces a function that builds a module or an optimizer from an abstract module, without a mesh."""
  graphdefs: list[nnx.GraphDef[Any]] = []

  def run(state: PyTree) -> PyTree:
    node = build(nnx.merge(given.graphdef, state))
    if not isinstance(node, nnx.Pytree):
      raise PlanError(
        f"init returned a {type(node).__name__}, not an nnx.Module.", fix="return the module itself."
      )
    structure, values = nnx.split(node)
    if any(isinstance(value, jax.ShapeDtypeStruct) for value in jax.tree.leaves(values)):
      raise PlanError(
        "init returned a module without values: it holds jax.ShapeDtypeStruct in place of arrays.",
        fix="return the module itself, not the result of nnx.eval_shape; planning makes no arrays anyway.",
      )
    graphdefs.append(structure)  # not a result: jax compares those, and a static object may hold arrays
    return values

  with without_mesh():
    program, state = jax.make_jaxpr(run, return_shape=True)(given.state)
  return Trace(Abstract(graphdefs[-1], state), program, state_paths(given.state), state_paths(state))


def state_paths(state: PyTree) -> tuple[Path, ...]:
  """The path of each array of a state, in the order in which jax flattens it."""
  arrays, tree = jax.tree.flatten(state)
  numbered = nnx.to_flat_state(jax.tree.unflatten(tree, range(len(arrays)))) if arrays else ()
  found = {i: path for path, leaf in numbered for i in jax.tree.leaves(value_of(leaf))}
  return tuple(found[i] for i in range(len(arrays)))


@contextlib.contextmanager
def _quick_errors() -> Generator[None]:
  """Keeps tracing linear in the number of operations under jax 0.10: a 70B decoder took 300 s, not 20."""
  # flax asks each assigned array for its sharding, and a tracer searches the trace for an error's text then.
  if jax.__version_info__ >= (0, 12):
    yield
    return
  from jax.interpreters.partial_eval import DynamicJaxprTracer  # newer versions may move it

  def refuse(_: object) -> None:
    raise AttributeError("a traced array has no sharding")

  tracers: Any = DynamicJaxprTracer
  tracers.sharding = property(refuse)
  try:
    yield
  finally:
    with contextlib.suppress(AttributeError):  # another thread was here too
      del tracers.sharding


def run_init(init: Callable[[], nnx.Module], mesh: AnyMesh | None) -> nnx.Module:
  """Runs a constructor under a trace, in which it may name the axes of `mesh`, of their own types."""
  # flax (0.12) treats an array that was assigned to an attribute without `nnx.data` as static under a trace,
  # so that the tracer leaks. Here it is data, as it is eagerly.
  active: Any = AbstractMesh((), ()) if mesh is None else getattr(mesh, "abstract_mesh", mesh)
  try:
    with (
      _quick_errors(),
      plain_variables(),
      nnx.use_eager_sharding(False),
      jax.sharding.use_abstract_mesh(active),
    ):
      module = init()
  except TraceContextError as error:
    raise PlanError(
      "init changes a Variable that was made outside of it, such as the counter of an nnx.Rngs.",
      details=str(error).split(" (https://")[0],
      fix="make it inside of init: lambda: MyModule(..., rngs=nnx.Rngs(0))",
    ) from error
  except NEEDS_VALUES as error:
    raise PlanError(
      "init needs the value of an array, but planning and creating only trace init.",
      details=str(error).split("\n")[0],
      fix="compute values that init needs as numbers with numpy, for example np.sqrt in place of jnp.sqrt.\n"
      "In the code of others: with jax.ensure_compile_time_eval(): ... around the call in init;\n"
      "or build the module first: live = MyModule(...), then nxp.plan(lambda: nnx.clone(live), mesh, rules).",
    ) from error
  except ValueError as error:
    found, said = _STATIC.search(str(error)), str(error).split(". ")[0].split("\n")[0]
    if found is not None:
      raise _of_static_attribute(said, *found.groups()) from error
    if states_shardings(error) and mesh is not None and not is_explicit(mesh):
      raise PlanError(
        "init states shardings, which only Explicit axes have, and this mesh has Auto axes.",
        details=said,
        fix="nxp.make_mesh(..., explicit=True); or metadata, out_sharding of a Variable, on any mesh.",
      ) from error
    raise
  graph: Any = module
  if isinstance(graph, nnx.Pytree):  # the caller refuses anything else
    loose: list[tuple[Path, nnx.Pytree, str]] = []
    for path, node in iter_nodes(graph):
      if not isinstance(node, nnx.Pytree):
        continue
      for name, value in vars(node).items():
        _check_static(path, name, value)
        if any(isinstance(leaf, Tracer) for leaf in _arrays_in(value)):
          loose.append((path, node, name))
    if loose:  # rare, and reading the state of a large module takes a while
      data = {id(leaf) for leaf in jax.tree.leaves(nnx.state(graph))}
      for path, node, name in loose:
        _adopt_array(path, node, name, data)
  return module


def plain_variables() -> contextlib.AbstractContextManager[object]:
  """Makes Variables of the plain kind, also where flax's defaults are hijax Variables or references."""
  # Flax cannot return either of them from a trace, not even from `nnx.jit`: see tests/test_upstream.py.
  return nnx.var_defaults(hijax=False, ref=False)


def variable_notes() -> list[str]:
  """A note if flax makes other Variables by default than a plan does."""
  defaults = nnx.var_defaults()
  kinds = [kind for kind in ("hijax", "ref") if getattr(defaults, kind)]
  if not kinds:
    return []
  return [
    f"Variables are made without {', '.join(kinds)}, the default here, because flax cannot trace it in init"
  ]


_NEEDS_EXPLICIT = re.compile(
  r"(?s)axis names that are of type Auto|can only refer to Auto axes|context mesh .* should match the mesh"
  r"|not under a mesh context"
)
"""JAX's errors for a sharding in the type of an array, without a mesh or on Auto axes."""


def states_shardings(error: Exception) -> bool:
  """Whether JAX refused a sharding because types have none: on Auto axes, or without a mesh."""
  return _NEEDS_EXPLICIT.search(str(error)) is not None


_STATIC = re.compile(
  r"value of type '?<class '(?:[^']*[.])?([^'.]+)'>.* attribute '(\w+)' of Pytree type '<class '([^']+)'>"
)
"""Flax's errors for modules and arrays in an attribute where it does not look for any."""
_CONTAINERS = {"list": "nnx.List([...])", "tuple": "nnx.List([...])", "dict": "nnx.Dict({...})"}


def _of_static_attribute(said: str, kind: str, name: str, owner: str) -> PlanError:
  owner = owner.split(".")[-1]
  made = _CONTAINERS.get(kind)
  if made is None:
    return PlanError(
      f"{owner}.{name} got {with_article(kind)}, after another value that flax takes for a static attribute.",
      details=said,
      fix=f"self.{name} = nnx.data(...) in {owner}, also where it is first set to None or a number.",
    )
  return PlanError(
    f"{owner}.{name} is a {kind} that holds modules, Variables or arrays, and flax does not look into it.",
    details=said,
    fix=f"self.{name} = {made}, or nnx.data(...), in {owner}.",
  )


def _arrays_in(value: object) -> list[object]:
  """The arrays of an attribute; what modules and Variables inside of it hold is their own."""

  def is_node(part: object) -> bool:
    return isinstance(part, (nnx.Pytree, nnx.Variable))

  return jax.tree.leaves(value, is_leaf=is_node) if isinstance(value, (list, tuple, dict)) else [value]


def _adopt_array(path: Path, node: nnx.Pytree, name: str, data: set[int]) -> None:
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


def _check_static(path: Path, name: str, value: object) -> None:
  """Refuses an object that flax takes for static, such as a dataclass, with an array made by `init`."""
  own: dict[str, Any] = getattr(value, "__dict__", {})
  if not own or isinstance(value, (nnx.Pytree, nnx.Variable, type)) or callable(value):
    return
  if not jax.tree_util.all_leaves([value]):  # a dataclass that is a pytree, in `nnx.data`
    return
  for key, held in own.items():
    if any(isinstance(leaf, Tracer) for leaf in _arrays_in(held)):
      kind = type(value).__name__
      raise PlanError(
        f"{path_str((*path, name))} is {with_article(kind)}, static for flax, and its {key} is an array.",
        details="planning and creating only trace init, so this array never exists",
        fix=f"compute {key} by numpy, or with jax.ensure_compile_time_eval(): ... around it;\n"
        f"or keep the array in the module: self.{key} = nnx.Variable(...).",
      )


def make_optimizer(
  model: nnx.Module, tx: optax.GradientTransformation, wrt: nnx.filterlib.Filter
) -> ShardedOptimizer[Any]:
  """Builds an optimizer in which each Variable holds exactly one array; updates work as before."""

  # flax puts the state of a parameter into one Variable: of several arrays (SM3) it becomes a list.
  def is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)

  with plain_variables():
    optimizer = ShardedOptimizer(model, tx, wrt=wrt)
    optimizer.opt_state = nnx.data(jax.tree.map(_one_each, optimizer.opt_state, is_leaf=is_variable))
  return optimizer


def _one_each(leaf: Leaf) -> PyTree:
  if not isinstance(leaf, nnx.Variable):
    return leaf
  value = leaf.get_raw_value()
  return leaf if hasattr(value, "shape") else jax.tree.map(leaf.copy, value)


def trace_module(init: Callable[[], nnx.Module], mesh: AnyMesh | None = None) -> Trace:
  """Traces a constructor, keeping every annotation; it may name the axes of `mesh`."""
  is_module = isinstance(init, nnx.Module)
  if is_module or not callable(init):
    shown = type(init).__name__
    raise PlanError(
      f"init must be a function that builds the module, and not of type {shown}.",
      fix=f"lambda: {shown if is_module else 'MyModule'}(..., rngs=nnx.Rngs(0))",
    )
  called = init if isinstance(init, functools.partial) else functools.partial(init)
  shown = getattr(called.func, "__name__", type(called.func).__name__).replace("<lambda>", "init")
  missing = _missing(called)
  if missing:
    values = [f"{name}={'nnx.Rngs(0)' if name == 'rngs' else '...'}" for name in missing]
    given = "..., " if called.args or called.keywords else ""
    raise PlanError(
      f"init must take no arguments, and {shown} needs {', '.join(missing)}.",
      fix=f"lambda: {shown}({given}{', '.join(values)})",
    )
  nothing = Abstract(*nnx.split(nnx.Dict()))
  try:
    found = trace(lambda _: run_init(init, mesh), nothing)
  except AssertionError as error:  # on Explicit axes, a constraint only asserts what the type says
    if mesh is None or "with_sharding_constraint" not in str(error):
      raise
    return trace(lambda _: run_init(init, auto_mesh(mesh)), nothing)
  if mesh is None or not is_explicit(mesh):
    return found
  stated = zip(found.output_paths, stated_specs(found.program), strict=True)
  with without_mesh():
    program = without_shardings(found.program)
  state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found.made.state)
  return dataclasses.replace(
    found,
    made=Abstract(found.made.graphdef, state),
    program=program,
    stated={path: spec for path, spec in stated if spec is not None},
  )


def _missing(init: functools.partial[Any]) -> list[str]:
  """The parameters without a default."""
  if inspect.isclass(init.func):  # an nnx.Module's metaclass hides the signature of `__init__`
    init = functools.partial(init.func.__init__, None, *init.args, **init.keywords)
  return [
    p.name
    for p in inspect.signature(init).parameters.values()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def check_transformation(tx: object) -> None:
  """Raises a `PlanError` for anything but an optax transformation."""
  if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
    return
  kind = type(tx).__name__
  if isinstance(tx, nnx.Optimizer):
    what = f"an nnx.Optimizer ({kind}), which belongs to a live model"
    fix = "optimizer=optimizer.tx; nxp.create_sharded_model(plan) returns a model and its nnx.Optimizer."
  elif callable(tx):
    name = getattr(tx, "__name__", kind)
    room = "optax." if getattr(tx, "__module__", "").startswith("optax.") else ""
    what, fix = f"the function {name}, which was not called", f"optimizer={room}{name}(1e-3)"
  else:
    rate = tx if isinstance(tx, float) else 1e-3
    what, fix = f"{tx!r:.60}", f"optimizer=optax.adamw({rate})"
  raise PlanError(f"optimizer must be an optax transformation, but is {what}.", fix=fix)


_ORIGIN = "path_of_the_parameter"
"""Metadata key of a traced parameter, which optax copies to the Variables that it makes from it."""
_MATRICES = "counts_matrices"
"""Metadata key of traced state whose dim 0 counts matrices."""


def trace_optimizer(model: Abstract, tx: optax.GradientTransformation, wrt: nnx.filterlib.Filter) -> Trace:
  """Traces the optimizer of an abstract module."""
  # optax builds state by `jax.tree.map` over a State of Variables, and so keeps the metadata of each,
  # whatever wraps, masks or factors it. Plain arrays in a copy of the parameters' tree, or a part of it,
  # belong to them.
  check_transformation(tx)
  if not jax.tree.leaves(model.chosen(wrt)):
    raise nothing_selected(wrt, model)
  origins: dict[Path, Path] = {}
  matrices: set[Path] = set()

  # The model is an argument so that optimizers that compute with parameters see arrays, not shapes.
  def build(traced: Any) -> Any:
    for path, leaf in variables(traced).items():
      if isinstance(leaf, nnx.Variable):
        leaf.set_metadata(_ORIGIN, path)
    optimizer = make_optimizer(traced, tx, wrt)
    for state in parts_of_type(optimizer.opt_state, optimizer_layout.PerMatrixState):
      for leaf in jax.tree.leaves(state.groups, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        leaf.set_metadata(_MATRICES, True)
    for path, leaf in variables(optimizer).items():
      if isinstance(leaf, nnx.Variable) and leaf.has_metadata(_MATRICES):
        matrices.add(path)
        leaf.del_metadata(_MATRICES)
      elif isinstance(leaf, nnx.Variable) and leaf.has_metadata(_ORIGIN):
        origins[path] = leaf.get_metadata(_ORIGIN)
        leaf.del_metadata(_ORIGIN)
    return optimizer

  found = trace(build, model)
  chosen = nnx.to_flat_state(model.chosen(wrt))
  trained: dict[Path, Leaf] = {path: value_of(x).shape for path, x in chosen}
  plain = {p: None if p in origins else value_of(x).shape or None for p, x in found.made.leaves.items()}
  origins = optimizer_layout.copies(plain, trained) | origins
  return dataclasses.replace(found, origins=origins, matrices=frozenset(matrices))


def nothing_selected(wrt: nnx.filterlib.Filter, model: Abstract) -> PlanError:
  """The error for a filter that matches no Variable."""
  kinds = sorted({kind_of(leaf) for leaf in model.leaves.values() if not is_rng(leaf)})
  return PlanError(
    f"wrt={wrt!r} selects none of the model's Variables, so there is nothing to train.",
    details=f"Variable types in the model: {', '.join(kinds) or 'none'}",
    fix=f"wrt=nnx.PathContains({wrt if isinstance(wrt, str) else 'head'!r}), or wrt=nnx.Param.",
  )
