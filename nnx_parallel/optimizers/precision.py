"""Which dtype each part of a module has, applied to a constructor without editing the module."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from nnx_parallel.core.checked import check_arguments, warn
from nnx_parallel.core.nodes import path_str, value_of
from nnx_parallel.core.types import Model
from nnx_parallel.errors import TrainError
from nnx_parallel.optimizers.loss_scale import with_loss_scale
from nnx_parallel.optimizers.wrappers import with_masters

NORMS = (
  nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.SpectralNorm,
  nnx.WeightNorm,
)  # fmt: skip
"""Layers that `Precision.norms` is for, with their subclasses."""


@check_arguments(TrainError)
@dataclasses.dataclass(frozen=True)
class Precision:
  """The dtypes of a model, as one printable object.

  Gradients have the dtype of their parameters. `train_step(microbatches=n)` adds them up in float32. The
  optimizer decides the dtypes of its moments: `optax.adam(1e-3, mu_dtype=jnp.bfloat16)`.

  Attributes:
    parameters: the dtype of every floating-point `nnx.Param` except the parameters of norms.
    compute: the dtype in which layers compute: every module with the attributes `dtype` and `param_dtype`, as
      the layers of Flax have.
    norms: the dtype of the parameters and of the arithmetic of normalization layers.
    softmax: the lowest precision in which `nnx.MultiHeadAttention` computes softmax. Without dropout, Flax
      always computes it in float32. With dropout, the matrix products of attention also have this dtype.
    output: the compute dtype of the layers named by `output_layers`.
    output_layers: glob patterns of the paths of modules that compute logits, such as `"head"` or
      `"*.logits"`.
    masters: whether `optimizer` keeps float32 copies of the parameters.
    reduction: the dtype in which replicas sum gradients; pass it on with
      `train_step(loss_fn, reduction=policy.reduction)`. With None, XLA uses the compute dtype of each layer.
    loss_scale: whether `optimizer` adds a loss scale; see `with_loss_scale`. Float16 needs it; bfloat16 does
      not, because it has the range of float32.

  Raises:
    TrainError: a dtype is not a floating-point dtype, or `masters` is set for float32 parameters.

  Example:
    >>> import optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> policy = nxp.Precision.bfloat16_parameters()
    >>> print(policy)
    parameters bfloat16 with float32 masters, compute bfloat16, norms float32, softmax float32
    >>> init = policy.apply(lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)))
    >>> tx = policy.optimizer(optax.adam(1e-3))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=tx)
    >>> plan["kernel"].bytes_per_device, plan["optimizer/opt_state.masters.kernel"].bytes_per_device
    (128, 256)
    >>> nxp.create_sharded_model(plan)[0].dtype.name
    'bfloat16'
  """

  parameters: DTypeLike = jnp.float32
  compute: DTypeLike = jnp.float32
  norms: DTypeLike = jnp.float32
  softmax: DTypeLike = jnp.float32
  output: DTypeLike = jnp.float32
  output_layers: tuple[str, ...] = ()
  masters: bool = False
  loss_scale: bool = False
  reduction: DTypeLike | None = None

  def __post_init__(self) -> None:
    for name in ("parameters", "compute", "norms", "softmax", "output"):
      dtype = jnp.dtype(getattr(self, name))
      if not jnp.issubdtype(dtype, jnp.floating):
        raise TrainError(f"{name}={dtype} is not a floating dtype.", fix=f"{name}=jnp.bfloat16")
      object.__setattr__(self, name, dtype)
    if self.masters and not self._low:
      raise TrainError(
        f"parameters in {self.parameters} need no float32 masters.",
        fix="masters=False, or bfloat16 parameters.",
      )

  @classmethod
  @check_arguments(TrainError)
  def float32(cls, *, output_layers: Iterable[str] = ()) -> Precision:
    """Computes everything in float32.

    Args:
      output_layers: as in the class.

    Returns:
      The policy.
    """
    return cls(output_layers=tuple(output_layers))

  @classmethod
  @check_arguments(TrainError)
  def bfloat16(cls, *, output_layers: Iterable[str] = ()) -> Precision:
    """Computes in bfloat16 with float32 parameters, gradients and norms.

    Args:
      output_layers: as in the class.

    Returns:
      The policy.
    """
    return cls(compute=jnp.bfloat16, output_layers=tuple(output_layers))

  @classmethod
  @check_arguments(TrainError)
  def bfloat16_parameters(cls, *, masters: bool = True, output_layers: Iterable[str] = ()) -> Precision:
    """Keeps parameters and gradients in bfloat16 too, which halves the bytes to gather and reduce.

    Args:
      masters: as in the class. Without master weights, training loses small updates.
      output_layers: as in the class.

    Returns:
      The policy.
    """
    return cls(jnp.bfloat16, jnp.bfloat16, output_layers=tuple(output_layers), masters=masters)

  @classmethod
  @check_arguments(TrainError)
  def float16(cls, *, output_layers: Iterable[str] = ()) -> Precision:
    """Computes in float16 with float32 parameters and norms, and a dynamic loss scale.

    Args:
      output_layers: as in the class.

    Returns:
      The policy.
    """
    return cls(compute=jnp.float16, output_layers=tuple(output_layers), loss_scale=True)

  @check_arguments(TrainError)
  def apply(self, init: Callable[[], Model]) -> Callable[[], Model]:
    """Returns a constructor of the same module with these dtypes.

    Initializers run as they are written, and their values are rounded. The dtypes of the module's layers are
    replaced. Arithmetic that the module does itself on raw parameters does not change.

    Args:
      init: a function without arguments that builds the module.

    Returns:
      The constructor, for `plan` or `create_sharded_model`. It raises a `TrainError` if `output_layers` match
      no layer.
    """

    @functools.wraps(init)
    def build() -> Model:
      module = init()
      self._set(module)
      return module

    return build

  @check_arguments(TrainError)
  def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the transformation that trains parameters of this policy.

    Args:
      tx: an Optax transformation.

    Returns:
      `tx`, wrapped in `with_masters` and `with_loss_scale` if the policy has them. The method warns
      (`NnxParallelWarning`) if low-precision parameters have no masters, or if float16 has no loss scale.
    """
    if self.masters:
      tx = with_masters(tx)
    elif self._low:
      warn(
        f"training {self.parameters} parameters without float32 masters loses updates below 1/512 of a"
        " parameter. Fix: nxp.Precision.bfloat16_parameters(masters=True)"
      )
    if self.loss_scale:
      return with_loss_scale(tx)
    if jnp.float16 in (self.parameters, self.compute):
      warn(
        "float16 without a loss scale loses gradients below 6e-8."
        " Fix: nxp.Precision.float16(), or loss_scale=True"
      )
    return tx

  def __str__(self) -> str:
    masters = " with float32 masters" if self.masters else ""
    text = f"parameters {self.parameters}{masters}, compute {self.compute}, norms {self.norms}"
    text += f", softmax {self.softmax}"
    text += f", {' '.join(self.output_layers)} {self.output}" if self.output_layers else ""
    text += f", reduction {jnp.dtype(self.reduction)}" if self.reduction is not None else ""
    return text + (", dynamic loss scale" if self.loss_scale else "")

  @property
  def _low(self) -> bool:
    return jnp.finfo(self.parameters).bits < 32

  def _set(self, module: nnx.Module) -> None:
    norms: set[int] = set()
    unused = set(self.output_layers)
    for path, layer in nnx.iter_modules(module):
      hits = {pattern for pattern in self.output_layers if fnmatch.fnmatchcase(path_str(path), pattern)}
      unused -= hits
      if isinstance(layer, NORMS):
        norms |= {id(leaf) for leaf in vars(layer).values() if isinstance(leaf, nnx.Param)}
        _set_layer(layer, self.norms, self.norms)
      else:
        _set_layer(layer, self.output if hits else self.compute, self.parameters)
      if isinstance(layer, nnx.MultiHeadAttention):
        wider = jnp.finfo(self.softmax).bits > jnp.finfo(self.compute).bits
        if wider and layer.dropout_rate and layer.attention_fn is nnx.dot_product_attention:
          layer.attention_fn = functools.partial(_attention, softmax=self.softmax)
    if unused:
      raise TrainError(
        f"output_layers {sorted(unused)} match no layer of {type(module).__name__}.",
        details="layers: " + ", ".join(path_str(path) for path, _ in nnx.iter_modules(module) if path),
        fix="use the dotted path of the layer that makes logits, for example output_layers=('head',).",
      )
    for _, leaf in nnx.iter_graph(module):
      if isinstance(leaf, nnx.Param):
        value, dtype = value_of(leaf), self.norms if id(leaf) in norms else self.parameters
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating) and value.dtype != dtype:
          leaf.set_raw_value(value.astype(dtype))


def _set_layer(layer: Any, compute: DTypeLike, parameters: DTypeLike) -> None:
  if hasattr(layer, "dtype") and hasattr(layer, "param_dtype"):
    layer.dtype, layer.param_dtype = compute, parameters


def _attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  softmax: DTypeLike,
  dtype: DTypeLike | None = None,
  **options: Any,
) -> jax.Array:
  result = nnx.dot_product_attention(query, key, value, dtype=softmax, **options)
  return result.astype(dtype or query.dtype)
