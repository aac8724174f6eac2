"""Pipeline parallelism of equal layers with stacked parameters; the schedule is in `layers/pipeline.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from nnx_parallel.core.axes import entry_of
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.jaxprs import as_function, constants
from nnx_parallel.core.shards import split_batch
from nnx_parallel.core.text import few
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, with_stages
from nnx_parallel.layers.pipeline import Order, Pipeline, size_along, staged, unstaged
from nnx_parallel.layout.constrain import active_mesh, mapped_axes


@check_arguments(SchemeError, microbatches=1, virtual_stages=1)
def pipeline(
  layer: Callable[..., PyTree],
  parameters: PyTree,
  x: PyTree,
  *shared: PyTree,
  microbatches: int,
  axis: str = "stage",
  virtual_stages: int = 1,
  batch_axes: str | Sequence[str] = (),
  before: Callable[[PyTree], PyTree] | None = None,
  after: Callable[[PyTree, PyTree], jax.Array] | None = None,
  order: Order | None = None,
  recompute: bool = True,
) -> PyTree:
  """Applies equal layers one after another, each on the devices of its stage.

  The result equals the result of `for p in layers: x = layer(p, x, *shared)`. The layers are divided into
  chunks, one for each stage. While a stage computes one microbatch, the next stage computes the microbatch
  before it. Each device computes in `microbatches * virtual_stages` of the
  `microbatches * virtual_stages + stages - 1` ticks; the other ticks are the bubble (see `Schedule`). In each
  tick, a stage sends the activations of one microbatch to the next stage, and also a second array of this
  size, which brings in new inputs and takes out results. It sends nothing else over the axis.

  The mesh is the active mesh, which `train_step`, `plan.scope()` or `jax.set_mesh` sets; outside of jit, it
  is the mesh of the arrays. Without a mesh, one device computes all layers. Layers may shard their parameters
  and activations over the other axes of the mesh.

  Args:
    layer: a pure function `layer(parameters, x, *shared) -> x` that computes one layer for one microbatch.
    parameters: a pytree of arrays of global shape `[layers, ...]`. Shard dim 0 over `axis`, so that each
      stage holds only its own layers. With `virtual_stages`, chunk `c` is first moved to stage `c % stages`.
    x: a pytree of arrays of global shape `[batch, ...]`. Microbatch `n` has the examples `n`,
      `n + microbatches`, `n + 2 * microbatches` and so on.
    *shared: pytrees of arrays `[batch, ...]` that each layer reads for its examples: masks, segment ids, the
      result of an encoder. They travel with `x`.
    microbatches: the number of microbatches. It must be a multiple of the number of stages, and it must
      divide the batch.
    axis: the mesh axis of the stages.
    virtual_stages: the number of chunks of each stage, as in `nxp.Pipeline`.
    batch_axes: mesh axes that shard the batch but no parameter. The devices along these axes then sum the
      gradients of the parameters once, after the last tick, instead of in each tick. An error with `after`.
    before: with `after`: computes the input of the first layer from `x` of a microbatch: an embedding, for
      example. It may read other arrays, which get gradients. None: `x` is the input.
    after: `(result of the last layer, x) -> loss` of a microbatch, in which the head and the loss are. It may
      read other arrays, which get gradients. With it, the pipeline can be 1F1B, and `x` gets no gradient.
    order: with `after`: the order of forward and backward passes, as in `nxp.Pipeline`, which also says how
      many activations a stage saves (`saved_inputs`) before anything runs.
    recompute: with `after`: as in `nxp.Pipeline`.

  Returns:
    A pytree like `x`; with `after`, the mean of the losses of the microbatches. The function is
    differentiable with `jax.grad`.

  Raises:
    SchemeError: the mesh does not have the axis, or `microbatches` is not a multiple of the stages or does
      not divide the batch; or an argument needs `after`.

  Source: GPipe, arXiv:1811.06965; circular (interleaved) schedule, arXiv:2104.04473.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> weights, x = jax.random.normal(jax.random.key(0), (6, 8, 8)), jnp.ones((16, 8))
    >>> layer = lambda w, x: jnp.tanh(x @ w)
    >>> with jax.set_mesh(nxp.make_mesh(data=2, stage=4)):
    ...   y = jax.jit(lambda w, x: nxp.parallel.pipeline(layer, w, x, microbatches=8))(weights, x)
    >>> wanted = jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0]
    >>> bool(jnp.allclose(y, wanted, atol=1e-6))
    True
  """
  check_arrays(SchemeError, "parameters", parameters)
  axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
  if after is not None and axes:
    raise SchemeError(
      f"batch_axes={batch_axes!r} has no effect on a pipeline that computes a loss.", fix="leave it out."
    )
  if after is None and (before is not None or order is not None or not recompute):
    raise SchemeError(
      "before=, order= and recompute= are of a pipeline that computes a loss.",
      fix="after=lambda y, x: ..., which computes the loss of a microbatch.",
    )
  _check_layers(parameters)
  mesh = active_mesh(*jax.tree.leaves((parameters, x))).mesh
  replicas = math.prod(size_along(mesh, name) for name in axes)
  _check_batch((x, *shared), microbatches, replicas)

  def written(parameters: PyTree, batch: PyTree) -> PyTree:
    x, shared = batch
    first = x if before is None else before(x)
    y, _ = jax.lax.scan(lambda y, row: (layer(row, y, *shared), None), first, parameters)
    return y if after is None else after(y, x)

  options = Pipeline(axis, virtual_stages, "gpipe" if after is None else order, recompute)
  if after is not None:
    batch = jax.tree.map(_without_gradient, (x, shared))
    return _run(written, options, microbatches, False, parameters, batch) / microbatches
  run = functools.partial(_run, written, options, microbatches, True)
  if replicas == 1:
    return run(parameters, (x, shared))

  def place(x: jax.Array) -> jax.Array:
    return staged(x, mesh, entry_of(axes))

  # Each replica has its own copy, and so its own gradients; they are summed where the copies are made.
  own = jax.tree.map(lambda p: place(jnp.broadcast_to(p, (replicas, *p.shape))), parameters)
  parts = jax.tree.map(lambda x: place(jnp.reshape(x, (replicas, -1, *x.shape[1:]))), (x, shared))
  explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
  with mapped_axes((*axes, axis)):
    y = jax.vmap(run, spmd_axis_name=None if explicit else axes)(own, parts)
  return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), y)


def _run(
  written: Callable[..., PyTree],
  pipeline: Pipeline,
  microbatches: int,
  is_by_row: bool,
  parameters: PyTree,
  batch: PyTree,
) -> PyTree:
  """The program of one microbatch, made a pipeline as that of a step is: rows of the batch, or a sum."""
  part = jax.tree.map(lambda x: split_batch(x, microbatches)[0], batch)
  with mapped_axes((pipeline.axis,)):
    traced, shape = jax.make_jaxpr(written, return_shape=True)(unstaged(parameters, pipeline.axis), part)
  # Arrays that the functions read are inputs of the program: they get gradients.
  read = constants(traced)

  def program(model: PyTree, batch: PyTree) -> Sequence[jax.Array]:
    return as_function(traced.replace(consts=model[0]))(*jax.tree.leaves((model[1], batch)))

  run = with_stages(
    program,
    LayerOptions(pipeline=pipeline),
    microbatches,
    lambda positions: ({}, positions if is_by_row else ()),
    LayersUsed(),
  )
  found = run(([*read], parameters), batch)
  return jax.tree.unflatten(jax.tree.structure(shape), found)


@jax.custom_jvp
def _without_gradient(x: jax.Array) -> jax.Array:
  return x


@_without_gradient.defjvp
def _(primals: PyTree, tangents: PyTree) -> PyTree:
  raise SchemeError(
    "the batch of a pipeline that computes a loss has no gradient.",
    details=f"an array of shape {jnp.shape(primals[0])} is differentiated",
    fix="compute it in before= from other arrays; or leave after= out, and compute the loss outside.",
  )


def _check_layers(parameters: PyTree) -> None:
  shapes = {
    jax.tree_util.keystr(path): jnp.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(parameters)
  }
  counts = {shape[:1] for shape in shapes.values()}
  if len(counts) != 1 or () in counts:
    raise SchemeError(
      "the parameters of a pipeline are stacked: dim 0 of each is the layer.",
      details=few([f"{name} {shape}" for name, shape in shapes.items()]) or "there are none",
      fix="jax.tree.map(lambda *xs: jnp.stack(xs), *parameters_of_each_layer)",
    )


def _check_batch(tree: PyTree, microbatches: int, replicas: int) -> None:
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    count = microbatches * replicas
    if not jnp.ndim(x) or x.shape[0] % count:
      raise SchemeError(
        f"array {jax.tree_util.keystr(path)} of shape {jnp.shape(x)} is not {count} equal parts of a batch.",
        details=f"{microbatches} microbatches on each of {replicas} replicas",
        fix="a batch that is a multiple of it; arrays without a batch dim belong to `parameters` or `layer`.",
      )
