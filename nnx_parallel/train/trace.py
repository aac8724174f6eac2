"""A loss as a function of flat arrays, and the facts of its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.core.axes import axes_in
from nnx_parallel.core.interpret import forwarded
from nnx_parallel.core.jaxprs import equations, inner_equations
from nnx_parallel.core.nodes import Path, path_str, variables
from nnx_parallel.core.types import ClosedJaxpr, JaxprEqn, Model, Program, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.layers import LayersUsed, with_options, with_stages
from nnx_parallel.layout.constrain import axes_of_positions
from nnx_parallel.layout.gather import Gather, gathered
from nnx_parallel.train.binding import Template
from nnx_parallel.train.loss_call import call_loss
from nnx_parallel.train.losses import Terms, mean
from nnx_parallel.train.options import LossFn, StepOptions
from nnx_parallel.train.watch import check_plain_attributes, plain_attributes

Objective = Callable[[list[Any], list[Any], Any], tuple[Any, tuple[Terms, dict[int, Any], Any]]]
"""`(trained, rest, batch) -> (value to differentiate, (terms, assigned arrays by position, weight))`.

Positions count the rest first, then the trained arrays. Some assigned arrays may be unchanged. Gradients are
multiplied by the weight, unless it is None, before they are added to the gradients of other parts of the
batch.
"""


class Inspected(NamedTuple):
  """The trace of a loss for a part of a batch.

  Attributes:
    trace: its closed jaxpr.
    changed: the positions of the arrays that it changes.
    kinds: what `Differentiable.written` says, if that has the same trace; else None.
  """

  trace: ClosedJaxpr
  changed: set[int]
  kinds: PyTree


class Differentiable(NamedTuple):
  """The loss of traced models as a function of the trained arrays.

  Attributes:
    objective: the function to differentiate; not its trace, since a rule of `jax.custom_vjp` may close over
      an array of the trace in which it was made.
    train: the trained arrays.
    others: the other arrays, and the loss scale if there is one.
    paths: the path of each trained array inside the models.
    template: the structure of the models.
    order: the leaf of the template for each array of `others`, then for each array of `train`.
    inspect: `(part of the batch) -> ` its trace.
    written: `(part of the batch) -> (jaxpr of the loss without options of layers and without the loss scale,
      how each of its results should follow from those of parts)`, for `linearity.factors`.
    layers: how the layers of the loss were computed in its last trace.
    parts: the number of microbatches that one call of the loss takes: more than one in a pipeline.
  """

  objective: Objective
  train: list[jax.Array]
  others: list[jax.Array]
  paths: list[Path]
  template: Template
  order: list[int]
  inspect: Callable[[PyTree], Inspected]
  written: Callable[[PyTree], tuple[ClosedJaxpr, PyTree]]
  layers: LayersUsed
  parts: int = 1

  @property
  def trained(self) -> list[int]:
    """The leaf of the template for each trained array."""
    return self.order[len(self.order) - len(self.train) :]


@dataclasses.dataclass(frozen=True)
class _Pure:
  """A loss function of modules as a function of their flat arrays.

  Attributes:
    options: the options of the step.
    loss_fn: the loss function.
    template: the structure of the modules.
    order: as in `Differentiable`.
    rest: the number of arrays that are not trained.
    used: receives how layers are computed.
  """

  options: StepOptions
  loss_fn: LossFn
  template: Template
  order: list[int]
  rest: int
  used: LayersUsed

  def __call__(
    self, train: list[Any], others: list[Any], part: PyTree, *, as_written: bool = False
  ) -> PyTree:
    """An `Objective`; without the options of layers if `as_written`."""
    given = dict(zip(self.order, [*others, *train], strict=True))
    inner = self.template.build([given[i] for i in range(len(self.order))])
    before = plain_attributes(inner)
    with contextlib.nullcontext() if as_written else self.options.layers.marking(inner, self.used):
      found = self.options.terms(call_loss(self.loss_fn, inner, part), part)
    after = self.template.arrays(inner)
    check_plain_attributes(before, inner)
    changed = {n: after[i] for n, i in enumerate(self.order) if after[i] is not given[i]}
    loss = found.sums["loss"]
    value = mean(loss, found.counts["loss"]) if self.options.in_one_piece else loss
    return value, (found, changed, None)

  def written(self, train: list[Any], others: list[Any], part: PyTree) -> tuple[ClosedJaxpr, PyTree]:
    """As `Differentiable.written`."""
    run = functools.partial(self, as_written=True)
    traced, (_, (found, changed, _)) = jax.make_jaxpr(run, return_shape=True)(train, others, part)
    return traced, _kinds(found, changed)

  def inspect(self, run: Objective, train: list[Any], others: list[Any], part: PyTree) -> Inspected:
    """The trace of this loss with its options."""
    traced, shape = jax.make_jaxpr(run, return_shape=True)(train, others, part)
    # `nnx.remat` and `nnx.scan` return every Variable that they get, so that all seem to have changed.
    positions = [*enumerate(train, len(others)), *enumerate(others)]
    inputs = [position for position, x in positions for _ in jax.tree.leaves(x)]
    sources = jax.tree.unflatten(jax.tree.structure(shape), forwarded(traced))[1][1]
    changed = {n for n, i in sources.items() if i is None or inputs[i : i + 1] != [n]}
    if not self.options.in_one_piece and max(changed, default=-1) >= self.rest:
      name = path_str(self.template.paths[self.order[max(changed)]])
      raise TrainError(
        f"the loss function assigned to {name}, which the optimizer trains: the gradients of"
        f" {self.options.microbatches} microbatches would belong to different models.",
        fix="microbatches=1 without reduction=; or leave it out of the optimizer's wrt.",
      )
    layers = self.options.layers
    plain = run is self and not layers.marks and layers.pattern is None and not axes_of_positions()
    _, (found, values, _) = shape
    return Inspected(traced, changed, _kinds(found, values) if plain else None)


def differentiable(
  options: StepOptions,
  loss_fn: LossFn,
  models: Model,
  wrt: Mapping[Hashable, nnx.filterlib.Filter],
  scale: jax.Array | None = None,
  gather: Gather | None = None,
) -> Differentiable:
  """The loss of traced models as a function of the trained arrays, times `scale` unless that is None.

  `wrt` is the filter of the trained Variables by the key of their model; the key is None for a single model.
  The loss gathers arrays as `gather` says.
  """
  template = Template(models)
  arrays = template.arrays(models)
  trained = sorted(
    {i for key, chosen in wrt.items() for i in trained_by(template, models, key, chosen).values()}
  )
  _check_trained(template, trained, wrt)
  rest = sorted({*range(len(arrays))} - {*trained})
  order, used = [*rest, *trained], LayersUsed()
  train, others = [arrays[i] for i in trained], [arrays[i] for i in rest]
  pure = _Pure(options, loss_fn, template, order, len(rest), used)
  paths = functools.partial(_paths, [template.paths[i] for i in order], len(rest))
  ungathered, pipeline = with_options(pure, options.layers, used), options.layers.pipeline
  chosen = gathered(gather, ungathered, paths=paths)
  if pipeline is not None:  # a stage gathers the weights of a layer when it computes the layer
    by_layer = gathered(gather, pure, paths=paths)
    if pipeline.order is None and scale is not None and pipeline.recompute:  # 1F1B has no loss scale
      gpipe = dataclasses.replace(options.layers, pipeline=dataclasses.replace(pipeline, order="gpipe"))
      options = dataclasses.replace(options, layers=gpipe)
    elif pipeline.order != "gpipe":
      _check_unscaled(scale)
    ungathered = chosen = _pipelined(by_layer, options, len(train), len(others), used)
  return Differentiable(
    objective=chosen if scale is None else _scaled(chosen),
    train=train,
    others=others if scale is None else [*others, scale],
    paths=[template.paths[i] for i in trained],
    template=template,
    order=order,
    inspect=functools.partial(pure.inspect, ungathered, train, others),
    written=functools.partial(pure.written, train, others),
    layers=used,
    parts=options.microbatches // options.turns,
  )


def _paths(
  paths: Sequence[Path], rest: int, train: list[Any], others: list[Any], part: PyTree
) -> list[Path | None]:
  """The path of each array of the arguments of an objective; `paths`: of the others, then of the trained."""
  named = [*zip(paths[rest:], train, strict=True), *zip(paths[:rest], others, strict=False)]
  found: list[Path | None] = [path for path, x in named for _ in jax.tree.leaves(x)]
  further = others[rest:], part  # the loss scale
  return [*found, *(None for _ in jax.tree.leaves(further))]


def _kinds(found: Terms, changed: Mapping[int, PyTree]) -> PyTree:
  """How each result of an objective should follow from the results of parts: for `linearity.factors`."""
  wanted = {name: "mean" if count is None else "sum" for name, count in found.counts.items()}
  means = Terms(
    {name: wanted[name] for name in found.sums},
    {name: None if count is None else "sum" for name, count in found.counts.items()},
    jax.tree.map(lambda _: "rows", found.outputs),
  )
  return wanted["loss"], (means, jax.tree.map(lambda _: "same", dict(changed)), None)


def _pipelined(
  objective: Objective, options: StepOptions, trained: int, others: int, used: LayersUsed
) -> Objective:
  """The objective of the full batch, with its layers as a pipeline."""

  def ends(places: PyTree) -> tuple[dict[int, int], set[int]]:
    _, (found, changed, _) = places
    # Positions count the other arrays first, inputs the trained arrays.
    states = {out: n + trained if n < others else n - others for n, out in changed.items()}
    return states, {*found.outputs.values()}

  def of_model(model: Model, part: PyTree) -> PyTree:
    train, others = model
    return objective(train, others, part)

  staged = with_stages(of_model, options.layers, options.microbatches, ends, used)
  return lambda train, others, batch: staged((train, others), batch)


def _check_unscaled(scale: jax.Array | None) -> None:
  if scale is not None:
    raise TrainError(
      "a pipeline in the order 1F1B computes gradients before the loss scale multiplies the loss, so"
      " they would underflow.",
      fix='nxp.Pipeline("stage", order="gpipe"); or bfloat16, which needs no loss scale.',
    )


def _scaled(objective: Objective) -> Objective:
  """The objective times a scale, its last other array: a manual program closes over nothing."""

  def scaled(train: list[jax.Array], others: list[jax.Array], part: PyTree) -> PyTree:
    *rest, scale = others
    loss, (found, changed, _) = objective(train, rest, part)
    count = found.counts["loss"]
    if count is not None:
      loss = mean(found.sums["loss"], count)  # a scaled sum over many examples would overflow
    return loss * scale.astype(loss.dtype), (found, changed, count)

  return scaled


def trained_by(
  template: Template, models: Model, key: Hashable, wrt: nnx.filterlib.Filter
) -> dict[Path, int]:
  """The Variables that an optimizer trains: path in its model -> leaf of the template of all models.

  `key` is of its model; None for a single model. Models may share Variables, which the template has only
  once.
  """
  leaves = {id(leaf): i for i, leaf in enumerate(template.leaves)}
  chosen = nnx.filterlib.to_predicate(wrt)
  own = variables(models if key is None else models[key])
  return {path: leaves[id(leaf)] for path, leaf in own.items() if chosen(cast(Any, path), leaf)}


def _check_trained(
  template: Template, trained: list[int], wrt: Mapping[Hashable, nnx.filterlib.Filter]
) -> None:
  if not trained:
    raise TrainError(
      f"the optimizer's wrt={', '.join(map(str, wrt.values()))} matches no Variable of the model.",
      details=f"Variable types: {', '.join(sorted({type(leaf).__name__ for leaf in template.leaves}))}",
      fix="nnx.Optimizer(model, tx, wrt=nnx.Param)",
    )
  for i in trained:
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
  """Why replicas along mesh axes cannot each compute a loss on their part of the batch; empty if they can.

  The jaxpr is the program of one replica's part, with `constrain` ignoring the axes.
  """
  for eqn in equations(jaxpr):
    if eqn.primitive.name == "shard_map" and not _maps_over(eqn, {*axes}):
      return "the loss has its own shard_map"
    if eqn.primitive.name == "sharding_constraint":
      spec = getattr(eqn.params["sharding"], "spec", ())
      if {*axes_in(spec)} & {*axes}:
        return f"the model constrains arrays to {', '.join(axes)}"
  return ""
