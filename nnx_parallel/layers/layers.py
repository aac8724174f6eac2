"""Changes which activations a loss saves for its backward pass, layer by layer, without an edit.

Layers are found in the trace: each call of a module that `find_layers` finds, each scan body, and each part
that is already under `jax.checkpoint`. A model without any of them is an error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.core.interpret import flattened, interpret, is_literal
from nnx_parallel.core.jaxprs import (
  CALLS,
  as_function,
  bind,
  called,
  constants,
  equations,
  gradient_of,
  is_call,
  is_checkpoint,
  is_inexact,
  is_tracer,
  params_of,
  place_of,
  rules,
  scan_counts,
  without_unused,
)
from nnx_parallel.core.layers import Layers, find_layers
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.shards import join_batch, split_batch
from nnx_parallel.core.text import few
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, LossFn, Model, Program, PyTree, TreeDef, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.attention import Attention, by_blocks, check_attention
from nnx_parallel.layers.head import check_chunks, in_chunks
from nnx_parallel.layers.mark import (
  Scalars,
  calls_layers,
  is_marked,
  layer_of,
  marked,
  repeats_layers,
  scalars_as,
)
from nnx_parallel.layers.pipeline import Order, Pipeline, Schedule
from nnx_parallel.layers.pipeline_1f1b import Pipeline1F1B
from nnx_parallel.layers.pipeline_split import SplitPipeline1F1B
from nnx_parallel.layers.stacks import Body, Chain, Stacks, Treatment, has_layer_rows, step_of_scan
from nnx_parallel.layers.stages import Signature, TrainPipeline
from nnx_parallel.layout.constrain import mapped_axes, surroundings

T = TypeVar("T")
RematName = Literal["as written", "none", "dots", "full", "offload"]
REMATS: tuple[RematName, ...] = get_args(RematName)
MARK_LAYERS = (
  'layers of one class in an nnx.List, or named by layers="decoder.blocks.*"; or @nnx.remat on the __call__'
  " of their class"
)
AUTO_LAYERS = 4
"""The fewest layers of a scan with `scan_layers="auto"`: stacked weights are a copy in each step."""
_WHAT_IS_A_LAYER = (
  "a layer is one of several adjacent modules of one class and structure (in a list, or as"
  " attributes that end in numbers), the body of a scan, or a part under nnx.remat"
)
_SHOWN = 6
_PRODUCTS = ("dot_general", "conv_general_dilated")
_INPUT = "layer input"
"""The name of the arrays that `"offload"` moves to host memory."""
_ORDERS: dict[Order, type[TrainPipeline]] = {
  "gpipe": TrainPipeline,
  "1f1b": Pipeline1F1B,
  "1f1b-split": SplitPipeline1F1B,
}


@dataclasses.dataclass(frozen=True)
class Remat:
  """Which activations the layers of a model save for the backward pass, and which layers.

  Attributes:
    policy: `"none"`, `"dots"`, `"full"` or `"offload"`, or a policy of `jax.checkpoint_policies`; see
      `train_step`.
    every: apply the policy only to every n-th of consecutive equal layers; the other layers save everything.
    group: the number of consecutive layers that are recomputed as one unit, from the input of the first of
      these layers.

  Raises:
    TrainError: the policy does not exist, or a number is less than 1.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.Remat("full", every=2)
    Remat(policy='full', every=2, group=1)
  """

  policy: RematName | Callable[..., Any] = "full"
  every: int = 1
  group: int = 1

  def __post_init__(self) -> None:
    if not callable(self.policy) and self.policy not in REMATS:
      raise TrainError(
        f"remat={self.policy!r} is not a known policy.",
        fix=f"one of {', '.join(map(repr, REMATS))}, or a policy itself: jax.checkpoint_policies.NAME.",
      )
    counts = self.every, self.group
    if any(type(n) is not int or n < 1 for n in counts) or (self.every > 1 and self.group > 1):
      raise TrainError(
        f"Remat(every={self.every}, group={self.group}) selects no layers.",
        fix='Remat("full", every=2), or Remat("full", group=2)',
      )

  @property
  def changes(self) -> bool:
    """Whether this policy changes the program of the loss."""
    return self.policy != "as written"

  @property
  def needs_layers(self) -> bool:
    """Whether it is an error if the loss has no layers."""
    return self.policy not in ("as written", "none")

  def __str__(self) -> str:
    name = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "a policy")
    some = f" in one of every {self.every} layers" if self.every > 1 else ""
    return f"{name}{some}" + (f" in groups of {self.group}" if self.group > 1 else "")


Policy = RematName | Callable[..., Any] | Remat | None
"""A word, a policy of `jax.checkpoint_policies` for each layer, a `Remat`; or None: as written."""
ScanLayers = Literal["auto"] | bool


@dataclasses.dataclass(frozen=True)
class LayerOptions:
  """How the layers of a loss are computed.

  Attributes:
    remat: the activations that each layer saves for the backward pass.
    scan_layers: whether consecutive equal layers become one scan.
    pattern: dotted paths of the layers, with `*` for any part; None: see `find_layers`.
    attention: `"blockwise"` or a block length, `"fused"`, `"ring"`, `"ulysses"`; None: as written.
    loss_chunks: the number of vocabulary chunks of the head and the loss; None: as written.
    pipeline: the pipeline stages of the layers; None: each device computes all layers.

  Raises:
    TrainError: no such policy, or another option is not valid.
  """

  remat: Policy = None
  scan_layers: ScanLayers = "auto"
  pattern: str | None = None
  attention: Attention = None
  loss_chunks: int | None = None
  pipeline: Pipeline | None = None

  def __post_init__(self) -> None:
    _ = self.how
    if type(self.scan_layers) is not bool and self.scan_layers != "auto":
      raise TrainError(
        f"scan_layers={self.scan_layers!r} is not a valid choice.", fix='scan_layers="auto", True or False'
      )
    if self.pattern is not None and type(self.pattern) is not str:
      raise TrainError(f"layers={self.pattern!r} is no pattern.", fix='layers="blocks.*", one for all layers')
    if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise TrainError(
        f"pipeline={self.pipeline!r} is not an axis.", fix='pipeline="stage", or nxp.Pipeline("stage")'
      )
    if self.pipeline is not None and self.pipeline.order == "1f1b-split" and self.how.needs_layers:
      raise TrainError(
        f"remat={str(self.how)!r} has no effect on layers whose backward passes are split.",
        details='order="1f1b-split" saves what the gradients of weights read',
        fix='leave remat out; or order="1f1b".',
      )
    check_attention(self.attention)
    check_chunks(self.loss_chunks)

  @property
  def how(self) -> Remat:
    """The activations that each layer saves."""
    if isinstance(self.remat, Remat):
      return self.remat
    return Remat("as written" if self.remat is None else self.remat)

  @property
  def rewrites(self) -> bool:
    """Whether attention or the head is computed another way."""
    return self.attention is not None or self.loss_chunks is not None

  @property
  def marks(self) -> bool:
    """Whether something is done with layers."""
    return self.how.needs_layers or self.scan_layers is True or self.pipeline is not None

  def marking(self, model: Model, used: LayersUsed | None = None) -> contextlib.AbstractContextManager[None]:
    """Marks the layers of a model that belongs to a trace, if anything is done with them."""
    if not self.marks and self.pattern is None:
      return contextlib.nullcontext()
    found = find_layers(model, self.pattern)
    if self.pattern is not None and not found:
      raise TrainError(
        f"layers={self.pattern!r} matches no module.",
        details="modules: " + few([path_str(path) for path, _ in nnx.iter_modules(model) if path]),
        fix='layers="blocks.*", with the dotted paths of the modules that repeat.',
      )
    if used is not None:
      used.found = found
    return marked(model, found) if self.marks else contextlib.nullcontext()


@dataclasses.dataclass
class LayersUsed:
  """How the layers of a loss were computed; print it.

  Attributes:
    found: the layers of the model.
    done: how they were computed, one line each.
    reasons: why some layers are not in one scan, one line each.
    schedule: the schedule of the pipeline, if there is one.
    axes: on a mesh with Explicit axes, the axes that the loss is computed on, and why.
  """

  found: tuple[Layers, ...] = ()
  done: tuple[str, ...] = ()
  reasons: tuple[str, ...] = ()
  schedule: Schedule | None = None
  axes: str = ""

  def __str__(self) -> str:
    lines = [self.axes] if self.axes else []
    lines += [str(layers) for layers in self.found] + [f"  {line}" for line in self.done]
    reasons = [
      *self.reasons[:_SHOWN],
      *([f"and {more} more"] if (more := len(self.reasons) - _SHOWN) > 0 else []),
    ]
    return "\n".join([*lines, *(f"  not scanned: {line}" for line in reasons)]) or "as written"


def with_layers(
  loss: LossFn,
  *,
  remat: Policy = None,
  scan_layers: ScanLayers = "auto",
  layers: str | None = None,
  attention: Attention = None,
  loss_chunks: int | None = None,
) -> Callable[..., Any]:
  """Returns the loss function with its layers rematerialized, scanned, or both. The model is not edited.

  `train_step(loss, remat=..., scan_layers=...)` already does this; use `with_layers` in a step that you write
  yourself.

  Args:
    loss: `loss(model, batch)`.
    remat: as in `train_step`.
    scan_layers: as in `train_step`.
    layers: as in `train_step`.
    attention: as in `train_step`. On a mesh, the mesh in scope places the fused kernel: the mesh of the plan,
      of `use_rules` or of `jax.set_mesh`. `"ring"` and `"ulysses"` are errors outside of a step. Only
      attention as written has forward-mode derivatives.
    loss_chunks: as in `train_step`.

  Returns:
    A loss function with the same arguments, the same value and gradients, and the same changes of Variables.
    It raises a `TrainError` if a policy other than `"none"` finds no layer, if `scan_layers=True` finds
    nothing to scan, if `layers` matches no module, if `attention` finds no attention, or if `loss_chunks`
    finds no head.

  Raises:
    TrainError: the policy does not exist.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(9)])
    >>> scanned = with_layers(lambda model, x: model(x).sum(), scan_layers=True)
    >>> [eqn.primitive.name for eqn in jax.make_jaxpr(scanned)(model, jnp.ones((2, 4))).eqns].count("scan")
    1
  """
  options = LayerOptions(remat, scan_layers, layers, attention, loss_chunks)
  return _on_copies(loss, options, options)


def with_marks(loss: LossFn, layers: str | None = None) -> Callable[..., PyTree]:
  """The same loss with the calls of its layers marked; see `has_layers`."""
  return _on_copies(loss, LayerOptions("full", pattern=layers), LayerOptions())


def _on_copies(loss: LossFn, marks: LayerOptions, does: LayerOptions) -> Callable[..., PyTree]:
  """The same loss, called on a copy of the model whose state is written back."""

  @functools.wraps(loss)  # with its signature: a step reads how many arguments a loss takes
  def changed(model: Model, *batch: PyTree) -> PyTree:
    graphdef, state = nnx.split(model)

    def pure(state: PyTree, *batch: PyTree) -> PyTree:
      module = nnx.merge(graphdef, state)
      with marks.marking(module):
        result = loss(module, *batch)
      return result, nnx.state(module, nnx.Variable)

    result, after = with_options(pure, does)(state, *batch)
    nnx.update(model, after)
    return result

  return changed


def with_options(
  function: Callable[..., PyTree], options: LayerOptions, used: LayersUsed | None = None
) -> Callable[..., PyTree]:
  """A function of pytrees of arrays whose marked layers are treated by `options`.

  It raises a `TrainError` if a policy finds no layer.

  Args:
    function: marks its layers by `options.marking`.
    options: how the layers are computed.
    used: receives how they were computed.
  """
  remat, note = options.how, LayersUsed() if used is None else used
  if not (remat.changes or options.scan_layers is True or options.rewrites):
    return function

  def changed(*args: PyTree) -> PyTree:
    traced, shape = _traced(function, args, options, note)
    found = _treated(traced, jax.tree.leaves(args), options, note)
    return jax.tree.unflatten(jax.tree.structure(shape), found)

  return changed


def with_stages(
  objective: Callable[..., PyTree],
  options: LayerOptions,
  microbatches: int,
  ends: Callable[[PyTree], tuple[Mapping[int, int], Collection[int]]],
  used: LayersUsed,
) -> Callable[..., PyTree]:
  """A loss whose layers are a pipeline: a function of the full batch instead of a microbatch.

  It raises a `TrainError` if the loss has no equal layers.

  Args:
    objective: `(model, batch) -> results`, of pytrees of arrays; marks its layers by `options.marking`.
    options: how the layers are computed; includes a pipeline.
    microbatches: the number of microbatches of the batch.
    ends: as in `program_of`.
    used: receives how they were computed.
  """
  assert options.pipeline is not None
  pipeline = options.pipeline

  def changed(model: Model, batch: PyTree) -> PyTree:
    parts = jax.tree.map(lambda x: split_batch(x, microbatches), batch)
    arrays, first = jax.tree.leaves(model), jax.tree.map(lambda x: x[0], parts)
    program, signature, tree = program_of(objective, (model, first), options, ends, used)
    mesh = surroundings(*arrays).mesh
    piped = _ORDERS[pipeline.order](program, signature, treatment_of(options), pipeline, microbatches, mesh)
    used.done, used.schedule = (str(piped), *used.done), piped.schedule
    found = piped(arrays, jax.tree.leaves(parts))
    for n in piped.kept:  # not as a result of the rule of 1F1B, so that it is seen to be unchanged
      found[n] = arrays[signature.states[n]]
    found = [join_batch(x) if n in signature.outputs else x for n, x in enumerate(found)]
    return jax.tree.unflatten(tree, found)

  return changed


def program_of(
  function: Callable[..., PyTree],
  args: tuple[PyTree, ...],
  options: LayerOptions,
  ends: Callable[[PyTree], tuple[Mapping[int, int], Collection[int]]],
  used: LayersUsed,
) -> tuple[Stacks, Signature, TreeDef]:
  """The trace of a call for a pipeline, the roles of its inputs and results, and the results' structure.

  Args:
    function: a function of pytrees of arrays, the model first; marks its layers by `options.marking`.
    args: its arguments for one microbatch, or one group of rows.
    options: how the layers are computed; includes a pipeline.
    ends: the position of each result, in the structure of the results -> `Signature.states` and `.outputs`;
      positions of inputs count the arrays of all arguments.
    used: receives how they were computed.
  """
  assert options.pipeline is not None
  with mapped_axes((options.pipeline.axis,)):
    traced, shape = _traced(function, args, options, used)
  tree = jax.tree.structure(shape)
  states, outputs = ends(jax.tree.unflatten(tree, range(tree.num_leaves)))
  program = Stacks(without_unused(traced), group=max(options.how.every, options.how.group))
  if not calls_layers(traced) and (why := _uncalled(used)):
    program.reasons.append(why)
  used.reasons = tuple(program.reasons)
  return program, Signature(len(jax.tree.leaves(args[0])), states, outputs), tree


def _uncalled(used: LayersUsed) -> str:
  """Why the trace of a loss has no layers, although the model has."""
  if not used.found:
    return ""
  return (
    f"{'; '.join(map(str, used.found))}: the loss does not call them as layer(...), or inside lax.cond,"
    " lax.while_loop, jax.shard_map or a custom rule"
  )


def _traced(
  function: Callable[..., PyTree], args: tuple[PyTree, ...], options: LayerOptions, note: LayersUsed
) -> tuple[ClosedJaxpr, PyTree]:
  """The trace of a loss, with its attention and head as the options say, and the shape of its results."""
  traced, shape = _traced_once(function, args)
  remat = options.how
  if remat.needs_layers and not has_layers(traced):
    raise TrainError(
      f"remat={str(remat)!r} finds no layer in the loss, so it would change nothing.",
      details=_uncalled(note) or _WHAT_IS_A_LAYER,
      fix=f"{MARK_LAYERS}; or leave remat out.",
    )
  _check_rules(traced)
  if any(_is_opened(eqn) for eqn in traced.eqns):
    traced = flattened(traced, _is_opened)
  rewritten: list[str] = []
  if options.loss_chunks is not None:
    traced, line = in_chunks(traced, options.loss_chunks)
    rewritten.append(line)
  if options.attention is not None:
    traced, line = by_blocks(traced, options.attention)
    rewritten.append(line)
  note.done, note.reasons = tuple(rewritten), ()
  return traced, shape


def _traced_once(function: Callable[..., PyTree], args: tuple[PyTree, ...]) -> tuple[ClosedJaxpr, PyTree]:
  """The trace of a loss and its results; a layer receives arrays where other layers of its class do."""
  found, scalars = jax.make_jaxpr(function, return_shape=True), Scalars()
  with scalars_as(scalars):
    traced, shape = found(*args)
  if not scalars.mixed:
    return traced, shape
  try:
    with scalars_as(Scalars(traced=scalars.mixed)):
      # A new function: JAX would return the cached trace of the same function.
      again, _ = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*args)
  except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError):
    return traced, shape  # Python reads the number
  (types, numbers), (new_types, new_numbers) = _operations(traced), _operations(again)
  known = {x for place in scalars.mixed for x in scalars.given[place]}
  is_same = types == new_types and known.issuperset(numbers - new_numbers) and not new_numbers - numbers
  return (again if is_same else traced), shape


def _operations(jaxpr: Program) -> tuple[list[object], collections.Counter[float]]:
  """The operations of a program and their types, except broadcasts of scalars; and its numbers."""
  types: list[object] = []
  numbers: collections.Counter[float] = collections.Counter()
  for eqn in equations(jaxpr):
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", *CALLS):
      types.append((eqn.primitive.name, [(var.aval.shape, var.aval.dtype) for var in eqn.outvars]))
    literals = [var.val for var in eqn.invars if is_literal(var)]
    numbers.update(float(x) for x in literals if jnp.issubdtype(jnp.result_type(x), jnp.floating))
  return types, numbers


def _treated(
  traced: ClosedJaxpr, leaves: list[jax.Array], options: LayerOptions, used: LayersUsed
) -> list[jax.Array]:
  """The results of a trace whose layers are treated by the options."""
  remat, how = options.how, treatment_of(options)
  size = max(remat.every, remat.group)
  auto = AUTO_LAYERS if options.scan_layers and remat.needs_layers else None
  scan_from = 2 if options.scan_layers is True else auto
  loops = size > 1 or remat.policy == "offload"
  # Names, in order: a program is traced again by `jax.checkpoint` and by scans.
  lines: dict[str, None] = {}
  reasons: dict[str, None] = {}
  scans: list[Chain] = []

  def program(jaxpr: Program, inputs: Sequence[jax.Array], where: str = "") -> list[jax.Array]:
    stacks = Stacks(jaxpr, scan_from, size, loops=loops)
    lines.update((_line(stacks, chain, remat) + where, None) for chain in stacks.chains.values())
    if remat.needs_layers:
      lines.update((line + where, None) for line in _alone(stacks, remat))
    reasons.update((reason, None) for reason in stacks.reasons)
    scans.extend(chain for chain in stacks.chains.values() if chain.scan)
    return stacks(inputs, dataclasses.replace(how, run=run))

  def run(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    params = params_of(eqn)
    if is_checkpoint(eqn) and calls_layers(params["jaxpr"]):
      inside: Any = lambda *xs: program(params["jaxpr"], xs, "; inside jax.checkpoint")  # noqa: E731
      return jax.checkpoint(inside, policy=params["policy"], prevent_cse=params["prevent_cse"])(*inputs)
    if eqn.primitive.name == "scan" and repeats_layers(eqn):
      return _scanned(eqn, inputs, lambda *xs: program(params["jaxpr"], xs, "; inside a scan"))
    return how.run(eqn, inputs)

  found = program(traced, leaves)
  if options.scan_layers is True and not scans:
    layers = "\n".join(map(str, used.found)) or "no adjacent modules have one class and structure"
    raise TrainError(
      "scan_layers=True finds no consecutive equal layers.",
      details="\n".join([*reasons][:_SHOWN]) or layers,
      fix='scan_layers="auto", or False; layers="decoder.blocks.*" names the layers.',
    )
  used.done, used.reasons = (*lines, *used.done), tuple(reasons)
  return found


def treatment_of(options: LayerOptions) -> Treatment:
  """How `remat` treats layers."""
  remat = options.how
  policy = remat.policy if remat.changes else None
  joint = remat.group > 1 or policy == "offload"  # a unit is recomputed as one
  in_units = joint or remat.every > 1

  def run(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if in_units and has_layer_rows(eqn):
      return _in_units(eqn, inputs, remat)
    return _run(eqn, inputs, policy="full" if policy == "offload" else policy)

  def in_unit(n: int, scan: bool, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if joint:
      return _evaluate(called(eqn), inputs, policy)
    return _run(eqn, inputs, policy=policy if n % remat.every == 0 else "none", in_scan=scan)

  def around(body: Body, scan: bool) -> Body:
    return _recomputed(body, policy, in_scan=scan) if joint else body

  def in_scan(eqn: JaxprEqn) -> Callable[..., Sequence[jax.Array]]:
    if policy is None:
      return as_function(eqn.params["jaxpr"])
    if in_units:
      raise TrainError(
        f"remat={str(remat)!r} does not apply to a scan of the model that is run as a pipeline.",
        details="each of its layers is treated alone",
        fix='remat="full"; or Remat and "offload" with layers in an nnx.List.',
      )
    return _checkpointed(_layer(eqn.params["jaxpr"], policy), policy, in_scan=True)

  return Treatment(run, in_unit, around, in_scan)


def _line(stacks: Stacks, chain: Chain, remat: Remat) -> str:
  """Describes how a chain of layers is computed."""
  paths, units, size = stacks.paths(chain), len(chain.units), len(chain.units[0])
  way = f"one scan of {units}" if chain.scan else f"{units} one after the other"
  each = f", {size} layers each" if size > 1 else ""
  return f"{paths[0]} to {paths[-1]}: {way}{each}" + (f"; remat {remat}" if remat.changes else "")


def _alone(stacks: Stacks, remat: Remat) -> Iterator[str]:
  """Describes the policy for layers that are not in a chain, and for scans that the model has."""
  in_chains = {n for chain in stacks.chains.values() for n in chain.calls}
  paths = [layer_of(eqn) for n, eqn in enumerate(stacks.eqns) if is_marked(eqn) and n not in in_chains]
  text = "full, not offloaded" if remat.policy == "offload" else str(Remat(remat.policy))
  if paths:
    several = f"{paths[0]} to {paths[-1]}: remat {text} in each layer"
    yield several if len(paths) > 1 else f"{paths[0]}: remat {text}"
  for eqn in stacks.eqns:
    if is_checkpoint(eqn) and not calls_layers(called(eqn)):
      yield f"parts under jax.checkpoint: remat {text}"
    elif eqn.primitive.name == "scan" and not repeats_layers(eqn):
      yield f"the model's scan of {eqn.params['length']}: remat {remat if has_layer_rows(eqn) else text}"


def _check_rules(traced: ClosedJaxpr) -> None:
  """Refuses a rule of `jax.custom_vjp` that reads an array of the trace directly, not by an argument."""
  for eqn in rules(traced):
    if any(is_tracer(x) for x in constants(gradient_of(eqn))):
      raise TrainError(
        "a rule of jax.custom_vjp reads an array that is not among its arguments, so the layers of this loss"
        " can neither be scanned nor rematerialised.",
        details=f"at {place_of(eqn)}",
        fix="give the array to the function as an argument, with None as its gradient; or leave remat= and"
        " scan_layers= out.",
      )


def has_layers(jaxpr: Program) -> bool:
  """Whether a traced loss has parts that a policy applies to."""
  return any(
    is_checkpoint(eqn) or eqn.primitive.name == "scan" or is_marked(eqn) for eqn in equations(jaxpr, is_call)
  )


def _is_opened(eqn: JaxprEqn) -> bool:
  """Whether an operation is a call inside which layers are called: `jax.jit` of a part of a loss."""
  return is_call(eqn) and not is_marked(eqn) and calls_layers(called(eqn))


def _is_layer(eqn: JaxprEqn) -> bool:
  """Whether a marked call is a layer; a call whose products are all in inner layers is not."""
  if not is_marked(eqn):
    return False
  body = called(eqn)
  return not has_layers(body) or any(e.primitive.name in _PRODUCTS for e in equations(body, is_call))


def _evaluate(
  jaxpr: Program, args: Sequence[jax.Array], policy: Policy, in_layer: bool = True
) -> list[jax.Array]:
  return interpret(jaxpr, args, functools.partial(_run, policy=policy, in_layer=in_layer))


def _layer(jaxpr: Program, policy: Policy) -> Callable[..., list[jax.Array]]:
  return lambda *args: _evaluate(jaxpr, args, policy)


def _run(
  eqn: JaxprEqn, inputs: list[Value], *, policy: Policy, in_layer: bool = False, in_scan: bool = False
) -> Sequence[Value]:
  """The results of an operation, under a policy if it is a layer."""
  if policy is None:  # as written
    return as_function(called(eqn))(*inputs) if is_marked(eqn) else bind(eqn, inputs)
  if is_call(eqn):
    if in_layer or not _is_layer(eqn):
      return _evaluate(called(eqn), inputs, policy, in_layer)
    return _checkpointed(_layer(called(eqn), policy), policy, in_scan=in_scan)(*inputs)
  if is_checkpoint(eqn):
    body = _layer(called(eqn), policy)
    # Within a layer, pieces that the user recomputes (blocks of attention) stay so under "full"; a policy of
    # the layer cannot see into pieces.
    return body(*inputs) if in_layer and policy != "full" else _checkpointed(body, policy)(*inputs)
  if eqn.primitive.name == "scan":
    body = _layer(eqn.params["jaxpr"], policy)
    return _scanned(eqn, inputs, body if in_layer else _checkpointed(body, policy))
  return bind(eqn, inputs)


def _scanned(
  eqn: JaxprEqn, inputs: list[jax.Array], body: Callable[..., Sequence[jax.Array]]
) -> list[jax.Array]:
  """The results of a scan with another body, a function of flat arrays."""
  params, (step, carry, rows) = eqn.params, _step_of(eqn, inputs, body)
  carry, made = jax.lax.scan(
    step, carry, rows, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
  )
  return [*carry, *made]


def _step_of(
  eqn: JaxprEqn, inputs: list[jax.Array], body: Callable[..., Sequence[jax.Array]]
) -> tuple[Body, list[jax.Array], list[jax.Array]]:
  """The step of a scan, its first carry, and its rows."""
  fixed, first, rows = scan_counts(eqn).split(inputs)
  return step_of_scan(eqn, fixed, body), first, rows


def _in_units(eqn: JaxprEqn, inputs: list[jax.Array], remat: Remat) -> list[jax.Array]:
  """The results of a scan over layers in which several layers form one unit."""
  policy, body = remat.policy, eqn.params["jaxpr"]
  kept, carry, rows = _step_of(eqn, inputs, _layer(body, "none"))
  within = kept if policy == "none" else _step_of(eqn, inputs, _layer(body, policy))[0]
  length, reverse, size = eqn.params["length"], eqn.params["reverse"], max(remat.every, remat.group)

  def unit(carry: Sequence[jax.Array], rows: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    if remat.every == 1:
      return jax.lax.scan(within, list(carry), list(rows))
    made: list[list[jax.Array]] = []
    for n in range(len(rows[0])):
      carry, made_here = (kept if n else alone)(carry, [x[n] for x in rows])
      made.append(made_here)
    return [*carry], [jnp.stack(xs) for xs in zip(*made, strict=True)]

  if remat.every > 1:
    alone = _checkpointed(within, "none" if policy == "offload" else policy, in_scan=True)
    treated = unit if policy != "offload" else _recomputed(unit, policy, in_scan=True)
  else:
    treated = _recomputed(unit, policy, in_scan=True)
  if reverse:
    rows = [jnp.flip(x, 0) for x in rows]
  whole = length - length % size
  units = [x[:whole].reshape(whole // size, size, *x.shape[1:]) for x in rows]
  carry, made = jax.lax.scan(treated, carry, units, length=whole // size)
  made = [x.reshape(whole, *x.shape[2:]) for x in made]
  if whole < length:
    carry, more = treated(carry, [x[whole:] for x in rows])
    made = [jnp.concatenate(xs) for xs in zip(made, more, strict=True)]
  return [*carry, *([jnp.flip(x, 0) for x in made] if reverse else made)]


def _checkpointed(body: Callable[..., T], policy: Policy, *, in_scan: bool = False) -> Callable[..., T]:
  if policy == "none":
    return body
  named = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
  saved: Any = named[policy] if isinstance(policy, str) else policy
  return jax.checkpoint(body, policy=saved, prevent_cse=not in_scan)


def _recomputed(body: Body, policy: Policy, *, in_scan: bool) -> Body:
  """A unit of layers under a policy; with `"offload"`, its carry is in host memory."""
  if policy != "offload":
    return _checkpointed(body, policy, in_scan=in_scan)

  def named(carry: Sequence[jax.Array], row: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    return body([checkpoint_name(x, _INPUT) if is_inexact(x) else x for x in carry], row)

  offloads = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  )
  return _checkpointed(named, offloads, in_scan=in_scan)
