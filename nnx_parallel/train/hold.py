"""Holds a step's program to the layout of its plan, so that XLA's partitioner has little left to decide.

Where one mesh axis splits both a parameter and the batch, the partitioner chooses which of the two to gather,
and some of its choices compute wrong numbers: with the batch over (data, fsdp) and a kernel over (fsdp,
tensor), a product may contain the examples of other devices, and gradients below it are off by half although
the loss is right.

So the trace of the step is rewritten, by the layouts of `core/flow.py`. `KNOWN_FAULTS` in
`layout/known_faults.py` lists the rules that correct numbers, each with its fault and its canary. The other
rules save memory and messages:
- with a rule for `seq`, the positions of activations between layers are split (arXiv:2205.05198): a sum over
  its axis, as after a tensor-parallel part, leaves each device its positions;
- a table whose rows are split like the batch is looked up, and its gradient summed, by columns;
- an element of each row, such as the logit of a target, is read by a comparison (`core/picks.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from nnx_parallel.core.axes import axes_by_dim, axes_of, entry_of, without
from nnx_parallel.core.dims import dim_map
from nnx_parallel.core.flow import (
  Axes,
  Flow,
  Meeting,
  constraint,
  flow_facts,
  meeting,
  result_axes,
  shard_map_axes,
)
from nnx_parallel.core.interpret import DEFAULT, Interpreter
from nnx_parallel.core.jaxprs import (
  HELD,
  bind,
  called,
  constants,
  equations,
  inner_equations,
  is_call,
  is_call_or_checkpoint,
  opened,
  programs,
)
from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.picks import is_pick, picked
from nnx_parallel.core.shards import laid_out, on_shards
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Program, PyTree, Var
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.batch import batch_axes, input_spec, position_axes
from nnx_parallel.layout.constrain import Scope
from nnx_parallel.rules.ruleset import RuleSet

Flows = Sequence[Flow]
_FUSED = frozenset(("add", "add_any", "convert_element_type", "mul", "select_n", "sub"))
"""Cheap operations between a value and a constraint on a result: a residual sum, a cast, a mask."""
_EXAMPLES = "the examples"
"""Marks the dim of the examples among its axes, also where no mesh axis splits it."""
_POSITIONS = "the positions"
"""Marks the dim of the positions, if a rule splits positions between layers."""
_MARKS = frozenset((_EXAMPLES, _POSITIONS))
RELAXED = range(3)
"""The values of `relaxed`, in the order in which a program is compiled with them until XLA takes it."""


def is_refused(error: BaseException) -> bool:
  """Whether XLA, while partitioning a program, produced a program that it rejects."""
  return isinstance(error, RuntimeError) and "hlo verifier" in str(error)


def with_correct_convolutions(run: Callable[..., PyTree], mesh: AnyMesh | None) -> Callable[..., PyTree]:
  """Returns `run` with correct kernel gradients of grouped convolutions on every mesh.

  Use it in a step that you write yourself. `train_step` already does this, and also keeps the layouts of its
  plan.

  Args:
    run: a function of pytrees of arrays that is traced under `jax.jit`. It is traced only once.
    mesh: the mesh of the arrays, real or abstract; None on one device.

  Returns:
    A function with the same arguments and results. On one device, it is `run` itself.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> def loss(kernel, x):
    ...   y = jax.lax.conv_general_dilated(
    ...     x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
    ...   )
    ...   return y.sum()
    >>> mesh = nxp.make_mesh(data=2, model=4)
    >>> x = jax.device_put(jnp.ones((8, 6, 4)), jax.NamedSharding(mesh, jax.P("data")))
    >>> kernel = jax.device_put(jnp.ones((3, 1, 4)), jax.NamedSharding(mesh, jax.P()))
    >>> print(jax.jit(nxp.verify.with_correct_convolutions(jax.grad(loss), mesh))(kernel, x)[:, 0, 0])
    [40. 48. 40.]
  """
  return held(run, mesh)


def held(
  run: Callable[..., PyTree],
  mesh: AnyMesh | None,
  scope: Scope | None = None,
  shardings: Sequence[Sharding | None] = (),
  batch_at: int = 1,
  relaxed: int = 0,
) -> Callable[..., PyTree]:
  """A step with the layouts of its plan held, forward and backward; `run` itself on one device.

  Args:
    run: `(arrays, batch, ...) -> results`, to be traced under `jax.jit`; without a scope, any function of
      pytrees.
    mesh: the mesh of its arrays, concrete or abstract; None on one device.
    scope: the scope of the plan, which says how the batch is split; without a scope, only the gradients of
      grouped convolutions are corrected.
    shardings: the shardings of the arrays before the batch, or None for each array.
    batch_at: the position of the batch among the arguments; earlier arguments are arrays of the model.
    relaxed: which constraints to leave out, if XLA cannot compile the program: 1 leaves out constraints that
      move the sharding of a table from its rows to its columns, 2 keeps only the constraints of convolutions.
  """
  if mesh is None or mesh.size == 1:
    return run
  inputs = None if scope is None else scope.ruleset
  split = None if inputs is None else batch_axes(inputs, axis_sizes(mesh))
  named = () if inputs is None else position_axes(inputs, axis_sizes(mesh))
  positions = tuple(axis for axis in named if mesh.shape[axis] > 1)

  @functools.wraps(run)  # jax names the program's arguments after the parameters of `run`
  def changed(*args: PyTree) -> PyTree:
    closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    if inputs is None or split is None or AxisType.Explicit in mesh.axis_types:
      flows = [_flow(x, (), data=False) for x in leaves]
    else:
      parts = args[:batch_at], args[batch_at], args[batch_at + 1 :]
      before, batch, rest = map(jax.tree.leaves, parts)
      flows = [
        *(_flow(x, getattr(at, "spec", ()), data=False) for x, at in zip(before, shardings, strict=True)),
        *(_flow_of_batch(x, inputs, axis_sizes(mesh), positions) for x in batch),
        *(_flow(x, (), data=False) for x in rest),
      ]
    rewriting, flows = _rewriting(closed, flows, mesh, split or (), positions, relaxed)
    results = core.jaxpr_as_fun(closed)(*leaves) if rewriting is None else rewriting(closed, leaves, flows)[0]
    return jax.tree.unflatten(jax.tree.structure(shape), results)

  return changed


def _flow_of_batch(
  x: jax.Array, inputs: RuleSet, sizes: Mapping[str, int], positions: tuple[str, ...]
) -> Flow:
  """The layout of an array of the batch, with the dims of its examples and positions marked."""
  known = inputs.inputs is None or inputs.inputs.every_axis or jax.numpy.ndim(x) in inputs.inputs.by_rank
  spec = tuple(input_spec(inputs, jax.numpy.ndim(x), sizes)) if known else (None,) * x.ndim
  first = [(*axes_of(spec[0]), _EXAMPLES)] if spec else []
  second = spec[1:2]
  if positions and second:
    second = [(*dict.fromkeys((*axes_of(spec[1]), *positions)), _POSITIONS)]
  return _flow(x, (*first, *second, *spec[2:]), data=True)


def _rewriting(
  closed: ClosedJaxpr,
  flows: list[Flow],
  mesh: AnyMesh,
  split: Sequence[str],
  positions: tuple[str, ...],
  relaxed: int,
) -> tuple[_Rewriting | None, list[Flow]]:
  """The rewriter of a trace, or None if nothing has to change, and the given layouts of the inputs."""
  used = {axis for axis in (*split, *_names(flows)) if mesh.shape.get(axis, 1) > 1}
  stored = used & _names([flow for flow in flows if not flow.data])
  kernels = any(flow.names and len(flow.axes) > 2 and not flow.data for flow in flows)
  mended = any(_is_faulty(e) or (kernels and _is_convolution(e)) for e in equations(closed.jaxpr))
  nothing_to_confuse = len(used) < 2 and not stored & {*split} and not positions
  if nothing_to_confuse or relaxed > 1:
    flows = [flow if mended and not flow.data else Flow(((),) * len(flow.axes), data=False) for flow in flows]
  if not mended and not any(flow.data for flow in flows):
    return None, flows
  return _Rewriting(mesh, frozenset(used.intersection(split)), stored, positions, moves=not relaxed), flows


def _names(flows: Flows) -> set[str]:
  return {axis for flow in flows for axis in flow.names}


def _flow(x: jax.Array, spec: Sequence[Any], *, data: bool) -> Flow:
  return Flow(axes_by_dim(spec, jax.numpy.ndim(x)), data)


class _Rewriting(Interpreter[Flow]):
  """Evaluates a trace once more, with constraints added.

  Args:
    mesh: the mesh.
    batch: axes larger than 1 that split the batch.
    stored: axes larger than 1 that split parameters or other state.
    positions: axes that split the positions of activations between layers.
    moves: whether tables are looked up and summed by columns.
  """

  def __init__(
    self,
    mesh: AnyMesh,
    batch: frozenset[str],
    stored: set[str],
    positions: tuple[str, ...],
    *,
    moves: bool,
  ):
    self.moves = moves
    self.mesh, self.batch, self.stored, self.others = mesh, batch, stored, stored - batch
    self.positions = positions
    self._met: dict[int, jax.Array] = {}  # with the array, so that its id stays
    self._tables: dict[tuple[int, ...], Axes] = {}
    self._kernels: set[tuple[int, ...]] = set()
    self._weights: set[tuple[int, ...]] = set()
    self._own: set[Var] = set()
    super().__init__(self._run, flow_facts(self._followed))

  def __call__(
    self, jaxpr: Program, inputs: Sequence[jax.Array], facts: Flows
  ) -> tuple[list[jax.Array], list[Flow]]:
    """The results of a trace with constraints, and their layouts."""
    self._own |= _constrained(opened(jaxpr))
    given = zip(inputs, facts, strict=True)
    self._weights |= {x.shape for x, flow in given if not flow.data and flow.names & self.batch}
    return super().__call__(jaxpr, inputs, facts)

  def _run(self, eqn: JaxprEqn, inputs: list[jax.Array], flows: list[Flow]) -> Any:
    """The results of an operation with constraints, and their layouts; see `Interpreter`."""
    if not _is_plain(eqn):
      return bind(eqn, inputs), self._followed(eqn, flows)
    if is_call(eqn) and not _places(eqn.params) and not constants(called(eqn)):
      return self(called(eqn), inputs, flows)
    if eqn.primitive.name in ("scan", "while", "cond") or is_call_or_checkpoint(eqn):
      return DEFAULT
    results, found = self._placed(eqn, inputs, flows)
    if self._is_held(eqn, flows, found) and eqn.outvars[0] not in self._own:
      results = [self._laid(results[0], found[0].axes)]
    return results, found

  def _placed(
    self, eqn: JaxprEqn, inputs: list[jax.Array], flows: list[Flow]
  ) -> tuple[Sequence[jax.Array], list[Flow]]:
    """The results of an operation without programs, with operands and results moved, and their layouts."""
    name = eqn.primitive.name
    if _is_faulty(eqn):
      return [_by_hand(eqn, self.mesh, *inputs)], self._followed(eqn, flows)
    if name == "shard_map":
      if any(map(_is_faulty, inner_equations(eqn))):
        _check_manual(eqn, self.mesh)
    # A look-up keeps its table as it is: the rows are often fewer than the table has.
    elif name != "gather":
      # A product with a constant gradient gathers a parameter too, if another product has gathered it:
      # since jax 0.12, XLA ends the process where only one of the two does.
      carried, product = any(_EXAMPLES in flow.names for flow in flows), meeting(eqn) is not None
      known = [carried or (product and id(x) in self._met) for x in inputs]
      kept, given = _shared(eqn, flows), zip(inputs, flows, known, strict=True)
      inputs = [self._gathered(x, flow, kept) if here and not flow.data else x for x, flow, here in given]
    if is_pick(eqn) and any(_EXAMPLES in flow.names for flow in flows):
      return picked(*inputs), self._followed(eqn, flows)
    if name == "gather":
      return self._look_up(eqn, inputs, flows)
    if name == "scatter-add":
      return self._summed_rows(eqn, inputs, flows)
    if _is_convolution(eqn):
      return self._convolved(eqn, *self._whole_windows(eqn, inputs, flows))
    grows = name == "broadcast_in_dim" and eqn.outvars[0].aval.size > eqn.invars[0].aval.size
    if grows and not flows[0].data:  # a scale or a bias, while it is small
      inputs = [self._gathered(inputs[0], flows[0])]
      flows = [dataclasses.replace(flows[0], axes=self._apart(flows[0].axes))]
    return bind(eqn, inputs), self._followed(eqn, flows)

  def _look_up(
    self, eqn: JaxprEqn, inputs: list[jax.Array], flows: list[Flow]
  ) -> tuple[Sequence[jax.Array], list[Flow]]:
    """A look-up by the batch in a table whose rows a batch axis splits: the columns are split instead.

    Each device looks up its columns of all requested rows, and the devices exchange them. Otherwise each
    device would gather the table, or make the rows of the global batch to sum them.
    """
    numbers, table, found = eqn.params["dimension_numbers"], flows[0], self._followed(eqn, flows)
    rows = {axis for d in numbers.start_index_map for axis in table.axes[d]} & self.batch
    dims: Any = dim_map(eqn)
    own = {d: to for d, to in enumerate(dims.operands[0]) if to in numbers.offset_dims}
    column = self._free(table.axes, rows, own, inputs[0])
    if table.data or column is None or not self._is_minor(found[0], rows):
      return bind(eqn, inputs), found
    axes = _moved(table.axes, rows, column)
    self._tables[inputs[0].shape] = table.axes
    wanted = self._laid(inputs[1], _moved(flows[1].axes, rows))
    results = bind(eqn, [self._laid(inputs[0], axes), wanted])
    return [self._laid(results[0], _moved(found[0].axes, rows, own[column]))], found

  def _summed_rows(
    self, eqn: JaxprEqn, inputs: list[jax.Array], flows: list[Flow]
  ) -> tuple[Sequence[jax.Array], list[Flow]]:
    """The gradient of a table: each device sums all rows of its columns.

    Otherwise each device would sum its examples into a separate table, and the tables would be summed.
    """
    numbers, updates, found = eqn.params["dimension_numbers"], flows[2], self._followed(eqn, flows)
    examples = [d for d in range(len(updates.axes)) if d not in numbers.update_window_dims]
    split = {axis for d in examples for axis in updates.axes[d]} & self.stored
    dims: Any = dim_map(eqn)
    places = [(row, dims.operands[2][row]) for row in numbers.update_window_dims]
    own = {d: row for row, d in places if d is not None}
    column = self._free(found[0].axes, split, own, inputs[0])
    if column is None or _EXAMPLES in found[0].names or not self._is_minor(updates, split):
      return bind(eqn, inputs), found
    # Laid out as it comes first: else the new layout would spread to the layers before.
    moved = self._laid(self._laid(inputs[2], updates.axes), _moved(updates.axes, split, own[column]))
    axes = _moved(found[0].axes, split, column)
    (result,) = bind(eqn, [inputs[0], self._laid(inputs[1], _moved(flows[1].axes, split)), moved])
    result = self._laid(result, axes)
    # To the layout of its table in two steps: XLA would replicate the gradient to make both at once.
    for table in [self._tables[result.shape]] if result.shape in self._tables else []:
      for axes in (_moved(table, split, column), table):
        result = self._laid(result, axes)
    return [result], [dataclasses.replace(found[0], axes=axes)]

  def _free(self, axes: Axes, moved: set[str], dims: Iterable[int], x: jax.Array) -> int | None:
    """The longest of some dims that an axis can split further.

    None for several axes: to move several axes between dims, XLA replicates the array.
    """
    split = [axis for dim in axes for axis in dim if axis not in moved and axis not in _MARKS]
    shards = math.prod(self.mesh.shape[axis] for axis in (*moved, *split))
    fitting = [d for d in dims if x.shape[d] % shards == 0]
    one = self.moves and len(moved) == 1
    return max(fitting, key=lambda d: x.shape[d], default=None) if one else None

  def _is_minor(self, flow: Flow, moved: set[str]) -> bool:
    """Whether an axis is the last axis that splits the examples, so that it can leave them."""
    examples = next((dim for dim in flow.axes if _EXAMPLES in dim), ())
    return [axis for axis in examples if axis in self.mesh.shape and axis in self.batch][-1:] == [*moved]

  def _whole_windows(
    self, eqn: JaxprEqn, inputs: list[jax.Array], flows: list[Flow]
  ) -> tuple[list[jax.Array], list[Flow]]:
    """The operands of a kernel gradient with unsplit spatial dims: XLA sums split ones too often."""
    numbers = eqn.params["dimension_numbers"]
    if _EXAMPLES not in flows[0].axes[numbers.lhs_spec[1]]:
      return inputs, flows
    pairs = zip(flows, (numbers.lhs_spec, numbers.rhs_spec), strict=True)
    found = [_unsplit_along(flow, spec[2:]) for flow, spec in pairs]
    return [self._laid(x, flow.axes) for x, flow in zip(inputs, found, strict=True)], found

  def _convolved(
    self, eqn: JaxprEqn, inputs: list[jax.Array], flows: list[Flow]
  ) -> tuple[Sequence[jax.Array], list[Flow]]:
    """A convolution with a kernel that has unsplit spatial dims, or with the gradient of such a kernel."""
    numbers, kernel = eqn.params["dimension_numbers"], flows[1]
    if not kernel.data and any(kernel.axes[d] for d in numbers.rhs_spec[2:]):
      self._kernels.add(inputs[1].shape)
      flows = [flows[0], _unsplit_along(kernel, numbers.rhs_spec[2:])]
      inputs = [inputs[0], self._laid(inputs[1], flows[1].axes)]
    results, found = bind(eqn, inputs), self._followed(eqn, flows)
    if results[0].shape in self._kernels:
      found = [_unsplit_along(found[0], numbers.out_spec[2:])]
      results = [self._laid(results[0], found[0].axes)]
    return results, found

  def _followed(self, eqn: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    """The layouts of the results of an operation without inner programs.

    A weight that was updated in the program (by an earlier loss, or in an inner loop of the loss) depends on
    the batch, but has no examples: it is still a weight, and the next loss gathers it where it reads it.
    """
    found = zip(self._propagated(eqn, flows), eqn.outvars, strict=True)
    return [
      dataclasses.replace(flow, data=False)
      if flow.data and _EXAMPLES not in flow.names and getattr(var.aval, "shape", None) in self._weights
      else flow
      for flow, var in found
    ]

  def _propagated(self, eqn: JaxprEqn, flows: list[Flow]) -> list[Flow]:
    if eqn.primitive.name == "optimization_barrier":
      return flows
    data = any(flow.data for flow in flows)
    if eqn.primitive.name == "sharding_constraint":
      axes = constraint(eqn, flows[0].axes)
      kept = [tuple(axis for axis in before if axis in _MARKS) for before in flows[0].axes]
      pairs = zip(axes, kept, strict=True)
      return [Flow(tuple((*without(a, _MARKS), *marks) for a, marks in pairs), data)]
    if eqn.primitive.name == "shard_map":
      manual = frozenset(eqn.params["newly_manual_axes"])
      specs = zip(eqn.params["out_specs"], result_axes(eqn, flows), strict=True)
      return [Flow(shard_map_axes(spec, axes, manual), data) for spec, axes in specs]
    product = meeting(eqn)
    if product is not None:
      return [Flow(self._scattered(product, flows), data)]
    return [Flow(axes, data) for axes in result_axes(eqn, flows)]

  def _scattered(self, product: Meeting, flows: list[Flow]) -> Axes:
    """The layout of a product; a sum over the axes of the positions leaves each device its positions."""
    axes = product.meet(flows[0], flows[1], self.batch).axes
    summed = _summed(product, flows)
    if not self.positions or not {*self.positions} <= summed - {axis for dim in axes for axis in dim}:
      return axes
    return tuple(
      (*without(dim, _MARKS), *self.positions, *_MARKS & {*dim}) if _POSITIONS in dim else dim for dim in axes
    )

  def _is_held(self, eqn: JaxprEqn, flows: list[Flow], results: list[Flow]) -> bool:
    """Whether it is a product, or a look-up in a table, whose result carries the batch.

    With two or more axes besides the batch axes, gradients are held too. Otherwise that would cost memory,
    because they are briefly replicated over the batch axes, and no case needs it.
    """
    product = meeting(eqn)
    if eqn.primitive.name != "gather" and product is None:
      return False
    summed = set[str]() if product is None else _summed(product, flows, of_data=True)
    if _EXAMPLES in results[0].names and not summed & self.batch:
      return True
    return len(self.others) > 1 and any(_EXAMPLES in flow.names for flow in flows)

  def _gathered(self, x: jax.Array, flow: Flow, kept: frozenset[str] = frozenset()) -> jax.Array:
    """A parameter, gathered over the axes that split the batch.

    Where all axes split the batch, XLA gathers it anyway.
    """
    if not self.others or not (flow.names & self.batch) - kept:
      return x
    again = id(x) in self._met
    self._met[id(x)] = x
    if again:
      # Else XLA would gather it once, and keep it from the forward to the backward pass.
      x = jax.lax.optimization_barrier(x)
    return self._laid(x, self._apart(flow.axes, kept))

  def _apart(self, dims: Axes, kept: frozenset[str] = frozenset()) -> Axes:
    """Without the axes that split the batch, except some."""
    return tuple(without(axes, self.batch - kept) for axes in dims)

  def _laid(self, x: jax.Array, dims: Axes) -> jax.Array:
    dims = tuple(without(axes, _MARKS) for axes in dims)
    sizes = [math.prod(self.mesh.shape[axis] for axis in axes) for axes in dims]
    spec = [
      PartitionSpec.UNCONSTRAINED if length % size else entry_of(axes)
      for length, size, axes in zip(x.shape, sizes, dims, strict=True)
    ]
    with jax.named_scope(HELD):
      return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


def _moved(axes: Axes, moved: set[str], to: int | None = None) -> Axes:
  """The layout with some axes on one dim, or on no dim, and on no other dim."""
  rest = [without(dim, frozenset(moved)) for dim in axes]
  return tuple((*dim, *moved) if n == to else dim for n, dim in enumerate(rest))


def _unsplit_along(flow: Flow, dims: Sequence[int]) -> Flow:
  """The layout with some dims that are not split."""
  return dataclasses.replace(flow, axes=tuple(() if d in dims else own for d, own in enumerate(flow.axes)))


def _summed(product: Meeting, flows: Flows, *, of_data: bool = False) -> set[str]:
  """Axes of the dims that a product sums over: of both operands, or of operands that depend on the batch."""
  pairs = zip(flows, product.summed, strict=False)
  return {axis for flow, dims in pairs if flow.data or not of_data for d in dims for axis in flow.axes[d]}


def _shared(eqn: JaxprEqn, flows: Flows) -> frozenset[str]:
  """Axes of dims that both operands of a product have and keep: for example, one expert for each index."""
  product = meeting(eqn)
  pairs = () if product is None else zip(*product.shared, strict=True)
  return frozenset(axis for a, b in pairs for axis in {*flows[0].axes[a]} & {*flows[1].axes[b]})


def _is_plain(eqn: JaxprEqn) -> bool:
  """Whether its inner programs take arrays only, so that they can be traced anew."""
  if all(isinstance(var.aval, ShapedArray) for inner in programs(eqn) for var in opened(inner).invars):
    return True
  if any(map(_is_faulty, inner_equations(eqn))):
    raise TrainError(
      f"a grouped convolution is in a {eqn.primitive.name} that takes something else than arrays.",
      details="XLA would compute a wrong kernel gradient, and the program cannot be traced anew",
      fix="take the convolution out of it, or give it arrays as arguments.",
    )
  return False


def _constrained(body: Jaxpr) -> set[Var]:
  """The values that the program constrains itself, perhaps after an elementwise operation."""
  found: set[Var] = set()
  uses = collections.Counter(id(v) for eqn in body.eqns for v in eqn.invars)
  for eqn in reversed(body.eqns):
    name = eqn.primitive.name
    if name == "sharding_constraint" or (name in _FUSED and eqn.outvars[0] in found):
      same = [v for v in eqn.invars if v.aval.shape == eqn.outvars[0].aval.shape]
      found.update(v for v in same if not isinstance(v, core.Literal) and uses[id(v)] == 1)
  return found


def _places(params: PyTree) -> bool:
  """Whether an inner `jit` has shardings for its arguments or results."""
  shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
  return any(isinstance(sharding, NamedSharding) for sharding in shardings)


def _is_faulty(eqn: JaxprEqn) -> bool:
  """A kernel gradient of a grouped convolution.

  It is a convolution with `batch_group_count` > 1. Where mesh axes larger than 1 do not split the batch, XLA
  sums it over all devices: on a 2x4 mesh with the batch on the 2, it comes out 4 times too large; with the
  batch on the 4, twice. The forward pass and the gradient of the input are right, and Adam hides the factor.
  With two groups and channels split over 4 devices, the partitioner aborts the process.
  """
  return _is_convolution(eqn) and eqn.params["batch_group_count"] > 1


def _is_convolution(eqn: JaxprEqn) -> bool:
  return eqn.primitive.name == "conv_general_dilated"


def _by_hand(eqn: JaxprEqn, mesh: AnyMesh, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
  """The same convolution with its contracted dim (the examples of a gradient) split by hand."""
  numbers = eqn.params["dimension_numbers"]
  lhs_dim, rhs_dim = numbers.lhs_spec[1], numbers.rhs_spec[1]
  axes = _dividing_axes(lhs.shape[lhs_dim], mesh)

  def local(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    partial = eqn.primitive.bind(lhs, rhs, **eqn.params)
    return jax.lax.psum(partial, axes) if axes else partial

  specs = [PartitionSpec(*[None] * dim, axes or None) for dim in (lhs_dim, rhs_dim)]
  found = on_shards(local, mesh, specs, PartitionSpec())(lhs, rhs)
  return laid_out(found, mesh, eqn.outvars[0].aval.sharding.spec)


def _dividing_axes(length: int, mesh: AnyMesh) -> tuple[str, ...]:
  """Mesh axes, in order, whose product divides `length`."""
  found: tuple[str, ...] = ()
  for axis, size in mesh.shape.items():
    if size > 1 and length % (size * math.prod(mesh.shape[other] for other in found)) == 0:
      found = (*found, axis)
  return found


def _check_manual(eqn: JaxprEqn, mesh: AnyMesh) -> None:
  """A `shard_map` over all axes is never partitioned; a `shard_map` over some axes is, and incorrectly."""
  manual = set(eqn.params["newly_manual_axes"])
  others = {axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in manual}
  if others:
    names = ", ".join(others)
    raise TrainError(
      "XLA would multiply the kernel gradient of a grouped convolution by up to"
      f" {math.prod(others.values())}.",
      details=f"the convolution is in a shard_map over {sorted(manual)}, which leaves {names} to XLA",
      fix="jax.shard_map without axis_names, over all axes of the mesh; or leave the convolution out of it.",
    )
