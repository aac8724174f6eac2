"""The fused attention kernels that JAX has, by platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import jax

from nnx_parallel.layers.cudnn import cudnn_attention
from nnx_parallel.layers.splash import splash_attention, splash_ring
from nnx_parallel.layout.constrain import scope_in_use

K = TypeVar("K")


class Kernel(Protocol):
  """Computes softmax(scale * q k^T) v on one device; all shapes are per device."""

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    segments: jax.Array | None = None,
    mask: jax.Array | None = None,
    cap: float | None = None,
  ) -> jax.Array:
    """Returns `[batch, key heads, group, rows, out]`.

    Args:
      query: `[batch, key heads, group, rows, features]`; the heads of a group share their keys.
      key: `[batch, key heads, columns, features]`.
      value: `[batch, key heads, columns, out]`.
      scale: the factor of the scores.
      causal: a query sees no later position.
      window: a query sees the last `window` positions, itself included; if not causal, as many ahead too.
      segments: integers `[batch, rows]`, for as many rows as columns: a position sees positions with the same
        integer.
      mask: booleans `[rows, columns]`, true where a score is kept, without `causal`, `window` and `segments`.
        Each row keeps a score.
      cap: `cap * tanh(x / cap)` of the scaled scores.

    Raises:
      NotFused: the kernel does not compute this.
    """
    ...


KERNELS: dict[str, Kernel] = {"tpu": splash_attention, "gpu": cudnn_attention}
RINGS: dict[str, Callable[..., jax.Array]] = {"tpu": splash_ring}
"""The same around a ring of devices."""


def kernel_in_use(kernels: Mapping[str, K]) -> K | None:
  """The kernel for the devices of the mesh in scope; without a mesh, for the default devices."""
  scope = scope_in_use()
  meshes = [None if scope is None else scope.mesh, jax.sharding.get_abstract_mesh()]
  devices = (mesh.abstract_mesh.abstract_device for mesh in meshes if mesh is not None)
  device = next((device for device in devices if device is not None), None)
  return kernels.get(jax.default_backend() if device is None else device.platform)
