"""The fused attention kernels that JAX has: splash attention on TPUs, cuDNN on NVIDIA GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from nnx_parallel.attention.softmaxes import NotFused
from nnx_parallel.layout.constrain import scope_in_use

_LANES = 128
_BLOCKS = (512, 256, 128)


class Terms(NamedTuple):
  """What a kernel computes on one device: softmax(scale * q k^T + bias) v. All shapes are per device."""

  scale: float
  causal: bool = False
  window: int | None = None  # the last positions that a query sees; if not causal, as many ahead too
  # `[batch, rows]`, for as many rows as columns: a position sees those with its integer
  segments: jax.Array | None = None
  mask: jax.Array | None = None  # `[batch or 1, rows, columns]`, true where a score is kept, once in each row
  bias: jax.Array | None = None  # `[batch or 1, key heads or 1, group or 1, rows, columns]`
  cap: float | None = None  # `cap * tanh(x / cap)` of the scaled scores


Kernel = Callable[[jax.Array, jax.Array, jax.Array, Terms], jax.Array]
"""`(query, key, value, terms) -> [batch, key heads, group, rows, out]`, or `NotFused`.

Queries are `[batch, key heads, group, rows, features]`: the heads of a group share their keys. Keys and
values are `[batch, key heads, columns, ...]`.
"""


def splash_attention(
  query: jax.Array, key: jax.Array, value: jax.Array, terms: Terms, *, interpret: bool = False
) -> jax.Array:
  """The kernel of TPUs, a `Kernel`: it skips blocks that are hidden. `interpret`: on any platform, slowly."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # Pallas takes 0.3 s to import

  if terms.bias is not None:
    raise NotFused("a bias is added to its scores, which the kernel of TPUs does not take")
  rows, columns, window, causal = query.shape[3], key.shape[2], terms.window, terms.causal
  sizes: Any = _blocks(splash, rows, columns)
  wide = jnp.promote_types(query.dtype, jnp.float32)
  scaled = (query.astype(wide) * terms.scale).astype(query.dtype)
  given: list[jax.Array] = [  # with features that fill the lanes of the chip
    jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % _LANES),)) for x in (scaled, key, value)
  ]
  q, k, v = given
  options: dict[str, Any] = {"attn_logits_soft_cap": terms.cap, "interpret": interpret, "block_sizes": sizes}
  mask, segments = terms.mask, terms.segments
  if mask is None:
    own: Any = splash.CausalMask((rows, columns)) if causal else splash.FullMask((rows, columns))
    if window is not None:
      own = splash.LocalMask((rows, columns), (window - 1, 0 if causal else window - 1), 0)
    masks = splash.MultiHeadMask([own] * query.shape[2])
    kernel = splash.make_splash_mqa_single_device(masks, **options)
    ids: Any = None if segments is None else splash.SegmentIds(segments, segments)
    heads = jax.vmap(kernel, (0, 0, 0, None))
    found: Any = jax.vmap(heads, (0, 0, 0, None if ids is None else 0))(q, k, v, ids)
  elif mask.shape[0] > 1 or segments is not None:
    raise NotFused("its mask differs between examples, which the kernel of TPUs does not take")
  else:  # an array has a dim of heads: the kernel computes one head at a time
    kernel = splash.make_splash_mqa_single_device(mask, **options)
    kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)  # `jnp.array` traced this flag
    by_head = jax.vmap(lambda q, k, v: kernel(q[None], k, v)[0], (0, None, None))
    found = jax.vmap(jax.vmap(by_head))(q, k, v)
  return found[..., : value.shape[-1]]


def _blocks(splash: Any, rows: int, columns: int) -> Any:
  """The sizes of the blocks of the kernel of TPUs for these lengths."""
  q, kv = (next((block for block in _BLOCKS if n % block == 0), 0) for n in (rows, columns))
  if not q or not kv:
    raise NotFused(f"{rows} queries and {columns} keys are not multiples of {_LANES}")
  queries = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), q)
  keys = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
  return splash.BlockSizes(**queries, **dict.fromkeys(keys, kv))


def cudnn_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  terms: Terms,
  *,
  implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
  """The kernel of NVIDIA GPUs, a `Kernel`, which reads a mask and segments as a bias.

  It skips what `causal` and `window` hide. With the implementation `"xla"`, JAX computes the same anywhere.
  """
  if terms.cap is not None:
    raise NotFused("cuDNN has no soft cap")
  batch, heads, group, rows, features = query.shape
  columns = key.shape[2]
  _, causal, window, segments, mask, bias, _ = terms
  if segments is not None:
    same = segments[:, :, None] == segments[:, None]
    mask = same if mask is None else mask & same
  if window is not None and not causal:  # cuDNN has windows of earlier keys only
    near = abs(jnp.arange(rows)[:, None] - jnp.arange(columns)) < window
    mask, window = near[None] if mask is None else mask & near, None
  queries = query.reshape(batch, heads * group, rows, features)
  arrays = [x.swapaxes(1, 2) for x in (queries, key, value)]
  if bias is not None:
    low = jnp.finfo(query.dtype).min / 2  # with the mask's number added, still not infinite
    bias = jnp.maximum(bias, low).astype(query.dtype)
    bias = jnp.broadcast_to(bias, (len(bias), heads, group, rows, columns))
    arrays.append(bias.reshape(len(bias), heads * group, rows, columns))
  attend = functools.partial(
    jax.nn.dot_product_attention,
    mask=None if mask is None else mask[:, None],
    scale=terms.scale,
    is_causal=causal,
    local_window_size=None if window is None else (window - 1, 0),
    implementation=implementation,
  )
  try:  # the rule of its gradients has requirements of its own
    slopes = tuple(range(len(arrays)))
    jax.eval_shape(jax.grad(lambda *xs: attend(*xs).astype(jnp.float32).sum(), slopes), *arrays)
  except (RuntimeError, TypeError, ValueError) as problem:
    raise NotFused(f"cuDNN: {problem}") from problem
  return attend(*arrays).swapaxes(1, 2).reshape(*query.shape[:-1], value.shape[-1])


KERNELS: dict[str, Kernel] = {"tpu": splash_attention, "gpu": cudnn_attention}


def kernel_in_use() -> Kernel | None:
  """The kernel for the devices of the mesh in scope; without a mesh, for the default devices."""
  scope = scope_in_use()
  meshes = [None if scope is None else scope.mesh, jax.sharding.get_abstract_mesh()]
  devices = (mesh.abstract_mesh.abstract_device for mesh in meshes if mesh is not None)
  device = next((device for device in devices if device is not None), None)
  return KERNELS.get(jax.default_backend() if device is None else device.platform)
