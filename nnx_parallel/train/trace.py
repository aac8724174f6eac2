"""A loss as a function of flat arrays, and the facts of its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.axes import axes_in
from nnx_parallel.core.interpret import find_forwarded
from nnx_parallel.core.jaxprs import as_function, equations, has_rule, inner_equations, reads_tracers, struct
from nnx_parallel.core.nodes import Path, path_str, variables
from nnx_parallel.core.types import AnyArray, ClosedJaxpr, JaxprEqn, Model, Program, PyTree, TreeDef
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.gather import Gather, gather_reads
from nnx_parallel.layers.layers import LayersUsed, with_options, with_stages
from nnx_parallel.layout.constrain import axes_of_maps, mapped_axes
from nnx_parallel.train.binding import Template
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.losses import Terms, mean
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.watch import check_plain_attributes, plain_attributes

Arrays = dict[int, Any]
"""Arrays by their leaf in the template of the models."""
SCALE = -1
"""The place of the loss scale among the arrays that are not trained."""
Objective = Callable[[Arrays, Arrays, Any], tuple[Any, tuple[Terms, Arrays, Any]]]
"""`(trained, rest, part of the batch) -> (value to differentiate, (terms, assigned arrays, weight))`.

Some assigned arrays may be unchanged. Gradients are multiplied by the weight, unless it is None, before they
are added to the gradients of other parts of the batch.
"""


@dataclasses.dataclass(frozen=True)
class Written:
  """The trace of a loss for a part of a batch, as its author wrote it."""

  trace: ClosedJaxpr  # its closed jaxpr
  results: TreeDef  # the structure of its results
  kinds: PyTree  # how each result should follow from those of parts, for `linearity.factors`
  changed: set[int]  # the leaves whose arrays it changes

  @functools.cached_property
  def can_run(self) -> bool:
    """Whether it computes the loss; else a rule of a gradient reads arrays of the trace that has ended."""
    return reads_tracers(self.trace, has_rule) is None


class Differentiable(NamedTuple):
  """The loss of traced models as a function of the trained arrays."""

  objective: Objective  # the function to differentiate
  train: Arrays  # the trained arrays
  rest: Arrays  # the other arrays, and the loss scale if there is one
  template: Template  # the structure of the models
  # `(part of the batch) -> ` its trace without the options of layers and without the loss scale. Further
  # calls of the objective for such a part do not trace the loss again.
  write: Callable[[PyTree], Written]
  inspect: Callable[[PyTree], ClosedJaxpr]  # `(part of the batch) -> ` its trace with the options of layers
  layers: LayersUsed  # how the layers of the loss were computed in its last trace
  parts: int = 1  # the number of microbatches that one call of the loss takes: more than one in a pipeline

  @property
  def paths(self) -> dict[int, Path]:
    """The path of each trained array inside the models."""
    return {i: self.template.paths[i] for i in self.train}


@dataclasses.dataclass(frozen=True)
class _Pure:
  """An `Objective`: a loss function of modules as a function of their flat arrays, with its layers marked."""

  options: StepOptions  # the options of the step
  loss_fn: LossFn  # the loss function
  template: Template  # the structure of the modules
  used: LayersUsed  # receives how layers are computed
  # the traces so far, by the types of the arguments
  known: dict[Hashable, Written] = dataclasses.field(default_factory=dict[Hashable, Written])

  def __call__(self, train: Arrays, rest: Arrays, part: PyTree) -> PyTree:
    found = self.known.get(_types_of(train, rest, part))
    if found is None or not found.can_run:
      return self._run(train, rest, part)
    return jax.tree.unflatten(found.results, as_function(found.trace)(*jax.tree.leaves((train, rest, part))))

  def _run(self, train: Arrays, rest: Arrays, part: PyTree) -> PyTree:
    given = {**rest, **train}
    inner = self.template.build([given[i] for i in range(len(given))])
    before = plain_attributes(inner)
    with self.options.layers.marking(inner, self.used):
      found = self.options.terms(call_loss(self.loss_fn, inner, part), part)
    after = self.template.arrays(inner)
    check_plain_attributes(before, inner)
    changed = {i: x for i, x in enumerate(after) if x is not given[i]}
    loss = found.sums["loss"]
    value = mean(loss, found.counts["loss"]) if self.options.in_one_piece else loss
    return value, (found, changed, None)

  def write(self, train: Arrays, rest: Arrays, part: PyTree) -> Written:
    """As `Differentiable.write`."""
    pipeline = self.options.layers.pipeline
    with contextlib.nullcontext() if pipeline is None else mapped_axes((pipeline.axis,)):
      types = _types_of(train, rest, part)
      found = self.known.get(types)
      if found is None:
        # Arrays of the program outside would be moved to the mesh of a `shard_map` one by one.
        args = jax.tree.map(_type_of, (train, rest, part))
        trace, shape = jax.make_jaxpr(self._run, return_shape=True)(*args)
        _, (terms, after, _) = shape
        # `nnx.remat` and `nnx.scan` return every Variable that they get, so that all seem to have changed.
        inputs = [i for arrays in (train, rest) for i in arrays for _ in jax.tree.leaves(arrays[i])]
        results = jax.tree.structure(shape)
        sources = jax.tree.unflatten(results, find_forwarded(trace))[1][1]
        changed = {i for i, n in sources.items() if n is None or inputs[n : n + 1] != [i]}
        found = self.known[types] = Written(trace, results, _kinds(terms, after), changed)
    trained = sorted(found.changed.intersection(train))
    if trained and not self.options.in_one_piece:
      raise TrainError(
        f"the loss function assigned to {path_str(self.template.paths[trained[-1]])}, which the optimizer"
        f" trains: the gradients of {self.options.microbatches} microbatches would belong to different"
        " models.",
        fix="microbatches=1 without reduction=; or leave it out of the optimizer's wrt.",
      )
    return found


def _types_of(*args: PyTree) -> Hashable:
  """What the trace of a loss depends on: the types of its arguments, and the axes that are not Auto there."""
  leaves, structure = jax.tree.flatten(args)
  return structure, tuple(map(_type_of, leaves)), axes_of_maps(), jax.sharding.get_abstract_mesh()


def _type_of(x: AnyArray) -> jax.ShapeDtypeStruct:
  return x if isinstance(x, jax.ShapeDtypeStruct) else struct(jax.typeof(x))


def differentiable(
  options: StepOptions,
  loss_fn: LossFn,
  models: Model,
  wrt: Mapping[Hashable, nnx.filterlib.Filter],
  scale: jax.Array | None = None,
  gather: Gather | None = None,
) -> Differentiable:
  """The loss of traced models as a function of the trained arrays, times `scale` unless that is None."""
  # `wrt` is the filter of the trained Variables by the key of their model; the key is None for a single
  # model. The loss gathers arrays as `gather` says.
  template = Template(models)
  trained = {i for key, chosen in wrt.items() for i in trained_by(template, models, key, chosen).values()}
  _check_trained(template, trained, wrt)
  arrays = dict(enumerate(template.arrays(models)))
  train = {i: x for i, x in arrays.items() if i in trained}
  rest = {i: x for i, x in arrays.items() if i not in trained}
  pure = _Pure(options, loss_fn, template, LayersUsed())
  paths = functools.partial(_paths, template.paths)
  pipeline = options.layers.pipeline
  if pipeline is None:
    ungathered = with_options(pure, options.layers, pure.used)
    chosen = gather_reads(gather, ungathered, paths=paths)
  else:  # a stage gathers the weights of a layer when it computes the layer
    by_layer = gather_reads(gather, pure, paths=paths)
    if pipeline.order is None and scale is not None and pipeline.recompute:  # 1F1B has no loss scale
      gpipe = dataclasses.replace(options.layers, pipeline=dataclasses.replace(pipeline, order="gpipe"))
      options = dataclasses.replace(options, layers=gpipe)
    elif pipeline.order != "gpipe" and scale is not None:
      raise TrainError(
        "a pipeline in the order 1F1B computes gradients before the loss scale multiplies the loss, so"
        " they would underflow.",
        fix='nxp.Pipeline("stage", order="gpipe"); or bfloat16, which needs no loss scale.',
      )
    ungathered = chosen = _pipeline(by_layer, options, pure.used)
  return Differentiable(
    objective=chosen if scale is None else _scale(chosen),
    train=train,
    rest=rest if scale is None else {**rest, SCALE: scale},
    template=template,
    write=functools.partial(pure.write, train, rest),
    inspect=lambda part: jax.make_jaxpr(ungathered)(train, rest, part),
    layers=pure.used,
    parts=options.microbatches // options.turns,
  )


def _paths(paths: Sequence[Path], train: Arrays, rest: Arrays, part: PyTree) -> list[Path | None]:
  """The path of each array of the arguments of an objective."""
  named = [
    None if i == SCALE else paths[i] for some in (train, rest) for i in some for _ in jax.tree.leaves(some[i])
  ]
  return [*named, *(None for _ in jax.tree.leaves(part))]


def _kinds(found: Terms, changed: Mapping[int, PyTree]) -> PyTree:
  """How each result of an objective should follow from the results of parts: for `linearity.factors`."""
  wanted = {name: "mean" if count is None else "sum" for name, count in found.counts.items()}
  means = Terms(
    {name: wanted[name] for name in found.sums},
    {name: None if count is None else "sum" for name, count in found.counts.items()},
    jax.tree.map(lambda _: "rows", found.outputs),
  )
  return wanted["loss"], (means, jax.tree.map(lambda _: "same", dict(changed)), None)


def _pipeline(objective: Objective, options: StepOptions, used: LayersUsed) -> Objective:
  """The objective of the full batch, with its layers as a pipeline."""

  def pipelined(train: Arrays, rest: Arrays, batch: PyTree) -> PyTree:
    places = {i: n for n, i in enumerate([*train, *rest])}

    def ends(results: PyTree) -> tuple[dict[int, int], set[int]]:
      _, (found, changed, _) = results
      return {out: places[i] for i, out in changed.items()}, {*found.outputs.values()}

    def of_model(model: Model, part: PyTree) -> PyTree:
      own, other = model
      return objective(own, other, part)

    return with_stages(of_model, options.layers, options.microbatches, ends, used)((train, rest), batch)

  return pipelined


def _scale(objective: Objective) -> Objective:
  """The objective times a scale, one of its arguments: a manual program closes over nothing."""

  def scaled(train: Arrays, rest: Arrays, part: PyTree) -> PyTree:
    scale = rest[SCALE]
    loss, (found, changed, _) = objective(train, {i: x for i, x in rest.items() if i != SCALE}, part)
    count = found.counts["loss"]
    if count is not None:
      loss = mean(found.sums["loss"], count)  # a scaled sum over many examples would overflow
    return loss * scale.astype(loss.dtype), (found, changed, count)

  return scaled


def trained_by(
  template: Template, models: Model, key: Hashable, wrt: nnx.filterlib.Filter
) -> dict[Path, int]:
  """The Variables that an optimizer trains: path in its model -> leaf of the template of all models."""
  # `key` is of its model; None for a single model. Models may share Variables, which the template has only
  # once.
  leaves = {id(leaf): i for i, leaf in enumerate(template.leaves)}
  chosen = nnx.filterlib.to_predicate(wrt)
  own = variables(models if key is None else models[key])
  return {path: leaves[id(leaf)] for path, leaf in own.items() if chosen(cast(Any, path), leaf)}


def _check_trained(
  template: Template, trained: Collection[int], wrt: Mapping[Hashable, nnx.filterlib.Filter]
) -> None:
  if not trained:
    raise TrainError(
      f"the optimizer's wrt={', '.join(map(str, wrt.values()))} matches no Variable of the model.",
      details=f"Variable types: {', '.join(sorted({type(leaf).__name__ for leaf in template.leaves}))}",
      fix="nnx.Optimizer(model, tx, wrt=nnx.Param)",
    )
  for i in sorted(trained):
    dtype = template.leaves[i].get_raw_value().dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
      raise TrainError(
        f"{path_str(template.paths[i])} is {dtype}, which has no gradient.",
        fix="give it a Variable type that the optimizer does not train.",
      )


def _maps_over(eqn: JaxprEqn, axes: set[str]) -> bool:
  """Whether `jax.vmap` over mesh axes gives each replica a separate `shard_map`; see `manual_too`."""
  specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
  used = {axis for spec in specs for axis in axes_in(spec)}
  for inner in inner_equations(eqn):
    names = inner.params.get("axis_name", inner.params.get("axes", ()))
    used.update(names if isinstance(names, (tuple, list)) else (names,))
  return axes <= eqn.params["newly_manual_axes"] and not axes & used


def why_not_by_replica(jaxpr: Program, axes: Sequence[str]) -> str:
  """Why replicas along mesh axes cannot each compute a loss on their part of the batch; empty if they can."""
  # The jaxpr is the program of one replica's part, with `constrain` ignoring the axes.
  for eqn in equations(jaxpr):
    if eqn.primitive.name == "shard_map" and not _maps_over(eqn, {*axes}):
      return "the loss has its own shard_map"
    if eqn.primitive.name == "sharding_constraint":
      spec = getattr(eqn.params["sharding"], "spec", ())
      if {*axes_in(spec)} & {*axes}:
        return f"the model constrains arrays to {', '.join(axes)}"
  return ""
