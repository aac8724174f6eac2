"""Random small models of the operations that real ones use, and random layouts for them.

A program is data: what it reads, a list of blocks, and a loss, each an operation of the tables below with its
options. So it can be written down as JSON, drawn again from its seed, and made smaller piece by piece. Its
parameters are a flat dict of arrays. A layout is data too: a mesh, the axes of the batch, and a spec for each
parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

Arrays = dict[str, Any]
Options = Mapping[str, Any]
AXES = ("data", "fsdp", "tensor")
VOCAB = 32


@dataclasses.dataclass(frozen=True)
class Weight:
  """One parameter: its shape, what each dim is (for the usual layouts), and how large its values are."""

  shape: tuple[int, ...]
  dims: tuple[str, ...]
  fan: int = 0  # 0: values around 1, as a scale has

  def draw(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    normal = rng.standard_normal(self.shape)
    return (normal / math.sqrt(self.fan) if self.fan else 1 + 0.3 * normal).astype(np.float32)


def weight(dims: str, *shape: int, fan: int | None = None) -> Weight:
  return Weight(shape, tuple(dims.split()), shape[0] if fan is None else fan)


def square(o: SimpleNamespace, name: str = "w") -> dict[str, Weight]:
  return {name: weight("embed mlp", o.width, o.width)}


def pair(o: SimpleNamespace) -> dict[str, Weight]:
  return {"up": weight("embed mlp", o.width, o.hidden), "down": weight("mlp embed", o.hidden, o.width)}


def scale(o: SimpleNamespace) -> dict[str, Weight]:
  return {"s": weight("norm", o.width, fan=0)}


def bias(o: SimpleNamespace, dims: str, *shape: int) -> dict[str, Weight]:
  return {"b": weight(dims, *shape, fan=4)} if o.bias else {}


@dataclasses.dataclass(frozen=True)
class Operation:
  """How an operation is drawn and run: `make` gives its parameters and what is computed with them."""

  make: Callable[[SimpleNamespace], tuple[dict[str, Weight], Callable[[Arrays, Any], Any]]]
  options: Mapping[str, Sequence[Any]]  # what each is drawn from; the first value is the plainest
  flat: bool  # whether it also works on (examples, width), without a length
  share: float  # how often it is drawn, relative to the others
  normed: bool  # whether its option `norm` puts an RMS norm before it

  def made(self, options: Options) -> tuple[dict[str, Weight], Callable[[Arrays, Any], Any]]:
    o = SimpleNamespace(**options)
    weights, run = self.make(o)
    if self.normed and o.norm:
      return weights | scale(o), lambda p, x: run(p, _rms(x) * p["s"])
    return weights, run


INPUTS: dict[str, Operation] = {}
BLOCKS: dict[str, Operation] = {}
LOSSES: dict[str, Operation] = {}
ORDINARY = ("attention", "mlp", "gated mlp", "norm", "conv", "experts", "dense")
BOTH = (False, True)


def operation(table: dict[str, Operation], name: str, flat: bool = False, share: float = 1,
              normed: bool = False, **options: Sequence[Any]) -> Callable[[Any], Any]:  # fmt: skip
  """Registers a function from options to parameters and what is computed with them and x."""
  return lambda make: table.setdefault(name, Operation(make, options, flat, share, normed))


# What a model reads.


@operation(INPUTS, "embedding", flat=True, share=2, position=BOTH, scaled=BOTH)
def _embedding(o: SimpleNamespace) -> Any:
  weights = {"table": weight("vocab embed", VOCAB, o.width, fan=4)}
  if o.position and not o.flat:
    weights["position"] = weight("- embed", o.length, o.width, fan=16)
  factor = math.sqrt(o.width) if o.scaled else 1
  return weights, lambda p, _: p["table"][p["tokens"]] * factor + p.get("position", 0)


operation(INPUTS, "features", flat=True, share=2)(lambda o: ({}, lambda p, _: p["features"]))


# Blocks.

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
  "gelu": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu, "tanh": jnp.tanh, "none": lambda x: x
}  # fmt: skip


def _rms(x: Any) -> Any:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _standard(x: Any, axes: Any = -1) -> Any:
  centred = x - x.mean(axes, keepdims=True)
  return centred * jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + 1e-6)


@operation(BLOCKS, "scale", flat=True, bias=BOTH)
def _scale(o: SimpleNamespace) -> Any:
  return scale(o) | bias(o, "norm", o.width), lambda p, x: x * p["s"] + p.get("b", 0)


_NORMS = ("rms", "layer", "group", "batch", "instance", "l2")


@operation(BLOCKS, "norm", flat=True, share=2, kind=_NORMS, bias=BOTH)
def _norm(o: SimpleNamespace) -> Any:
  kinds: dict[str, Callable[[Any], Any]] = {
    "rms": _rms,
    "layer": _standard,
    "group": lambda x: _standard(x.reshape(*x.shape[:-1], 4, -1)).reshape(x.shape),
    "batch": lambda x: _standard(x, tuple(range(x.ndim - 1))),
    "instance": lambda x: _standard(x, 1 if x.ndim > 2 else -1),
    "l2": lambda x: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) * 4,
  }
  return scale(o) | bias(o, "norm", o.width), lambda p, x: kinds[o.kind](x) * p["s"] + p.get("b", 0)


@operation(BLOCKS, "dense", flat=True, activation=tuple(_ACTIVATIONS), bias=BOTH)
def _dense(o: SimpleNamespace) -> Any:
  act = _ACTIVATIONS[o.activation]
  return square(o) | bias(o, "mlp", o.width), lambda p, x: act(x @ p["w"] + p.get("b", 0))


@operation(BLOCKS, "mlp", flat=True, share=2, normed=True, activation=(*_ACTIVATIONS,), bias=BOTH, norm=BOTH)
def _mlp(o: SimpleNamespace) -> Any:
  act = _ACTIVATIONS[o.activation]
  return pair(o) | bias(o, "mlp", o.hidden), lambda p, x: act(x @ p["up"] + p.get("b", 0)) @ p["down"]


@operation(BLOCKS, "gated mlp", flat=True, share=2, normed=True, fused=("no", "flat", "stacked"), norm=BOTH)
def _gated(o: SimpleNamespace) -> Any:
  wide, hidden = o.width, o.hidden
  weights = {
    "no": {name: weight("embed mlp", wide, hidden) for name in ("gate", "up")},
    "flat": {"both": weight("embed mlp", wide, 2 * hidden)},
    "stacked": {"both": weight("embed - mlp", wide, 2, hidden)},
  }[o.fused] | {"down": weight("mlp embed", hidden, wide)}

  def run(p: Arrays, x: Any) -> Any:
    if o.fused == "no":
      gate, up = x @ p["gate"], x @ p["up"]
    elif o.fused == "flat":
      gate, up = jnp.split(x @ p["both"], 2, -1)
    else:
      both = jnp.einsum("...d,dkf->...kf", x, p["both"])
      gate, up = both[..., 0, :], both[..., 1, :]
    return (jax.nn.silu(gate) * up) @ p["down"]

  return weights, run


@operation(BLOCKS, "attention", share=3, normed=True, kernels=("split", "flat", "fused"), keys=(8, 4, 2, 1),
           causal=(True, False), norm=BOTH, query_norm=BOTH, rotary=BOTH, bias=BOTH)  # fmt: skip
def _attention(o: SimpleNamespace) -> Any:
  wide, heads, keys = o.width, 8, o.keys
  size = max(2, wide // heads)
  counts = {"q": heads, "k": keys, "v": keys}
  if o.kernels == "split":
    weights = {name: weight("embed heads -", wide, n, size) for name, n in counts.items()}
    weights["o"] = weight("heads - embed", heads, size, wide, fan=heads * size)
  else:
    weights = {"o": weight("heads embed", heads * size, wide)}
    joint = counts if o.kernels == "flat" else {"qkv": heads + 2 * keys}
    weights |= {name: weight("embed heads", wide, n * size) for name, n in joint.items()}
  if o.query_norm:
    weights["qs"] = weight("-", size, fan=0)
  weights |= bias(o, "heads -", heads, size)

  def run(p: Arrays, x: Any) -> Any:
    if o.kernels == "split":
      q, k, v = (jnp.einsum("bld,dhk->blhk", x, p[name]) for name in "qkv")
    else:
      if o.kernels == "flat":
        made = [x @ p[name] for name in "qkv"]
      else:
        made = jnp.split(x @ p["qkv"], (heads * size, (heads + keys) * size), -1)
      q, k, v = (y.reshape(*y.shape[:-1], n, size) for y, n in zip(made, counts.values(), strict=True))
    q = q + p["b"] if o.bias else q
    if o.query_norm:
      q, k = _rms(q) * p["qs"], _rms(k) * p["qs"]
    if o.rotary:
      q, k = _rotated(q), _rotated(k)
    q = q.reshape(*q.shape[:2], keys, heads // keys, size)
    scores = jnp.einsum("blkgh,bmkh->bkglm", q, k) / math.sqrt(size)
    if o.causal:
      scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bkglm,bmkh->blkgh", jax.nn.softmax(scores, -1), v)
    if o.kernels == "split":
      return jnp.einsum("blhk,hkd->bld", mixed.reshape(*x.shape[:2], heads, size), p["o"])
    return mixed.reshape(*x.shape[:2], heads * size) @ p["o"]

  return weights, run


def _rotated(x: Any) -> Any:
  half = x.shape[-1] // 2
  angle = jnp.arange(x.shape[1])[:, None, None] * (1.0 / (1 + jnp.arange(half)))
  a, b = x[..., :half], x[..., half:]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _convolve(x: Any, kernel: Any, stride: int = 1, dilation: int = 1, groups: int = 1) -> Any:
  space, each = "HW"[4 - x.ndim :], x.ndim - 2
  numbers = f"N{space}C", f"{space}IO", f"N{space}C"
  options = {"rhs_dilation": (dilation,) * each, "feature_group_count": groups, "dimension_numbers": numbers}
  return jax.lax.conv_general_dilated(x, kernel, (stride,) * each, "SAME", **options)


@operation(BLOCKS, "conv", share=1.5, taps=(3, 1), two=BOTH, stride=(1, 2), dilation=(1, 2), norm=BOTH)
def _conv(o: SimpleNamespace) -> Any:
  taps = (o.taps,) * (2 if o.two else 1)
  dims, wide = "- " * len(taps) + "embed mlp", o.width
  weights = {"k": weight(dims, *taps, wide, wide, fan=wide * math.prod(taps))} | (scale(o) if o.norm else {})

  def run(p: Arrays, x: Any) -> Any:
    shape = x.shape
    x = x.reshape(shape[0], 2, shape[1] // 2, wide) if o.two else x
    x = jax.nn.relu(_convolve(x, p["k"], o.stride, o.dilation))
    for dim in range(1, x.ndim - 1) if o.stride == 2 else ():
      x = jnp.repeat(x, 2, dim)
    x = _standard(x, tuple(range(x.ndim - 1))) * p["s"] if o.norm else x
    return x.reshape(shape)

  return weights, run


@operation(BLOCKS, "grouped conv", share=0.3, taps=(3, 1), groups=("all", 2, 4), dilation=(1, 2))
def _grouped_conv(o: SimpleNamespace) -> Any:
  groups = o.width if o.groups == "all" else o.groups
  weights = {"k": weight("- - mlp", o.taps, o.width // groups, o.width, fan=o.taps)}
  return weights, lambda p, x: jnp.tanh(_convolve(x, p["k"], 1, o.dilation, groups))


@operation(BLOCKS, "gather", kind=("tokens", "along"))
def _gather(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    if o.kind == "tokens":
      return x + jnp.take(p["table"], p["tokens"], axis=0)
    order = jnp.argsort(jax.lax.stop_gradient(x), axis=1)
    return jnp.take_along_axis(x, order, axis=1) @ p["table"][: o.width]

  return {"table": weight("vocab embed", VOCAB, o.width, fan=4)}, run


@operation(BLOCKS, "scatter", kind=("segments", "set", "max", "rows"))
def _scatter(o: SimpleNamespace) -> Any:
  table = {"table": weight("vocab embed", VOCAB, o.width, fan=4)} if o.kind == "rows" else {}

  def run(p: Arrays, x: Any) -> Any:
    y, tokens, empty = x @ p["w"], p["tokens"], jnp.zeros((VOCAB, x.shape[-1]))
    if o.kind == "segments":
      return empty.at[tokens].add(y)[tokens] / 4
    if o.kind == "rows":
      return p["table"].at[tokens].add(y / 8)[tokens]
    if o.kind == "max":
      return empty.at[tokens[:, 0]].max(y[:, 0])[tokens]
    return x.at[:, 1].set(y[:, 0])

  return square(o) | table, run


@operation(BLOCKS, "cumulative", kind=("sum", "logsumexp", "associative", "product"))
def _cumulative(o: SimpleNamespace) -> Any:
  def joined(a: Any, b: Any) -> Any:
    return a[0] * b[0], a[1] * b[0] + b[1]

  kinds: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: jnp.cumsum(x, 1) / 3,
    "logsumexp": lambda x: jax.lax.cumlogsumexp(x, 1),
    "associative": lambda x: jax.lax.associative_scan(joined, (jax.nn.sigmoid(x), x), axis=1)[1],
    "product": lambda x: jnp.cumprod(jnp.tanh(x) + 0.5, 1),
  }
  return scale(o), lambda p, x: kinds[o.kind](x * p["s"])


@operation(BLOCKS, "sort", kind=("width", "length", "top", "mask"))
def _sort(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    y = x @ p["w"]
    values, places = jax.lax.top_k(y, 4)
    if o.kind == "top":
      return (jax.nn.one_hot(places, o.width) * values[..., None]).sum(-2)
    if o.kind == "mask":
      return jnp.where(y >= values[..., -1:], y, 0.0)
    return jnp.sort(y, 1 if o.kind == "length" else -1)

  return square(o), run


@operation(BLOCKS, "layers", flat=True, share=1.5, count=(2, 4, 8), norm=BOTH, remat=BOTH)
def _layers(o: SimpleNamespace) -> Any:
  weights = {
    "up": weight("layers embed mlp", o.count, o.width, o.hidden, fan=o.width),
    "down": weight("layers mlp embed", o.count, o.hidden, o.width, fan=o.hidden),
  }
  if o.norm:
    weights["s"] = weight("layers norm", o.count, o.width, fan=0)

  def layer(x: Any, own: Arrays) -> tuple[Any, None]:
    y = _rms(x) * own["s"] if o.norm else x
    return x + jnp.tanh(y @ own["up"]) @ own["down"], None

  def run(p: Arrays, x: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(layer) if o.remat else layer, x, {n: p[n] for n in weights})[0]

  return weights, run


@operation(BLOCKS, "recurrent", kind=("rnn", "gated", "state"), reverse=BOTH)
def _recurrent(o: SimpleNamespace) -> Any:
  wide, gates = o.width, 2 if o.kind == "gated" else 1
  if o.kind == "state":
    weights = {"a": weight("norm", wide, fan=4)} | {n: weight("embed -", wide, 8) for n in "bc"}
  else:
    weights = {name: weight("embed mlp", wide, gates * wide) for name in "xh"}
    weights["b"] = weight("mlp", gates * wide, fan=4)

  def run(p: Arrays, x: Any) -> Any:
    def step(state: Any, now: Any) -> tuple[Any, Any]:
      if o.kind == "state":
        decay = jax.nn.sigmoid(now * p["a"])
        state = decay[..., None] * state + now[..., None] * (now @ p["b"])[:, None, :]
        return state, jnp.einsum("bdn,bn->bd", state, now @ p["c"])
      made = now @ p["x"] + state @ p["h"] + p["b"]
      if o.kind == "gated":
        keep, new = jnp.split(made, 2, -1)
        state = jax.nn.sigmoid(keep) * state + (1 - jax.nn.sigmoid(keep)) * jnp.tanh(new)
      else:
        state = jnp.tanh(made)
      return state, state

    first = jnp.zeros((x.shape[0], wide, 8) if o.kind == "state" else (x.shape[0], wide))
    return jnp.swapaxes(jax.lax.scan(step, first, jnp.swapaxes(x, 0, 1), reverse=o.reverse)[1], 0, 1)

  return weights, run


@operation(BLOCKS, "branch", flat=True, kind=("cond", "switch", "where"))
def _branch(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    ways = [lambda y: jnp.tanh(y @ p["a"]), lambda y: jnp.sin(y @ p["b"]) * 0.5, lambda y: y]
    if o.kind == "where":
      return jnp.where(x.mean(-1, keepdims=True) > 0, ways[0](x), ways[1](x))
    if o.kind == "cond":
      return jax.lax.cond(x.mean() > 0, *ways[:2], x)
    return jax.lax.switch((x.sum() > 0).astype(jnp.int32), ways, x)

  return square(o, "a") | {"b": weight("mlp embed", o.width, o.width)}, run


@operation(BLOCKS, "reshape", kind=("examples", "mixer", "halves", "image", "patches"))
def _reshape(o: SimpleNamespace) -> Any:
  wide, long = o.width, o.length
  size = {"mixer": long, "halves": wide // 2, "patches": wide * 2}.get(o.kind, wide)
  kinds: dict[str, Callable[[Any, Any], Any]] = {
    "examples": lambda x, w: (x.reshape(-1, wide) @ w).reshape(x.shape),
    "mixer": lambda x, w: jnp.swapaxes(jnp.swapaxes(x, 1, 2) @ w, 1, 2),
    "halves": lambda x, w: (x.reshape(*x.shape[:-1], 2, wide // 2) @ w).reshape(x.shape),
    "image": lambda x, w: x.reshape(-1, 2, long // 2, wide).transpose(0, 2, 1, 3).reshape(x.shape) @ w,
    "patches": lambda x, w: (x.reshape(-1, long // 2, 2 * wide) @ w).reshape(x.shape),
  }
  dims = "- -" if o.kind == "mixer" else "embed mlp"
  return {"w": weight(dims, size, size)}, lambda p, x: kinds[o.kind](x, p["w"])


@operation(BLOCKS, "shift", kind=("pad", "roll", "examples", "dynamic", "interior", "flip"))
def _shift(o: SimpleNamespace) -> Any:
  kinds: dict[str, Callable[[Any, Any], Any]] = {
    "pad": lambda x, y: x + jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "roll": lambda x, y: x + jnp.roll(y, 1, 1),
    "examples": lambda x, y: x + jnp.roll(y, 1, 0),
    "dynamic": lambda x, y: jax.lax.dynamic_update_slice(x, y[:, :1] * 2, (0, 3, 0)),
    "interior": lambda x, y: x + jax.lax.pad(y[:, ::2], 0.0, ((0, 0, 0), (0, 1, 1), (0, 0, 0))),
    "flip": lambda x, y: x + y[:, ::-1],
  }
  return scale(o), lambda p, x: kinds[o.kind](x, x * p["s"])


@operation(BLOCKS, "half", flat=True, share=0.5, dtype=("bfloat16", "float16"))
def _half(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    low, up, down = (y.astype(o.dtype) for y in (x, p["up"], p["down"]))
    return (jax.nn.gelu(low @ up) @ down).astype(x.dtype)

  return pair(o), run


@operation(BLOCKS, "experts", flat=True, share=1.5, normed=True, kind=("soft", "top", "capacity"), norm=BOTH)
def _experts(o: SimpleNamespace) -> Any:
  wide, hidden, count, room = o.width, o.hidden, 8, 8
  weights = {
    "router": weight("embed -", wide, count),
    "up": weight("expert embed mlp", count, wide, hidden, fan=wide),
    "down": weight("expert mlp embed", count, hidden, wide, fan=hidden),
  }

  def run(p: Arrays, x: Any) -> Any:
    chances = jax.nn.softmax(x @ p["router"], -1)
    if o.kind != "soft":
      best, places = jax.lax.top_k(chances, 2)
      chances = (jax.nn.one_hot(places, count) * best[..., None]).sum(-2)
    if o.kind != "capacity":
      y = jax.nn.silu(jnp.einsum("...d,edf->...ef", x, p["up"]))
      return jnp.einsum("...ef,efd,...e->...d", y, p["down"], chances)
    rows, chances = x.reshape(-1, wide), chances.reshape(-1, count)
    place = jnp.cumsum(chances > 0, 0) - 1
    send = (chances > 0)[..., None] * jax.nn.one_hot(place, room)
    y = jax.nn.silu(jnp.einsum("nec,nd,edf->ecf", send, rows, p["up"]))
    y = jnp.einsum("ecf,efd->ecd", y, p["down"])
    return jnp.einsum("ecd,nec,ne->nd", y, send, chances).reshape(x.shape)

  return weights, run


_product = jax.custom_vjp(operator.matmul)
_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda k, g: (g @ k[1].T, jnp.einsum("...d,...f->df", k[0], g)))

_scaled = jax.custom_vjp(operator.mul)
_scaled.defvjp(lambda x, s: (x * s, (x, s)), lambda k, g: (g * k[1], (g * k[0]).sum((*range(g.ndim - 1),))))


@operation(BLOCKS, "custom gradient", flat=True, kind=("product", "scale"), remat=BOTH)
def _custom(o: SimpleNamespace) -> Any:
  weights = scale(o) | (square(o) if o.kind == "product" else {})

  def inner(p: Arrays, x: Any) -> Any:
    y = _scaled(_rms(x), p["s"])
    return jnp.tanh(_product(y, p["w"]) if "w" in p else y)

  return weights, jax.checkpoint(inner) if o.remat else inner


@operation(BLOCKS, "adapter", flat=True, frozen=BOTH)
def _adapter(o: SimpleNamespace) -> Any:
  weights = square(o) | {"a": weight("embed -", o.width, 8), "b": weight("- mlp", 8, o.width)}
  keep = jax.lax.stop_gradient if o.frozen else lambda w: w
  return weights, lambda p, x: x @ keep(p["w"]) + x @ p["a"] @ p["b"]


@operation(BLOCKS, "bilinear", kind=("pairs", "summary", "outer"))
def _bilinear(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    y = jnp.tanh(x @ p["w"])
    if o.kind == "pairs":
      return jnp.einsum("bld,bme,ble->bmd", x, x, y) / 64 * p["s"]
    if o.kind == "summary":
      return x * jax.nn.sigmoid(y.mean(1, keepdims=True) * p["s"])
    return jnp.einsum("bld,ble,e->bld", x, y, p["s"]) / 8

  return square(o) | scale(o), run


@operation(BLOCKS, "dropout", flat=True)
def _dropout(o: SimpleNamespace) -> Any:
  keep = functools.partial(jax.random.bernoulli, jax.random.key(7), 0.8)
  return square(o), lambda p, x: jnp.where(keep(x.shape), x / 0.8, 0.0) @ p["w"]


@operation(BLOCKS, "upsampled conv", share=0.7, taps=(4, 2, 8), stride=(1, 2))
def _upsampled_conv(o: SimpleNamespace) -> Any:
  taps, pads = o.taps, ((o.taps // 2, o.taps - o.taps // 2),)

  def run(p: Arrays, x: Any) -> Any:
    options = {"lhs_dilation": (2,), "dimension_numbers": ("NWC", "WIO", "NWC")}
    y = jax.lax.conv_general_dilated(x, p["k"], (o.stride,), pads, **options)
    return y.reshape(*x.shape[:2], -1, o.width).mean(2)

  return {"k": weight("- embed mlp", taps, o.width, o.width, fan=o.width * taps)}, run


@operation(BLOCKS, "shard map", share=1.5, kind=("sine", "product", "mean", "ring"),
           axis=("tensor", "fsdp", "data"), dim=(2, 1, 0), alone=(True, False))  # fmt: skip
def _shard_map(o: SimpleNamespace) -> Any:
  """A program by hand over one axis: the others are left to the compiler, or are manual too."""
  kind, axis = o.kind, o.axis
  dim = 2 if kind == "product" else 1 if kind in ("mean", "ring") else o.dim
  spec = P(*(axis if d == dim else None for d in range(3)))
  rows = P(axis) if kind == "product" else P()

  def local(x: Any, w: Any, size: int) -> Any:
    if kind == "sine":
      return jnp.sin(x @ w) if dim != 2 else jnp.sin(x)
    if kind == "product":
      y = x @ w
      return jax.lax.psum(y, axis) if size > 1 else y
    y = total = x.mean(1, keepdims=True)
    if kind == "mean":
      return jnp.sin(x) * (jax.lax.pmean(y, axis) if size > 1 else y)
    for _ in range(size - 1):
      y = jax.lax.ppermute(y, axis, [(n, (n + 1) % size) for n in range(size)])
      total = total + y
    return jnp.sin(x) * total / size

  def run(p: Arrays, x: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.shape or x.shape[dim] % mesh.shape[axis]:
      return local(x, p["w"], 1)
    names, out = {axis} if o.alone else set(mesh.axis_names), P() if kind == "product" else spec
    own = functools.partial(local, size=mesh.shape[axis])
    mapped = jax.shard_map(own, mesh=mesh, in_specs=(spec, rows), out_specs=out, axis_names=names)
    return mapped(x, p["w"])

  return square(o), run


@operation(BLOCKS, "nested jit", flat=True, twice=BOTH)
def _nested(o: SimpleNamespace) -> Any:
  inner: Any = jax.jit(lambda x, w: jnp.tanh(x @ w))
  outer: Any = jax.jit(lambda x, w: inner(inner(x, w), w) if o.twice else inner(x, w))
  return square(o), lambda p, x: outer(x, p["w"])


@operation(BLOCKS, "custom gradient in a loop", flat=True, kind=("scan", "fori", "map"), count=(2, 3))
def _custom_in_a_loop(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    if o.kind == "scan":
      return jax.lax.scan(lambda x, w: (jnp.tanh(_product(x, w)), None), x, p["w"])[0]
    if o.kind == "fori":
      return jax.lax.fori_loop(0, o.count, lambda n, x: jnp.tanh(_product(x, p["w"][n])), x)
    return jax.lax.map(lambda w: jnp.tanh(_product(x, w)), p["w"]).mean(0)

  return {"w": weight("- embed mlp", o.count, o.width, o.width, fan=o.width)}, run


# Losses.


@operation(LOSSES, "cross-entropy", flat=True, share=2, normed=True, tied=BOTH,
           kind=("log softmax", "one-hot", "logsumexp"), masked=BOTH, norm=BOTH)  # fmt: skip
def _cross_entropy(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    logits, targets = x @ p["table"].T if o.tied else x @ p["w"], p["targets"]
    chances = jax.nn.log_softmax(logits)
    if o.kind == "one-hot":
      losses = -(chances * jax.nn.one_hot(targets, VOCAB)).sum(-1)
    else:
      found = chances if o.kind == "log softmax" else logits
      taken = jnp.take_along_axis(found, targets[..., None], -1)[..., 0]
      losses = -taken if found is chances else jax.nn.logsumexp(logits, -1) - taken
    mask = p["tokens"] % 5 != 0
    return jnp.where(mask, losses, 0.0).sum() / mask.sum() if o.masked else losses.mean()

  return {} if o.tied else {"w": weight("embed vocab", o.width, VOCAB)}, run


operation(LOSSES, "sine", flat=True, share=2)(lambda o: ({}, lambda p, x: 1 + jnp.sin(x).sum() / x.shape[0]))
operation(LOSSES, "squares", flat=True)(lambda o: ({}, lambda p, x: jnp.square(x - p["features"]).mean()))


@operation(LOSSES, "contrastive", share=0.5)
def _contrastive(o: SimpleNamespace) -> Any:
  def run(p: Arrays, x: Any) -> Any:
    a, b = _rms(x.mean(1)) / 2, _rms(p["features"].mean(1) @ p["w"]) / 2
    return -jnp.diagonal(jax.nn.log_softmax(a @ b.T)).mean()

  return square(o), run


# Programs.

Program = dict[str, Any]
SMALL = 1_000_000
PLAIN = ("dense", "scale", "norm", "mlp")


def draw(seed: int) -> Program:
  """A random program: an ordinary block or two, then perhaps one of any kind; from `SMALL` on a small one."""
  rng = random.Random(f"program {seed}")
  if seed >= SMALL:
    return _draw_small(rng)
  flat = rng.random() < 0.15
  sizes = {"batch": rng.choice((8, 8, 16)), "length": 8, "width": rng.choice((16, 16, 32)),
           "hidden": rng.choice((16, 32)), "flat": flat}  # fmt: skip
  ordinary = {name: BLOCKS[name] for name in ORDINARY}
  blocks = [_draw(rng, ordinary, flat) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
  blocks += [_draw(rng, BLOCKS, flat) for _ in range(rng.choice((0, 0, 1, 1)))]
  if rng.random() < 0.2:
    rng.shuffle(blocks)
  for block in blocks:
    block["residual"] = rng.random() < 0.5
  reads, loss = _draw(rng, INPUTS, flat), _draw(rng, LOSSES, flat)
  if loss.get("tied") and reads["op"] != "embedding":
    loss["tied"] = False
  return {"sizes": sizes, "input": reads, "blocks": blocks, "loss": loss}


def _draw_small(rng: random.Random) -> Program:
  """One block of any kind, mostly with a plain one before or behind it; such a program compiles fast."""
  flat = rng.random() < 0.4
  sizes = {"batch": rng.choice((8, 16)), "length": 8, "width": rng.choice((8, 16, 32)), "hidden": 16}
  blocks = [_draw(rng, BLOCKS, flat)]
  if rng.random() < 0.8:
    blocks.insert(rng.choice((0, 1)), _draw(rng, {name: BLOCKS[name] for name in PLAIN}, flat))
  for block in blocks:
    block["residual"] = rng.random() < 0.4
  plain = {"input": {"op": "features"}, "loss": {"op": "sine"}}
  return {"sizes": sizes | {"flat": flat}, "blocks": blocks, **plain}


def _draw(rng: random.Random, table: Mapping[str, Operation], flat: bool) -> dict[str, Any]:
  names = [name for name, op in table.items() if op.flat or not flat]
  (name,) = rng.choices(names, [table[name].share for name in names])
  options = table[name].options.items()
  return {"op": name} | {o: values[0] if rng.random() < 0.3 else rng.choice(values) for o, values in options}


def _parts(program: Program) -> list[tuple[str, Operation, dict[str, Any]]]:
  """The pieces of a program in order: the prefix of their parameters, the operation, and its options."""
  blocks = ((f"b{i}", BLOCKS, block) for i, block in enumerate(program["blocks"]))
  parts = ("in", INPUTS, program["input"]), *blocks, ("out", LOSSES, program["loss"])
  return [(prefix, table[piece["op"]], {**program["sizes"], **piece}) for prefix, table, piece in parts]


def weights_of(program: Program) -> dict[str, Weight]:
  parts = ((prefix, op.made(options)[0]) for prefix, op, options in _parts(program))
  return {f"{prefix}_{name}": found for prefix, weights in parts for name, found in weights.items()}


def values_of(program: Program, seed: int) -> tuple[Arrays, Arrays]:
  rng = np.random.default_rng(seed)
  params = {name: found.draw(rng) for name, found in weights_of(program).items()}
  sizes = program["sizes"]
  shape = (sizes["batch"],) if sizes["flat"] else (sizes["batch"], sizes["length"])
  batch = {name: rng.integers(VOCAB, size=shape, dtype=np.int32) for name in ("tokens", "targets")}
  return params, batch | {"features": rng.standard_normal((*shape, sizes["width"])).astype(np.float32)}


def loss_of(program: Program, params: Arrays, batch: Arrays) -> Any:
  """Runs a program on its parameters and a batch of tokens, targets and features."""
  x: Any = None
  for prefix, op, options in _parts(program):
    own = {name.split("_", 1)[1]: p for name, p in params.items() if name.split("_", 1)[0] == prefix} | batch
    if options.get("tied"):
      own["table"] = params["in_table"]
    y = op.made(options)[1](own, x)
    x = x + y if options.get("residual") else y
  return x


# Layouts.

Layout = dict[str, Any]
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
_PAIRS = ("fsdp", "tensor"), ("data", "tensor"), ("data", "fsdp")
MESHES = (*[CUBE] * 10, {"fsdp": 8}, {"data": 8}, *({a: n, b: 8 // n} for a, b in _PAIRS for n in (2, 4)))
STYLES = ("usual", "fsdp", "beside", "beside", "random", "random", "random")
Sizes = Mapping[str, int]
Spec = list[list[str]]


def draw_layout(program: Program, seed: int, number: int, style: str = "") -> Layout:
  """A random layout: `mesh`, `batch` (axes of dim 0), `length` (axes of dim 1), `specs` and `style`.

  The style is drawn where it is empty. "usual" is Megatron's split over tensor and the rest over fsdp; "fsdp"
  splits the largest dim; "beside" is the usual one with up to two parameters laid out at random; "random"
  gives each parameter any axes that divide it.
  """
  rng = random.Random(f"layout {seed} {number}")
  style = style or rng.choice(STYLES)
  mesh = dict(rng.choice(MESHES))
  weights = weights_of(program)
  batch, length = _batch_axes(rng, mesh, style, program["sizes"])
  if style == "random":
    axes = rng.choice((AXES, AXES[1:]))
    specs = {name: _random_spec(rng, found.shape, mesh, axes) for name, found in weights.items()}
  elif style == "fsdp":
    split = rng.choice((("fsdp",), ("data", "fsdp"), ("fsdp", "tensor"), ("fsdp", "data")))
    specs = {name: _largest(found.shape, mesh, split) for name, found in weights.items()}
  else:
    homes = _homes(rng)
    specs = {name: _by_role(found, mesh, homes) for name, found in weights.items()}
    if style == "beside" and specs:
      for name in rng.sample(sorted(specs), min(len(specs), rng.choice((1, 2)))):
        specs[name] = _random_spec(rng, weights[name].shape, mesh)
  return {"mesh": mesh, "batch": batch, "length": length, "specs": specs, "style": style}


def _batch_axes(rng: random.Random, mesh: Sizes, style: str, sizes: Options) -> tuple[list[str], list[str]]:
  """Those of the replicas and shards, mostly in the usual order; now and then any other."""
  usual = [axis for axis in ("data", "fsdp") if axis in mesh] or list(mesh)
  if rng.random() < (0.5 if style == "random" else 0.7):
    return usual, []
  chosen = [list(p) for n in range(len(mesh) + 1) for p in itertools.permutations(mesh, n)]
  batch = rng.choice([p for p in chosen if sizes["batch"] % math.prod(mesh[a] for a in p) == 0])
  rest = [axis for axis in mesh if axis not in batch]
  length = [rng.choice(rest)] if rest and not sizes["flat"] and rng.random() < 0.15 else []
  return batch, length


def _random_spec(rng: random.Random, shape: tuple[int, ...], mesh: Sizes, axes: Sequence[str] = AXES) -> Spec:
  free = [axis for axis in axes if axis in mesh]
  rng.shuffle(free)
  spec: Spec = [[] for _ in shape]
  for axis in free:
    dims = [d for d, n in enumerate(shape) if n % (mesh[axis] * math.prod(mesh[a] for a in spec[d])) == 0]
    if dims and rng.random() < 0.7:
      spec[rng.choice(dims)].append(axis)
  return spec


def _largest(shape: tuple[int, ...], mesh: Sizes, split: Sequence[str]) -> Spec:
  axes = [axis for axis in split if axis in mesh]
  spec: Spec = [[] for _ in shape]
  if dims := [d for d, n in enumerate(shape) if n % math.prod(mesh[axis] for axis in axes) == 0]:
    spec[max(dims, key=lambda d: shape[d])] = axes
  return spec


def _homes(rng: random.Random) -> dict[str, tuple[str, ...]]:
  """Mesh axes for each kind of dim, as rules of published models have them."""
  shards = rng.choice((("fsdp",), ("fsdp",), ("data", "fsdp")))
  return {"embed": shards, "mlp": ("tensor",), "heads": ("tensor",)} | {
    "vocab": rng.choice((("tensor",), ("tensor",), ("tensor", "fsdp"))),
    "norm": rng.choice(((), (), ("tensor",), shards)),
    "expert": rng.choice(((), ("tensor",), ("fsdp",), ("data",))),
  }


def _by_role(found: Weight, mesh: Sizes, homes: Mapping[str, tuple[str, ...]]) -> Spec:
  taken: set[str] = set()
  spec: Spec = []
  for size, dim in zip(found.shape, found.dims, strict=True):
    axes = [axis for axis in homes.get(dim, ()) if axis in mesh and axis not in taken]
    axes = axes if size % math.prod(mesh[axis] for axis in axes) == 0 else []
    taken |= set(axes)
    spec.append(axes)
  return spec


def spec_of(spec: Sequence[Sequence[str]]) -> P:
  return P(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in spec))
