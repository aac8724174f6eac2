"""Low-rank adapters (LoRA, arXiv:2106.09685), merged into the weights that they adapt."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnx_parallel.checkpoint.diff import Patterns
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import no_mesh
from nnx_parallel.core.nodes import Path, path_str, value_of, variables
from nnx_parallel.core.shards import pin
from nnx_parallel.core.text import few
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.errors import CheckpointError

LINEAR = (nnx.Linear, nnx.LinearGeneral)
"""The layers that take adapters; `nnx.MultiHeadAttention` is made of them."""
# PEFT's: uniform within 1 / sqrt(inputs).
_first_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


@check_arguments(CheckpointError, rank=range(1, 2**16))
def add_lora(
  model: nnx.Module,
  targets: str | Iterable[str],
  *,
  rank: int,
  alpha: float | None = None,
  rngs: nnx.Rngs,
  param_dtype: DTypeLike = jnp.float32,
) -> list[str]:
  """Adds low-rank adapters to linear layers of a model, in place; call it in the constructor that you plan.

  A layer adds `alpha / rank` times the output of its adapter to its own output. The adapter has the
  parameters `lora.lora_a`, `(inputs, rank)`, and `lora.lora_b`, `(rank, outputs)`, which is zero at first.
  The paths of the layer's own weights do not change. The parameters of the adapters are `nnx.LoRAParam`s:
  train them with `wrt=nnx.LoRAParam`.

  Args:
    model: a module with `nnx.Linear` or `nnx.LinearGeneral` layers, at any depth.
    targets: patterns of the paths of layers, as for `Checkpointer.restore(only=)`: `"layers.*.self_attn.*"`
      matches all linear layers below `self_attn`.
    rank: the rank of the adapters.
    alpha: the output of an adapter is multiplied by `alpha / rank`; None multiplies by 1.
    rngs: the random numbers for the first factor, which is initialized as in PEFT.
    param_dtype: the dtype of the adapters. They compute in the dtype of the layer's output.

  Returns:
    The paths of the layers that got an adapter.

  Raises:
    CheckpointError: a pattern matches no linear layer, a layer already has an adapter, or the kernel of a
      layer is stacked.

  Source: LoRA, arXiv:2106.09685.

  Example:
    >>> from flax import nnx
    >>> import nnx_parallel as nxp
    >>> def init():
    ...   rngs = nnx.Rngs(0)
    ...   model = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 4, rngs=rngs))
    ...   nxp.interop.add_lora(model, "layers.*", rank=2, rngs=rngs)
    ...   return model
    >>> model = nxp.create_sharded_model(init, nxp.make_mesh(data=8))
    >>> model.layers[0].lora.lora_a.shape, model.layers[0].lora.lora_b.shape
    ((8, 2), (2, 16))
  """
  if not jnp.issubdtype(param_dtype, jnp.floating):
    raise CheckpointError(f"param_dtype={param_dtype!r} is no floating dtype.", fix="param_dtype=jnp.float32")
  patterns = Patterns([targets] if isinstance(targets, str) else targets, ())
  layers = linear_layers(model)
  chosen = {path: layer for path, layer in layers.items() if not patterns.leaves_out(path)}
  if unused := patterns.unused():
    raise CheckpointError(
      f"{few(unused)} matches no linear layer of the {type(model).__name__}.",
      details=f"linear layers: {few([path or 'the model itself' for path in layers]) or 'none'}",
      fix="use patterns of such paths:"
      f" nxp.interop.add_lora(model, {next(filter(None, layers), '*')!r}, rank=8, rngs=rngs).",
    )
  for path, layer in chosen.items():
    _check_layer(path or "the model", layer)
  for path, layer in chosen.items():
    adapt(path, layer, rank, 1.0 if alpha is None else alpha / rank, rngs, param_dtype)
  return [*chosen]


def linear_layers(model: nnx.Module) -> dict[str, Any]:
  """The linear layers of a model by path, the model itself at the empty path."""
  return {path_str(path): layer for path, layer in nnx.iter_modules(model) if isinstance(layer, LINEAR)}


def _check_layer(path: str, layer: Any) -> None:
  """Refuses a layer that has an adapter, or that is stacked."""
  shape, inputs = tuple(layer.kernel.shape), _features(layer.in_features)
  if hasattr(layer, "lora"):
    raise CheckpointError(f"{path} has an adapter already.", fix="use patterns that name each layer once.")
  if shape != (*inputs, *_features(layer.out_features)):
    raise CheckpointError(
      f"{path} is not a single layer: its kernel has the shape {shape}.",
      details=f"inputs {inputs}, outputs {_features(layer.out_features)}",
      fix="call add_lora on the block, inside the function that nnx.vmap maps.",
    )


def adapt(path: str, layer: Any, rank: int, scale: float, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
  """Adds an adapter to one linear layer, in place."""
  _check_layer(path, layer)
  inputs = _features(layer.in_features)
  layer.lora = nnx.LoRA(
    math.prod(inputs),
    rank,
    math.prod(_features(layer.out_features)),
    param_dtype=param_dtype,
    a_initializer=_first_init,
    rngs=rngs,
  )
  layer.lora_scale = scale
  # The layer must stay the same object, because its model may hold it at several paths.
  object.__setattr__(layer, "__class__", _with_lora(type(layer)))


@functools.cache
def _with_lora(kind: type[Any]) -> type[Any]:
  """The class of linear layers of this kind that have an adapter: equal models have equal classes."""

  class WithLoRA(kind):
    def __call__(self, inputs: jax.Array, *args: Any, **options: Any) -> jax.Array:
      return _add_adapter(self, inputs, super().__call__(inputs, *args, **options))

  WithLoRA.__name__ = WithLoRA.__qualname__ = f"{kind.__name__}WithLoRA"
  return WithLoRA


def _add_adapter(layer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
  """The output `y` of a layer on `x`, plus the output of its adapter."""
  axis = getattr(layer, "axis", (-1,))
  x = jnp.moveaxis(x, axis, range(-len(axis), 0))
  x = x.reshape(*x.shape[: x.ndim - len(axis)], -1)
  a, b = (factor.get_value().astype(y.dtype) for factor in (layer.lora.lora_a, layer.lora.lora_b))
  return y + layer.lora_scale * ((x.astype(y.dtype) @ a) @ b).reshape(y.shape)


def _features(given: PyTree) -> tuple[int, ...]:
  return (given,) if isinstance(given, int) else tuple(given)


@check_arguments(CheckpointError)
@no_mesh()
def merge_adapters(base: nnx.Module, adapted: nnx.Module, *, scale: float | None = None) -> list[str]:
  """Adds the adapters of one model to the weights of another, in place and in their layout.

  Args:
    base: a live module without adapters, on the mesh of `adapted`. Its weights are floating-point numbers,
      even if the weights of `adapted` are quantized.
    adapted: a live module with adapters made by `add_lora`, by `nnx.LoRALinear`, or by Qwix. Qwix puts
      `kernel_lora_a`, `(inputs, rank)`, and `kernel_lora_b`, `(rank, outputs)`, next to a `kernel` whose
      first dims are inputs.
    scale: the factor by which the product of the two adapter matrices is multiplied. None uses the scale of
      `add_lora`, and 1 for other adapters; for Qwix, pass `alpha / rank`.

  Returns:
    The paths of the weights that were changed.

  Raises:
    CheckpointError: `adapted` has no adapter, or `base` lacks the weight of an adapter or has it in another
      size.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from nnx_parallel.interop.adapters import merge_adapters
    >>> base = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    >>> adapted = nnx.LoRALinear(4, 2, lora_rank=1, rngs=nnx.Rngs(0))
    >>> adapted.lora.lora_b[...] = jnp.ones((1, 2))
    >>> merge_adapters(base, adapted)
    ['kernel']
    >>> bool(jnp.allclose(base(jnp.ones((1, 4))), adapted(jnp.ones((1, 4))), rtol=1e-5))
    True
  """
  weights, found = variables(base), variables(adapted)
  pairs: dict[Path, tuple[Path, Path]] = {}  # weight -> its two factors
  for path in found:
    *place, name = path
    if str(name).endswith("lora_a"):
      # Those of `nnx.LoRA` are in a module beside the kernel, and those of Qwix beside it under its name.
      weight = (*place[:-1], "kernel") if name == "lora_a" else (*place, str(name).removesuffix("_lora_a"))
      pairs[weight] = path, (*place, str(name).removesuffix("a") + "b")
  if not pairs:
    raise CheckpointError(
      f"{type(adapted).__name__} has no adapter.",
      fix="nxp.interop.merge_adapters(base, adapted): the model with adapters comes second.",
    )
  wrong = [
    path_str(path)
    for path, (a, b) in pairs.items()
    if path not in weights or math.prod(weights[path].shape) != found[a].shape[0] * found[b].shape[-1]
  ]
  if wrong:
    raise CheckpointError(
      f"the base has no {few(wrong)}, or not of the size of its adapter.",
      fix="give the base model of the adapters, made without adapters.",
    )
  layers: dict[Any, nnx.Module] = dict(nnx.iter_modules(adapted))
  for path, (a, b) in pairs.items():
    leaf, own = weights[path], getattr(layers.get(path[:-1]), "lora_scale", 1.0)
    times = float(own if scale is None else scale)
    leaf.set_value(_merge(value_of(leaf), value_of(found[a]), value_of(found[b]), times))
  return [path_str(path) for path in pairs]


def _merge(weight: AnyArray, a: AnyArray, b: AnyArray, scale: float) -> AnyArray:
  where = weight.sharding if isinstance(weight.sharding, jax.NamedSharding) else None
  whole = None if where is None else jax.NamedSharding(where.mesh, jax.P())

  def add(weight: AnyArray, a: AnyArray, b: AnyArray) -> AnyArray:
    a, b = (pin(x, whole).astype(jnp.float32) for x in (a, b))
    delta = pin((scale * (a @ b)).reshape(weight.shape), where)
    return pin((weight.astype(jnp.float32) + delta).astype(weight.dtype), where)

  # Not donated: a base may share its arrays with the model that was trained.
  return jax.jit(add)(weight, a, b)
