"""Changes how the layers of a loss are computed, without an edit.

A layer is a call of a module that `find_layers` finds, or of a slice of a module whose layers are stacked. It
is marked, and recomputed at its mark (`layers/mark.py`). Consecutive equal layers become one scan, or a
pipeline. A scan body without a module, and what the model has under `nnx.remat`, stay as written. An example,
`for b in blocks: x = b(x)` with `remat="full"`:

  x = jit[layer:Block:blocks.0](checkpoint(body))(w0, x); x = jit[layer:Block:blocks.1](...)(w1, x); ...
->
  x = scan(lambda x, w: checkpoint(body)(w, x), x, stack(w0, w1, ...))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from nnx_parallel.attention.find import Attention, by_blocks, check_attention
from nnx_parallel.core.checked import check_arguments, is_one_of
from nnx_parallel.core.interpret import inline_calls
from nnx_parallel.core.jaxprs import (
  bind,
  equations,
  has_reverse_rule,
  inner_equations,
  is_call,
  is_checkpoint,
  is_marked,
  open_jaxpr,
  place_of,
  program_of,
  reads_tracers,
  without_unused,
)
from nnx_parallel.core.jaxprs import trace_like as retraced
from nnx_parallel.core.layers import Layers, find_layers
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.shards import join_batch, split_batch
from nnx_parallel.core.text import few
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, LossFn, Model, Program, PyTree, TreeDef, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.head import check_chunks, in_chunks
from nnx_parallel.layers.mark import calls_layers, layer_of, marked, repeats_layers
from nnx_parallel.layers.pipeline import Pipeline, Schedule, in_order, unstaged
from nnx_parallel.layers.pipeline_1f1b import Pipeline1F1B
from nnx_parallel.layers.pipeline_saving import SavingPipeline1F1B
from nnx_parallel.layers.remat import Policy, Remat
from nnx_parallel.layers.stacks import Chain, Stacks, as_called, move_inside, scan_of_layers
from nnx_parallel.layers.stages import Signature, TrainPipeline
from nnx_parallel.layout.constrain import active_mesh, axes_of_positions, mapped_axes

MARK_LAYERS = (
  'layers of one class in an nnx.List, or named by layers="decoder.blocks.*"; or nnx.remat in the model, on a'
  " __call__ or on the body of a scan"
)
AUTO_LAYERS = 4
"""The fewest layers of a scan with `scan_layers="auto"`: stacked weights are a copy in each step."""
_WHAT_IS_A_LAYER = (
  "a layer is one of several adjacent modules of one class and structure (in a list, or as"
  " attributes that end in numbers), or a module of stacked arrays that a scan calls slice by slice; other"
  " scans, and parts under nnx.remat, stay as written"
)
_SHOWN = 6


ScanLayers = Literal["auto"] | bool


@dataclasses.dataclass(frozen=True)
class LayerOptions:
  """How the layers of a loss are computed: options of `train_step`. `TrainError` if one is not valid."""

  remat: Policy = None  # the activations that each layer saves for the backward pass
  scan_layers: ScanLayers = "auto"  # whether consecutive equal layers become one scan
  pattern: str | None = None  # dotted paths of the layers, with `*` for any part; None: see `find_layers`
  # `"blockwise"` or a block length, `"fused"`, `"ring"`, `"ulysses"`; None: as written
  attention: Attention = None
  loss_chunks: int | None = None  # the number of vocabulary chunks of the head and the loss; None: as written
  pipeline: Pipeline | None = None  # the pipeline stages of the layers; None: each device computes all layers

  def __post_init__(self) -> None:
    _ = self.how
    if not is_one_of(self.scan_layers, (True, False, "auto")):
      raise TrainError(
        f"scan_layers={self.scan_layers!r} is not a valid choice.", fix='scan_layers="auto", True or False'
      )
    if self.pattern is not None and type(self.pattern) is not str:
      raise TrainError(f"layers={self.pattern!r} is no pattern.", fix='layers="blocks.*", one for all layers')
    if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise TrainError(
        f"pipeline={self.pipeline!r} is not an axis.", fix='pipeline="stage", or nxp.Pipeline("stage")'
      )
    if self.pipeline is not None and not self.pipeline.recompute and self.how.needs_layers:
      raise TrainError(
        f"remat={str(self.how)!r} has no effect on layers that are not computed again.",
        details="Pipeline(recompute=False) saves what their backward passes read",
        fix="leave remat out; or recompute=True.",
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
  def marks(self) -> bool:
    """Whether something is done with layers."""
    return self.how.needs_layers or self.scan_layers is True or self.pipeline is not None

  @contextlib.contextmanager
  def marking(self, model: Model, used: LayersUsed | None = None) -> Generator[None]:
    """Marks the layers of a model that belongs to a trace, if anything is done with them."""
    split = axes_of_positions()
    if not self.marks and self.pattern is None and not split:
      yield
      return
    found = find_layers(model, self.pattern)
    if self.pattern is not None and not found:
      raise TrainError(
        f"layers={self.pattern!r} matches no module.",
        details="modules: " + few([path_str(path) for path, _ in nnx.iter_modules(model) if path]),
        fix='layers="blocks.*", with the dotted paths of the modules that repeat.',
      )
    if used is not None:
      used.found = found
    if not self.marks and not split:
      yield
      return
    stacks = (self.how.needs_layers or bool(split)) and self.pattern is None
    with marked(model, found, self.how, stacks=stacks) as marking:
      yield
    if used is not None and split:
      calls = sum(marking.calls.values())
      at = f"{calls} calls" if calls else "no layer is called"
      used.positions = f"positions between layers over {', '.join(split)}: {at}"
    if used is not None:  # parts of a stacked layer are no layers
      used.found = tuple(
        layers for layers in found if not any(layers.paths[0][: len(path)] == path for path in marking.stacks)
      )


@dataclasses.dataclass
class LayersUsed:
  """How the layers of a loss were computed; print it."""

  found: tuple[Layers, ...] = ()  # the layers of the model
  done: tuple[str, ...] = ()  # how they were computed, one line each
  reasons: tuple[str, ...] = ()  # why some layers are not in one scan, one line each
  schedule: Schedule | None = None  # the schedule of the pipeline, if there is one
  axes: str = ""  # on a mesh with Explicit axes, the axes that the loss is computed on, and why
  positions: str = ""  # with a rule for `seq`, where the positions of activations are split
  left: str = ""  # what the step leaves to XLA because it does not know it, and what to do

  def __str__(self) -> str:
    lines = [line for line in (self.axes, self.positions, self.left) if line]
    lines += [str(layers) for layers in self.found] + [f"  {line}" for line in self.done]
    reasons = [
      *self.reasons[:_SHOWN],
      *([f"and {more} more"] if (more := len(self.reasons) - _SHOWN) > 0 else []),
    ]
    return "\n".join([*lines, *(f"  not scanned: {line}" for line in reasons)]) or "as written"


@check_arguments(TrainError, "remat", "scan_layers", "layers", "attention", "loss_chunks")
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
    loss: `loss(model, batch)`, or with other arguments and keywords. Numbers, flags and strings of Python
      stay what they are; arrays are traced.
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
  """The same loss, called on copies of its arguments; the Variables are written back."""

  @functools.wraps(loss)  # with its signature: a step reads how many arguments a loss takes
  def changed(*args: PyTree, **kwargs: PyTree) -> PyTree:
    graphdef, state = nnx.split((args, kwargs))  # flags and numbers of Python are in the graphdef

    def pure(state: PyTree) -> PyTree:
      inner, options = nnx.merge(graphdef, state)
      before = {path: leaf.get_raw_value() for path, leaf in _variables((inner, options))}
      with marks.marking(next(iter((*inner, *options.values())))):
        result = loss(*inner, **options)
      after = _variables((inner, options))
      # The others may belong to a transform around this call, which would refuse that they are written.
      changed = [(path, leaf) for path, leaf in after if leaf.get_raw_value() is not before.get(path)]
      return result, nnx.from_flat_state(changed)

    result, after = with_options(pure, does)(state)
    nnx.update((args, kwargs), after)
    return result

  return changed


def _variables(objects: PyTree) -> Any:
  """Path and Variable of each Variable."""
  return nnx.to_flat_state(nnx.state(objects, nnx.Variable))


def with_options(
  function: Callable[..., PyTree], options: LayerOptions, used: LayersUsed | None = None
) -> Callable[..., PyTree]:
  """A function of arrays whose marked layers are treated, as `used` says; `TrainError` if none is found."""
  remat, note = options.how, LayersUsed() if used is None else used
  rewrites = options.attention is not None or options.loss_chunks is not None
  if not (remat.changes or options.scan_layers is True or rewrites):
    return function

  def changed(*args: PyTree) -> PyTree:
    traced, shape = _trace(function, args, options, note)
    found = _treat(traced, jax.tree.leaves(args), options, note)
    return jax.tree.unflatten(jax.tree.structure(shape), found)

  return changed


def with_stages(
  objective: Callable[..., PyTree],
  options: LayerOptions,
  microbatches: int,
  ends: Callable[[PyTree], tuple[Mapping[int, int], Collection[int]]],
  used: LayersUsed,
) -> Callable[..., PyTree]:
  """A loss `(model, batch) -> results` of the full batch as a pipeline; `ends` is as in `trace_program`."""
  assert options.pipeline is not None
  asked = options.pipeline

  def changed(model: Model, batch: PyTree) -> PyTree:
    parts = jax.tree.map(lambda x: split_batch(x, microbatches), batch)
    arrays, first = jax.tree.leaves(model), jax.tree.map(lambda x: x[0], parts)
    types = unstaged(model, asked.axis)
    program, signature, tree = trace_program(objective, (types, first), options, ends, used)
    mesh = active_mesh(*arrays).mesh
    pipeline = in_order(asked, mesh)
    of_order = Pipeline1F1B if pipeline.recompute else SavingPipeline1F1B
    kind = TrainPipeline if pipeline.order == "gpipe" else of_order
    piped = kind(program, signature, pipeline, microbatches, mesh)
    used.done, used.schedule = (str(piped), *used.done), piped.schedule
    found = piped(arrays, jax.tree.leaves(parts))
    for n in piped.kept:  # not as a result of the rule of 1F1B, so that it is seen to be unchanged
      found[n] = arrays[signature.states[n]]
    found = [join_batch(x) if n in signature.outputs else x for n, x in enumerate(found)]
    return jax.tree.unflatten(tree, found)

  return changed


def trace_program(
  function: Callable[..., PyTree],
  args: tuple[PyTree, ...],
  options: LayerOptions,
  ends: Callable[[PyTree], tuple[Mapping[int, int], Collection[int]]],
  used: LayersUsed,
) -> tuple[Stacks, Signature, TreeDef]:
  """The trace of a call for a pipeline, the roles of its inputs and results, and the results' structure.

  `args` are of one microbatch, the model first. `ends` gives `Signature.states` and `.outputs`, from the
  position of each result, in the structure of the results.
  """
  assert options.pipeline is not None
  with mapped_axes((options.pipeline.axis,)):
    traced, shape = _trace(function, args, options, used)
  tree = jax.tree.structure(shape)
  states, outputs = ends(jax.tree.unflatten(tree, range(tree.num_leaves)))
  program = Stacks(without_unused(traced), remat=options.how)
  if not calls_layers(traced) and used.found:
    program.reasons.append(
      f"{_uncalled(used)}, or inside lax.cond, lax.while_loop, jax.shard_map or a custom rule"
    )
  used.reasons = tuple(program.reasons)
  return program, Signature(len(jax.tree.leaves(args[0])), states, outputs), tree


def _uncalled(used: LayersUsed) -> str:
  """Why the trace of a loss has no layers, although the model has."""
  return f"{'; '.join(map(str, used.found))}: the loss does not call them as layer(...)" * bool(used.found)


def _trace(
  function: Callable[..., PyTree], args: tuple[PyTree, ...], options: LayerOptions, note: LayersUsed
) -> tuple[ClosedJaxpr, PyTree]:
  """The trace of a loss, with its attention and head as the options say, and the shape of its results."""
  traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
  remat = options.how
  if remat.needs_layers and not has_layers(traced):
    raise TrainError(
      f"remat={str(remat)!r} finds no layer in the loss, so it would change nothing.",
      details=_uncalled(note) or _WHAT_IS_A_LAYER,
      fix=f"{MARK_LAYERS}; or leave remat out.",
    )
  _check_rules(traced)
  if any(_opens_layers(eqn) for eqn in traced.eqns):
    traced = inline_calls(traced, _opens_layers)
  rewritten: list[str] = []
  if options.loss_chunks is not None:
    traced, line = in_chunks(traced, options.loss_chunks)
    rewritten.append(line)
  if options.attention is not None:
    traced, line = by_blocks(traced, options.attention)
    rewritten.append(line)
  note.done, note.reasons = tuple(rewritten), ()
  return traced, shape


def _treat(
  traced: ClosedJaxpr, leaves: list[jax.Array], options: LayerOptions, used: LayersUsed
) -> list[jax.Array]:
  """The results of a trace whose layers are scanned by the options, and recomputed in units."""
  remat = options.how
  auto = AUTO_LAYERS if options.scan_layers and remat.needs_layers else None
  scan_from = 2 if options.scan_layers is True else auto
  lines: dict[str, None] = {}  # names, in order
  reasons: dict[str, None] = {}
  scans: list[Chain] = []

  def program(jaxpr: Program, inputs: Sequence[jax.Array], where: str = "") -> list[jax.Array]:
    stacks = Stacks(jaxpr, scan_from, remat)
    lines.update((line + where, None) for line in _said(stacks, remat))
    reasons.update((reason, None) for reason in stacks.reasons)
    scans.extend(chain for chain in stacks.chains.values() if chain.scan)
    return stacks(inputs, rule)

  def rule(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
    if where := _enclosing(eqn):
      body = program_of(eqn)
      inner = retraced(lambda *xs: program(body, xs, where), body)
      return bind(eqn, inputs, jaxpr=open_jaxpr(inner) if open_jaxpr(body) is body else inner)
    if eqn.primitive.name == "scan" and calls_layers(program_of(eqn)):
      return scan_of_layers(eqn, inputs, remat)
    return as_called(eqn, inputs)

  found = program(traced, leaves)
  if options.scan_layers is True and not scans:
    layers = "\n".join(map(str, used.found)) or "no adjacent modules have one class and structure"
    raise TrainError(
      "scan_layers=True finds no consecutive equal layers.",
      details="\n".join([*reasons][:_SHOWN]) or layers,
      fix=move_inside(reasons) + 'scan_layers="auto", or False; layers="decoder.blocks.*" names the layers.',
    )
  used.done, used.reasons = (*lines, *used.done), tuple(reasons)
  return found


def _enclosing(eqn: JaxprEqn) -> str:
  """Where an operation has layers that are treated like those of the loss itself; empty: it has none."""
  if is_checkpoint(eqn) and calls_layers(program_of(eqn)):
    return "; inside jax.checkpoint"
  return "; inside a scan" * (eqn.primitive.name == "scan" and repeats_layers(eqn))


def _said(stacks: Stacks, remat: Remat) -> Iterator[str]:
  """Describes how layers are computed, and what stays as written."""
  for chain in stacks.chains.values():
    paths, units, size = stacks.paths(chain), len(chain.units), len(chain.units[0])
    way = f"one scan of {units}" if chain.scan else f"{units} one after the other"
    each = f", {size} layers each" if size > 1 else ""
    yield f"{paths[0]} to {paths[-1]}: {way}{each}" + (f"; remat {remat}" if remat.changes else "")
  if not remat.changes:
    return
  in_chains = {n for chain in stacks.chains.values() for n in chain.calls}
  alone: dict[str, list[str]] = {}
  for n, eqn in enumerate(stacks.eqns):
    kind, names = eqn.primitive.name, [layer_of(e) for e in (eqn, *inner_equations(eqn)) if is_marked(e)]
    if _keeps_checkpoints(eqn, remat):
      yield "parts under nnx.remat or jax.checkpoint: as written"
    if n in in_chains or _enclosing(eqn):
      continue
    if names:
      where = f" of the model's scan of {eqn.params['length']}" if kind == "scan" else f" inside {kind}"
      if any(is_checkpoint(e) and calls_layers(program_of(e)) for e in inner_equations(eqn)):
        where += ", inside jax.checkpoint, which stays as written"
      alone.setdefault("" if is_marked(eqn) else where, []).extend(names)
    elif kind == "scan" and remat.needs_layers:
      length = eqn.params["length"]
      yield f"a scan of {length} without modules: as written; nnx.remat on its body recomputes it"
  for where, names in alone.items():
    paths = [*dict.fromkeys(names)]
    each = " in each layer" if remat.every == 1 and (where or len(paths) > 1) else ""
    offloads = remat.policy != "offload" or "scan" in where
    policy = str(dataclasses.replace(remat, group=1)) if offloads else "full, not offloaded"
    yield f"{paths[0]}{f' to {paths[-1]}' if len(paths) > 1 else ''}: remat {policy}{each}{where}"


def _keeps_checkpoints(eqn: JaxprEqn, remat: Remat) -> bool:
  """Whether an operation is a checkpoint of the model, or a layer with one and another policy around it."""
  if not is_marked(eqn):
    return is_checkpoint(eqn) and not calls_layers(program_of(eqn))
  inside = [e for e in inner_equations(eqn) if is_checkpoint(e)]
  return len(inside) > remat.needs_layers and remat.policy not in ("full", "offload")


def _check_rules(traced: ClosedJaxpr) -> None:
  """Refuses a rule of `jax.custom_vjp` that reads an array of the trace directly, not by an argument."""
  if (eqn := reads_tracers(traced, has_reverse_rule)) is not None:
    raise TrainError(
      "a rule of jax.custom_vjp reads an array that is not among its arguments, so the layers of this loss"
      " can neither be scanned nor rematerialised.",
      details=f"at {place_of(eqn)}",
      fix="give the array to the function as an argument, with None as its gradient; or leave remat= and"
      " scan_layers= out.",
    )


def has_layers(jaxpr: Program) -> bool:
  """Whether a traced loss calls layers, at any depth: their marks hold their policy."""
  return any(map(is_marked, equations(jaxpr)))


def _opens_layers(eqn: JaxprEqn) -> bool:
  """Whether an operation is a call inside which layers are called: `jax.jit` of a part of a loss."""
  return is_call(eqn) and not is_marked(eqn) and calls_layers(program_of(eqn))
