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
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


@dataclasses.dataclass(frozen=True)
class Operation:
  """How an operation is drawn and run.

  Attributes:
    weights: sizes and options -> its parameters.
    run: (parameters, x, options, batch) -> x.
    options: what each option is drawn from; the first value is the plainest.
    flat: whether it also works on (examples, width), without a length.
    share: how often it is drawn, relative to the others.
  """

  weights: Callable[[Options], dict[str, Weight]]
  run: Callable[[Arrays, Any, Options, Arrays], Any]
  options: Mapping[str, Sequence[Any]]
  flat: bool
  share: float


INPUTS: dict[str, Operation] = {}
BLOCKS: dict[str, Operation] = {}
LOSSES: dict[str, Operation] = {}
ORDINARY = ("attention", "mlp", "gated mlp", "norm", "conv", "experts", "dense")


def operation(
  table: dict[str, Operation], name: str, flat: bool = False, share: float = 1, **options: Sequence[Any]
) -> Callable[[Any], Any]:
  """Registers a function that returns `(weights, run)` for given options."""

  def register(make: Callable[[Options], tuple[dict[str, Weight], Callable[..., Any]]]) -> Any:
    def weights(o: Options) -> dict[str, Weight]:
      return make(o)[0]

    def run(p: Arrays, x: Any, o: Options, batch: Arrays) -> Any:
      return make(o)[1](p, x, batch)

    table[name] = Operation(weights, run, options, flat, share)
    return make

  return register


# What a model reads.


@operation(INPUTS, "embedding", flat=True, share=2, position=(False, True), scaled=(False, True))
def _embedding(o: Options) -> Any:
  weights = {"table": weight("vocab embed", VOCAB, o["width"], fan=4)}
  if o["position"] and not o["flat"]:
    weights["position"] = weight("- embed", o["length"], o["width"], fan=16)

  def run(p: Arrays, _: Any, batch: Arrays) -> Any:
    x = p["table"][batch["tokens"]]
    x = x * math.sqrt(o["width"]) if o["scaled"] else x
    return x + p["position"] if "position" in p else x

  return weights, run


@operation(INPUTS, "features", flat=True, share=2)
def _features(o: Options) -> Any:
  return {}, lambda p, _, batch: batch["features"]


@operation(INPUTS, "projection", flat=True, share=0.5, bias=(False, True))
def _projection(o: Options) -> Any:
  weights = {"w": weight("- embed", o["width"], o["width"])}
  if o["bias"]:
    weights["b"] = weight("embed", o["width"], fan=4)
  return weights, lambda p, _, batch: batch["features"] @ p["w"] + p.get("b", 0)


# Blocks.

_ACTIVATIONS = {
  "gelu": jax.nn.gelu,
  "relu": jax.nn.relu,
  "silu": jax.nn.silu,
  "tanh": jnp.tanh,
  "none": lambda x: x,
}


def _rms(x: Any, axes: Any = -1) -> Any:
  return x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + 1e-6)


def _standard(x: Any, axes: Any = -1) -> Any:
  centred = x - x.mean(axes, keepdims=True)
  return centred * jax.lax.rsqrt((centred * centred).mean(axes, keepdims=True) + 1e-6)


@operation(BLOCKS, "scale", flat=True, bias=(False, True))
def _scale(o: Options) -> Any:
  weights = {"s": weight("norm", o["width"], fan=0)}
  if o["bias"]:
    weights["b"] = weight("norm", o["width"], fan=4)
  return weights, lambda p, x, _: x * p["s"] + p.get("b", 0)


@operation(
  BLOCKS,
  "norm",
  flat=True,
  share=2,
  kind=("rms", "layer", "group", "batch", "instance", "l2"),
  bias=(False, True),
)
def _norm(o: Options) -> Any:
  weights = {"s": weight("norm", o["width"], fan=0)}
  if o["bias"]:
    weights["b"] = weight("norm", o["width"], fan=4)

  def normed(x: Any) -> Any:
    kind = o["kind"]
    if kind == "rms":
      return _rms(x)
    if kind == "l2":
      return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) * 4
    if kind == "group":
      return _standard(x.reshape(*x.shape[:-1], 4, -1)).reshape(x.shape)
    if kind == "batch":
      return _standard(x, tuple(range(x.ndim - 1)))
    if kind == "instance" and x.ndim > 2:
      return _standard(x, 1)
    return _standard(x)

  return weights, lambda p, x, _: normed(x) * p["s"] + p.get("b", 0)


@operation(BLOCKS, "dense", flat=True, activation=tuple(_ACTIVATIONS), bias=(False, True))
def _dense(o: Options) -> Any:
  weights = {"w": weight("embed mlp", o["width"], o["width"])}
  if o["bias"]:
    weights["b"] = weight("mlp", o["width"], fan=4)
  return weights, lambda p, x, _: _ACTIVATIONS[o["activation"]](x @ p["w"] + p.get("b", 0))


@operation(
  BLOCKS, "mlp", flat=True, share=2, activation=tuple(_ACTIVATIONS), bias=(False, True), norm=(False, True)
)
def _mlp(o: Options) -> Any:
  weights = {
    "up": weight("embed mlp", o["width"], o["hidden"]),
    "down": weight("mlp embed", o["hidden"], o["width"]),
  }
  if o["norm"]:
    weights["s"] = weight("norm", o["width"], fan=0)
  if o["bias"]:
    weights["b"] = weight("mlp", o["hidden"], fan=4)

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    x = _rms(x) * p["s"] if o["norm"] else x
    return _ACTIVATIONS[o["activation"]](x @ p["up"] + p.get("b", 0)) @ p["down"]

  return weights, run


@operation(BLOCKS, "gated mlp", flat=True, share=2, fused=("no", "flat", "stacked"), norm=(False, True))
def _gated(o: Options) -> Any:
  wide, hidden = o["width"], o["hidden"]
  if o["fused"] == "no":
    weights = {"gate": weight("embed mlp", wide, hidden), "up": weight("embed mlp", wide, hidden)}
  elif o["fused"] == "flat":
    weights = {"both": weight("embed mlp", wide, 2 * hidden)}
  else:
    weights = {"both": weight("embed - mlp", wide, 2, hidden)}
  weights["down"] = weight("mlp embed", hidden, wide)
  if o["norm"]:
    weights["s"] = weight("norm", wide, fan=0)

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    x = _rms(x) * p["s"] if o["norm"] else x
    if o["fused"] == "no":
      gate, up = x @ p["gate"], x @ p["up"]
    elif o["fused"] == "flat":
      gate, up = jnp.split(x @ p["both"], 2, -1)
    else:
      both = jnp.einsum("...d,dkf->...kf", x, p["both"])
      gate, up = both[..., 0, :], both[..., 1, :]
    return (jax.nn.silu(gate) * up) @ p["down"]

  return weights, run


@operation(
  BLOCKS,
  "attention",
  share=3,
  kernels=("split", "flat", "fused"),
  keys=(8, 4, 2, 1),
  causal=(True, False),
  norm=(False, True),
  query_norm=(False, True),
  rotary=(False, True),
  bias=(False, True),
)
def _attention(o: Options) -> Any:
  wide, heads, keys = o["width"], 8, o["keys"]
  size = max(2, wide // heads)
  if o["kernels"] == "split":
    weights = {
      "q": weight("embed heads -", wide, heads, size),
      "k": weight("embed heads -", wide, keys, size),
      "v": weight("embed heads -", wide, keys, size),
      "o": weight("heads - embed", heads, size, wide, fan=heads * size),
    }
  else:
    weights = {"o": weight("heads embed", heads * size, wide)}
    if o["kernels"] == "flat":
      weights |= {
        "q": weight("embed heads", wide, heads * size),
        "k": weight("embed heads", wide, keys * size),
        "v": weight("embed heads", wide, keys * size),
      }
    else:
      weights["qkv"] = weight("embed heads", wide, (heads + 2 * keys) * size)
  if o["norm"]:
    weights["s"] = weight("norm", wide, fan=0)
  if o["query_norm"]:
    weights["qs"] = weight("-", size, fan=0)
  if o["bias"]:
    weights["b"] = weight("heads -", heads, size, fan=4)

  def split(x: Any, count: int) -> Any:
    return x.reshape(*x.shape[:-1], count, size)

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    x = _rms(x) * p["s"] if o["norm"] else x
    if o["kernels"] == "split":
      q, k, v = (jnp.einsum("bld,dhk->blhk", x, p[name]) for name in "qkv")
    elif o["kernels"] == "flat":
      q, k, v = split(x @ p["q"], heads), split(x @ p["k"], keys), split(x @ p["v"], keys)
    else:
      q, k, v = jnp.split(x @ p["qkv"], (heads * size, (heads + keys) * size), -1)
      q, k, v = split(q, heads), split(k, keys), split(v, keys)
    q = q + p["b"] if o["bias"] else q
    if o["query_norm"]:
      q, k = _rms(q) * p["qs"], _rms(k) * p["qs"]
    if o["rotary"]:
      q, k = _rotated(q), _rotated(k)
    q = q.reshape(*q.shape[:2], keys, heads // keys, size)
    scores = jnp.einsum("blkgh,bmkh->bkglm", q, k) / math.sqrt(size)
    if o["causal"]:
      scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bkglm,bmkh->blkgh", jax.nn.softmax(scores, -1), v)
    mixed = mixed.reshape(*x.shape[:2], heads, size)
    if o["kernels"] == "split":
      return jnp.einsum("blhk,hkd->bld", mixed, p["o"])
    return mixed.reshape(*x.shape[:2], heads * size) @ p["o"]

  return weights, run


def _rotated(x: Any) -> Any:
  half = x.shape[-1] // 2
  angle = jnp.arange(x.shape[1])[:, None, None] * (1.0 / (1 + jnp.arange(half)))
  a, b = x[..., :half], x[..., half:]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _convolve(x: Any, kernel: Any, stride: int, dilation: int, groups: int) -> Any:
  space = "HW"[2 - (x.ndim - 2) :]
  numbers = ("N" + space + "C", space + "IO", "N" + space + "C")
  ones = (1,) * len(space)
  return jax.lax.conv_general_dilated(
    x,
    kernel,
    tuple(stride * n for n in ones),
    "SAME",
    rhs_dilation=tuple(dilation * n for n in ones),
    dimension_numbers=numbers,
    feature_group_count=groups,
  )


@operation(
  BLOCKS,
  "conv",
  share=1.5,
  taps=(3, 1),
  two=(False, True),
  stride=(1, 2),
  dilation=(1, 2),
  norm=(False, True),
)
def _conv(o: Options) -> Any:
  taps = (o["taps"],) * (2 if o["two"] else 1)
  wide, count = o["width"], math.prod(taps)
  weights = {"k": weight("- " * len(taps) + "embed mlp", *taps, wide, wide, fan=wide * count)}
  if o["norm"]:
    weights["s"] = weight("norm", wide, fan=0)

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    shape = x.shape
    x = x.reshape(shape[0], 2, shape[1] // 2, wide) if o["two"] else x
    x = jax.nn.relu(_convolve(x, p["k"], o["stride"], o["dilation"], 1))
    if o["stride"] == 2:
      for dim in range(1, x.ndim - 1):
        x = jnp.repeat(x, 2, dim)
    x = _standard(x, tuple(range(x.ndim - 1))) * p["s"] if o["norm"] else x
    return x.reshape(shape)

  return weights, run


@operation(BLOCKS, "grouped conv", share=0.3, taps=(3, 1), groups=("all", 2, 4), dilation=(1, 2))
def _grouped_conv(o: Options) -> Any:
  groups = o["width"] if o["groups"] == "all" else o["groups"]
  weights = {"k": weight("- - mlp", o["taps"], o["width"] // groups, o["width"], fan=o["taps"])}
  return weights, lambda p, x, _: jnp.tanh(_convolve(x, p["k"], 1, o["dilation"], groups))


@operation(BLOCKS, "transposed conv", share=0.7, taps=(3, 2))
def _transposed_conv(o: Options) -> Any:
  wide = o["width"]
  weights = {"k": weight("- embed mlp", o["taps"], wide, wide, fan=wide * o["taps"])}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    y = jax.lax.conv_transpose(x, p["k"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return y.reshape(x.shape[0], x.shape[1], 2, wide).mean(2)

  return weights, run


@operation(BLOCKS, "pool", kind=("max", "mean", "strided"))
def _pool(o: Options) -> Any:
  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    window, step = (1, 2, 1), (1, 2 if o["kind"] == "strided" else 1, 1)
    if o["kind"] == "mean":
      y = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, step, "SAME") / 2
    else:
      y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, step, "SAME")
    return (jnp.repeat(y, 2, 1) if o["kind"] == "strided" else y) * p["s"]

  return {"s": weight("norm", o["width"], fan=0)}, run


@operation(BLOCKS, "gather", kind=("tokens", "length", "examples", "along", "width"))
def _gather(o: Options) -> Any:
  kind = o["kind"]
  rows = VOCAB if kind == "tokens" else o["width"]
  weights = {"table": weight("vocab embed", rows, o["width"], fan=4 if kind == "tokens" else rows)}

  def run(p: Arrays, x: Any, batch: Arrays) -> Any:
    if kind == "tokens":
      return x + jnp.take(p["table"], batch["tokens"], axis=0)
    if kind == "along":
      order = jnp.argsort(jax.lax.stop_gradient(x), axis=1)
      return jnp.take_along_axis(x, order, axis=1) @ p["table"]
    dim = {"examples": 0, "length": 1, "width": 2}[kind]
    order = np.random.default_rng(0).permutation(x.shape[dim])
    return jnp.take(x, order, axis=dim) @ p["table"]

  return weights, run


@operation(BLOCKS, "scatter", kind=("segments", "set", "max", "rows"))
def _scatter(o: Options) -> Any:
  kind = o["kind"]
  weights = {"w": weight("embed mlp", o["width"], o["width"])}
  if kind == "rows":
    weights["table"] = weight("vocab embed", VOCAB, o["width"], fan=4)

  def run(p: Arrays, x: Any, batch: Arrays) -> Any:
    y, tokens = x @ p["w"], batch["tokens"]
    if kind == "segments":
      return jnp.zeros((VOCAB, x.shape[-1])).at[tokens].add(y)[tokens] / 4
    if kind == "rows":
      return p["table"].at[tokens].add(y / 8)[tokens]
    if kind == "max":
      return jnp.zeros((VOCAB, x.shape[-1])).at[tokens[:, 0]].max(y[:, 0])[tokens]
    return x.at[:, 1].set(y[:, 0])

  return weights, run


@operation(BLOCKS, "cumulative", kind=("sum", "width", "logsumexp", "associative", "product"))
def _cumulative(o: Options) -> Any:
  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    kind = o["kind"]
    if kind == "sum":
      return jnp.cumsum(x, 1) * p["s"] / 3
    if kind == "width":
      return jnp.cumsum(x * p["s"], -1) / 4
    if kind == "logsumexp":
      return jax.lax.cumlogsumexp(x * p["s"], 1)
    if kind == "product":
      return jnp.cumprod(jnp.tanh(x * p["s"]) + 0.5, 1)
    decay = jnp.broadcast_to(jax.nn.sigmoid(p["s"]), x.shape)
    return jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, x), axis=1)[1]

  return {"s": weight("norm", o["width"], fan=0)}, run


@operation(BLOCKS, "sort", kind=("width", "length", "top", "mask", "max"))
def _sort(o: Options) -> Any:
  wide = o["width"]
  weights = {"w": weight("embed mlp", wide, wide)}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    kind, y = o["kind"], x @ p["w"]
    if kind == "top":
      values, places = jax.lax.top_k(y, 4)
      return (jax.nn.one_hot(places, wide) * values[..., None]).sum(-2)
    if kind == "mask":
      return jnp.where(y >= jax.lax.top_k(y, 4)[0][..., -1:], y, 0.0)
    if kind == "max":
      return y.max(-1, keepdims=True) * x
    return jnp.sort(y, 1 if kind == "length" else -1)

  return weights, run


@operation(BLOCKS, "layers", flat=True, share=1.5, count=(2, 4, 8), norm=(False, True), remat=(False, True))
def _layers(o: Options) -> Any:
  wide, hidden, count = o["width"], o["hidden"], o["count"]
  weights = {
    "up": weight("layers embed mlp", count, wide, hidden, fan=wide),
    "down": weight("layers mlp embed", count, hidden, wide, fan=hidden),
  }
  if o["norm"]:
    weights["s"] = weight("layers norm", count, wide, fan=0)

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    def layer(x: Any, own: Arrays) -> tuple[Any, None]:
      y = _rms(x) * own["s"] if o["norm"] else x
      return x + jnp.tanh(y @ own["up"]) @ own["down"], None

    return jax.lax.scan(jax.checkpoint(layer) if o["remat"] else layer, x, p)[0]

  return weights, run


@operation(BLOCKS, "recurrent", kind=("rnn", "gated", "state"), reverse=(False, True))
def _recurrent(o: Options) -> Any:
  wide, kind = o["width"], o["kind"]
  if kind == "state":
    weights = {
      "a": weight("norm", wide, fan=4),
      "b": weight("embed -", wide, 8),
      "c": weight("embed -", wide, 8),
    }
  else:
    gates = 2 if kind == "gated" else 1
    weights = {
      "x": weight("embed mlp", wide, gates * wide),
      "h": weight("embed mlp", wide, gates * wide),
      "b": weight("mlp", gates * wide, fan=4),
    }

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    def step(state: Any, now: Any) -> tuple[Any, Any]:
      if kind == "state":
        decay = jax.nn.sigmoid(now * p["a"])
        state = decay[..., None] * state + now[..., None] * (now @ p["b"])[:, None, :]
        return state, jnp.einsum("bdn,bn->bd", state, now @ p["c"])
      made = now @ p["x"] + state @ p["h"] + p["b"]
      if kind == "gated":
        keep, new = jnp.split(made, 2, -1)
        state = jax.nn.sigmoid(keep) * state + (1 - jax.nn.sigmoid(keep)) * jnp.tanh(new)
      else:
        state = jnp.tanh(made)
      return state, state

    first = jnp.zeros((x.shape[0], wide, 8) if kind == "state" else (x.shape[0], wide))
    rows = jax.lax.scan(step, first, jnp.swapaxes(x, 0, 1), reverse=o["reverse"])[1]
    return jnp.swapaxes(rows, 0, 1)

  return weights, run


@operation(BLOCKS, "branch", flat=True, kind=("cond", "switch", "where"))
def _branch(o: Options) -> Any:
  wide = o["width"]
  weights = {"a": weight("embed mlp", wide, wide), "b": weight("mlp embed", wide, wide)}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    def one(y: Any) -> Any:
      return jnp.tanh(y @ p["a"])

    def other(y: Any) -> Any:
      return jnp.sin(y @ p["b"]) * 0.5

    if o["kind"] == "where":
      return jnp.where(x.mean(-1, keepdims=True) > 0, one(x), other(x))
    if o["kind"] == "cond":
      return jax.lax.cond(x.mean() > 0, one, other, x)
    return jax.lax.switch((x.sum() > 0).astype(jnp.int32), [one, other, lambda y: y], x)

  return weights, run


@operation(BLOCKS, "concatenation", kind=("width", "prefix", "heads", "token"))
def _concatenation(o: Options) -> Any:
  wide, kind = o["width"], o["kind"]
  if kind in ("prefix", "token"):
    weights = {
      "p": weight("- embed", 8 if kind == "prefix" else 1, wide, fan=4),
      "w": weight("embed mlp", wide, wide),
    }
  else:
    weights = {"a": weight("embed mlp", wide, wide // 2), "b": weight("embed mlp", wide, wide // 2)}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    if kind == "width":
      return jnp.concatenate([x @ p["a"], jnp.tanh(x @ p["b"])], -1)
    if kind == "heads":
      return jnp.stack([x @ p["a"], jnp.tanh(x @ p["b"])], -1).reshape(x.shape)
    first = jnp.broadcast_to(p["p"], (x.shape[0], *p["p"].shape))
    y = jnp.tanh(jnp.concatenate([first, x], 1) @ p["w"])
    y = jnp.cumsum(y, 1) / 4
    return y[:, first.shape[1] :]

  return weights, run


@operation(BLOCKS, "reshape", kind=("examples", "mixer", "halves", "folded", "image", "patches"))
def _reshape(o: Options) -> Any:
  wide, long, kind = o["width"], o["length"], o["kind"]
  shapes = {
    "mixer": weight("- -", long, long),
    "halves": weight("embed mlp", wide // 2, wide // 2),
    "folded": weight("- -", long * 4, long * 4),
    "patches": weight("embed mlp", wide * 2, wide * 2),
  }
  weights = {"w": shapes.get(kind, weight("embed mlp", wide, wide))}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    w = p["w"]
    if kind == "examples":
      return (x.reshape(-1, wide) @ w).reshape(x.shape)
    if kind == "mixer":
      return jnp.swapaxes(jnp.swapaxes(x, 1, 2) @ w, 1, 2)
    if kind == "halves":
      return (x.reshape(*x.shape[:-1], 2, wide // 2) @ w).reshape(x.shape)
    if kind == "folded":
      y = x.reshape(x.shape[0], long * 4, wide // 4)
      return jnp.einsum("bid,ij->bjd", y, w).reshape(x.shape)
    if kind == "patches":
      return (x.reshape(x.shape[0], long // 2, 2 * wide) @ w).reshape(x.shape)
    y = x.reshape(x.shape[0], 2, long // 2, wide).transpose(0, 2, 1, 3).reshape(x.shape)
    return y @ w

  return weights, run


@operation(BLOCKS, "shift", kind=("pad", "roll", "examples", "dynamic", "edges", "interior", "flip"))
def _shift(o: Options) -> Any:
  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    kind, y = o["kind"], x * p["s"]
    if kind == "pad":
      return x + jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    if kind == "roll":
      return x + jnp.roll(y, 1, 1)
    if kind == "examples":
      return x + jnp.roll(y, 1, 0)
    if kind == "dynamic":
      return jax.lax.dynamic_update_slice(x, y[:, :1] * 2, (0, 3, 0))
    if kind == "flip":
      return x + y[:, ::-1]
    if kind == "interior":
      return x + jax.lax.pad(y[:, ::2], 0.0, ((0, 0, 0), (0, 1, 1), (0, 0, 0)))
    return jnp.pad(y, ((0, 0), (2, 2), (0, 0)), mode="edge")[:, 2:-2] + y.mean(1, keepdims=True)

  return {"s": weight("norm", o["width"], fan=0)}, run


@operation(BLOCKS, "half", flat=True, share=0.5, dtype=("bfloat16", "float16"))
def _half(o: Options) -> Any:
  wide, hidden = o["width"], o["hidden"]
  weights = {"up": weight("embed mlp", wide, hidden), "down": weight("mlp embed", hidden, wide)}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    low = jnp.dtype(o["dtype"])
    y = jax.nn.gelu(x.astype(low) @ p["up"].astype(low)) @ p["down"].astype(low)
    return y.astype(x.dtype)

  return weights, run


@operation(BLOCKS, "experts", flat=True, share=1.5, kind=("soft", "top", "capacity"), norm=(False, True))
def _experts(o: Options) -> Any:
  wide, hidden, count, room = o["width"], o["hidden"], 8, 8
  weights = {
    "router": weight("embed -", wide, count),
    "up": weight("expert embed mlp", count, wide, hidden, fan=wide),
    "down": weight("expert mlp embed", count, hidden, wide, fan=hidden),
  }
  if o["norm"]:
    weights["s"] = weight("norm", wide, fan=0)

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    x = _rms(x) * p["s"] if o["norm"] else x
    chances = jax.nn.softmax(x @ p["router"], -1)
    if o["kind"] != "soft":
      best, places = jax.lax.top_k(chances, 2)
      chances = (jax.nn.one_hot(places, count) * best[..., None]).sum(-2)
    if o["kind"] != "capacity":
      y = jax.nn.silu(jnp.einsum("...d,edf->...ef", x, p["up"]))
      return jnp.einsum("...ef,efd,...e->...d", y, p["down"], chances)
    rows, chances = x.reshape(-1, wide), chances.reshape(-1, count)
    place = jnp.cumsum(chances > 0, 0) - 1
    send = (chances > 0)[..., None] * jax.nn.one_hot(place, room)
    y = jax.nn.silu(jnp.einsum("nec,nd,edf->ecf", send, rows, p["up"]))
    y = jnp.einsum("ecf,efd->ecd", y, p["down"])
    return jnp.einsum("ecd,nec,ne->nd", y, send, chances).reshape(x.shape)

  return weights, run


@jax.custom_vjp
def _product(x: Any, w: Any) -> Any:
  return x @ w


def _product_bwd(kept: Any, g: Any) -> Any:
  x, w = kept
  return g @ w.T, jnp.einsum("...d,...f->df", x, g)


_product.defvjp(lambda x, w: (x @ w, (x, w)), _product_bwd)


@jax.custom_vjp
def _scaled(x: Any, s: Any) -> Any:
  return x * s


_scaled.defvjp(
  lambda x, s: (x * s, (x, s)), lambda k, g: (g * k[1], (g * k[0]).sum(tuple(range(g.ndim - 1))))
)


@operation(BLOCKS, "custom gradient", flat=True, kind=("product", "scale"), remat=(False, True))
def _custom(o: Options) -> Any:
  weights = {"s": weight("norm", o["width"], fan=0)}
  if o["kind"] == "product":
    weights["w"] = weight("embed mlp", o["width"], o["width"])

  def inner(p: Arrays, x: Any) -> Any:
    y = _scaled(_rms(x), p["s"])
    return jnp.tanh(_product(y, p["w"]) if "w" in p else y)

  return weights, lambda p, x, _: (jax.checkpoint(inner) if o["remat"] else inner)(p, x)


@operation(BLOCKS, "adapter", flat=True, frozen=(False, True))
def _adapter(o: Options) -> Any:
  wide = o["width"]
  weights = {
    "w": weight("embed mlp", wide, wide),
    "a": weight("embed -", wide, 8),
    "b": weight("- mlp", 8, wide),
  }

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    w = jax.lax.stop_gradient(p["w"]) if o["frozen"] else p["w"]
    return x @ w + x @ p["a"] @ p["b"]

  return weights, run


@operation(BLOCKS, "bilinear", kind=("pairs", "summary", "outer"))
def _bilinear(o: Options) -> Any:
  wide = o["width"]
  weights = {"w": weight("embed mlp", wide, wide), "s": weight("norm", wide, fan=0)}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    y = jnp.tanh(x @ p["w"])
    if o["kind"] == "pairs":
      return jnp.einsum("bld,bme,ble->bmd", x, x, y) / 64 * p["s"]
    if o["kind"] == "summary":
      return x * jax.nn.sigmoid(y.mean(1, keepdims=True) * p["s"])
    return jnp.einsum("bld,ble,e->bld", x, y, p["s"]) / 8

  return weights, run


@operation(BLOCKS, "dropout", flat=True)
def _dropout(o: Options) -> Any:
  def run(p: Arrays, x: Any, batch: Arrays) -> Any:
    keep = jax.random.bernoulli(jax.random.key(7), 0.8, x.shape)
    return jnp.where(keep, x / 0.8, 0.0) @ p["w"]

  return {"w": weight("embed mlp", o["width"], o["width"])}, run


@operation(BLOCKS, "upsampled conv", share=0.7, taps=(4, 2, 8), stride=(1, 2))
def _upsampled_conv(o: Options) -> Any:
  wide, taps = o["width"], o["taps"]
  weights = {"k": weight("- embed mlp", taps, wide, wide, fan=wide * taps)}

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    y = jax.lax.conv_general_dilated(
      x,
      p["k"],
      (o["stride"],),
      ((taps // 2, taps - taps // 2),),
      lhs_dilation=(2,),
      dimension_numbers=("NWC", "WIO", "NWC"),
    )
    return y.reshape(*x.shape[:2], -1, wide).mean(2)

  return weights, run


@operation(
  BLOCKS,
  "shard map",
  share=1.5,
  kind=("sine", "product", "mean", "ring"),
  axis=("tensor", "fsdp", "data"),
  dim=(2, 1, 0),
  alone=(True, False),
)
def _shard_map(o: Options) -> Any:
  """A program by hand over one axis: the others are left to the compiler, or are manual too."""
  kind, axis = o["kind"], o["axis"]
  dim = 2 if kind == "product" else 1 if kind in ("mean", "ring") else o["dim"]
  spec = jax.sharding.PartitionSpec(*(axis if d == dim else None for d in range(3)))
  rows = jax.sharding.PartitionSpec(axis) if kind == "product" else jax.sharding.PartitionSpec()

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

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.shape or x.shape[dim] % mesh.shape[axis]:
      return local(x, p["w"], 1)
    mapped = jax.shard_map(
      functools.partial(local, size=mesh.shape[axis]),
      mesh=mesh,
      in_specs=(spec, rows),
      out_specs=jax.sharding.PartitionSpec() if kind == "product" else spec,
      axis_names={axis} if o["alone"] else set(mesh.axis_names),
    )
    return mapped(x, p["w"])

  return {"w": weight("embed mlp", o["width"], o["width"])}, run


# XLA's CPU backend ends the process on some layouts of it, whoever made the program.
@operation(BLOCKS, "fourier", share=0.1, dim=(1, 2))
def _fourier(o: Options) -> Any:
  weights = {"w": weight("embed mlp", o["width"], o["width"])}
  return weights, lambda p, x, _: jnp.fft.fft(x @ p["w"], axis=o["dim"]).real / math.sqrt(x.shape[o["dim"]])


@operation(BLOCKS, "nested jit", flat=True, twice=(False, True))
def _nested(o: Options) -> Any:
  @jax.jit
  def inner(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)

  @jax.jit
  def outer(x: Any, w: Any) -> Any:
    y = inner(x, w)
    return inner(y, w) if o["twice"] else y

  return {"w": weight("embed mlp", o["width"], o["width"])}, lambda p, x, _: outer(x, p["w"])


@operation(BLOCKS, "custom gradient in a loop", flat=True, kind=("scan", "fori", "map"), count=(2, 3))
def _custom_in_a_loop(o: Options) -> Any:
  weights = {"w": weight("- embed mlp", o["count"], o["width"], o["width"], fan=o["width"])}

  def step(x: Any, w: Any) -> Any:
    return jnp.tanh(_product(x, w))

  def run(p: Arrays, x: Any, _: Arrays) -> Any:
    if o["kind"] == "scan":
      return jax.lax.scan(lambda x, w: (step(x, w), None), x, p["w"])[0]
    if o["kind"] == "fori":
      return jax.lax.fori_loop(0, o["count"], lambda n, x: step(x, p["w"][n]), x)
    return jax.lax.map(lambda w: step(x, w), p["w"]).mean(0)

  return weights, run


# Losses.


def _mean(losses: Any, batch: Arrays, masked: bool) -> Any:
  if not masked:
    return losses.mean()
  mask = batch["tokens"] % 5 != 0
  return jnp.where(mask, losses, 0.0).sum() / mask.sum()


@operation(
  LOSSES,
  "cross-entropy",
  flat=True,
  share=2,
  tied=(False, True),
  kind=("log softmax", "one-hot", "logsumexp"),
  masked=(False, True),
  norm=(False, True),
)
def _cross_entropy(o: Options) -> Any:
  weights = {} if o["tied"] else {"w": weight("embed vocab", o["width"], VOCAB)}
  if o["norm"]:
    weights["s"] = weight("norm", o["width"], fan=0)

  def run(p: Arrays, x: Any, batch: Arrays) -> Any:
    x = _rms(x) * p["s"] if o["norm"] else x
    logits = x @ p["table"].T if o["tied"] else x @ p["w"]
    targets = batch["targets"]
    if o["kind"] == "one-hot":
      losses = -(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, VOCAB)).sum(-1)
    elif o["kind"] == "log softmax":
      losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    else:
      losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return _mean(losses, batch, o["masked"])

  return weights, run


@operation(LOSSES, "sine", flat=True, share=2)
def _sine(o: Options) -> Any:
  return {}, lambda p, x, _: 1 + jnp.sin(x).sum() / x.shape[0]


@operation(LOSSES, "squares", flat=True, share=1)
def _squares(o: Options) -> Any:
  return {}, lambda p, x, batch: jnp.square(x - batch["features"]).mean()


@operation(LOSSES, "classes", share=0.7, pool=("mean", "first", "last", "max"))
def _classes(o: Options) -> Any:
  weights = {"w": weight("embed vocab", o["width"], VOCAB), "b": weight("vocab", VOCAB, fan=4)}

  def run(p: Arrays, x: Any, batch: Arrays) -> Any:
    pooled = {
      "mean": lambda: x.mean(1),
      "first": lambda: x[:, 0],
      "last": lambda: x[:, -1],
      "max": lambda: x.max(1),
    }
    logits = pooled[o["pool"]]() @ p["w"] + p["b"]
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(batch["targets"][:, 0], VOCAB)).sum(-1).mean()

  return weights, run


@operation(LOSSES, "contrastive", share=0.5)
def _contrastive(o: Options) -> Any:
  def run(p: Arrays, x: Any, batch: Arrays) -> Any:
    a = _rms(x.mean(1)) / 2
    b = _rms(batch["features"].mean(1) @ p["w"]) / 2
    return -jnp.diagonal(jax.nn.log_softmax(a @ b.T)).mean()

  return {"w": weight("embed mlp", o["width"], o["width"])}, run


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
  sizes = {
    "batch": rng.choice((8, 8, 16)),
    "length": 8,
    "width": rng.choice((16, 16, 32)),
    "hidden": rng.choice((16, 32)),
    "flat": flat,
  }
  ordinary = {name: BLOCKS[name] for name in ORDINARY}
  blocks = [_draw(rng, ordinary, flat) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
  blocks += [_draw(rng, BLOCKS, flat) for _ in range(rng.choice((0, 0, 1, 1)))]
  if rng.random() < 0.2:
    rng.shuffle(blocks)
  for block in blocks:
    block["residual"] = rng.random() < 0.5
  program = {
    "sizes": sizes,
    "input": _draw(rng, INPUTS, flat),
    "blocks": blocks,
    "loss": _draw(rng, LOSSES, flat),
  }
  loss = program["loss"]
  if loss.get("tied") and program["input"]["op"] != "embedding":
    loss["tied"] = False
  return program


def _draw_small(rng: random.Random) -> Program:
  """One block of any kind, mostly with a plain one before or behind it; such a program compiles fast."""
  flat = rng.random() < 0.4
  sizes = {
    "batch": rng.choice((8, 16)),
    "length": 8,
    "width": rng.choice((8, 16, 32)),
    "hidden": 16,
    "flat": flat,
  }
  blocks = [_draw(rng, BLOCKS, flat)]
  if rng.random() < 0.8:
    blocks.insert(rng.choice((0, 1)), _draw(rng, {name: BLOCKS[name] for name in PLAIN}, flat))
  for block in blocks:
    block["residual"] = rng.random() < 0.4
  return {"sizes": sizes, "input": {"op": "features"}, "blocks": blocks, "loss": {"op": "sine"}}


def _draw(rng: random.Random, table: Mapping[str, Operation], flat: bool) -> dict[str, Any]:
  names = [name for name, op in table.items() if op.flat or not flat]
  (name,) = rng.choices(names, [table[name].share for name in names])
  options = table[name].options.items()
  return {"op": name} | {o: values[0] if rng.random() < 0.3 else rng.choice(values) for o, values in options}


def _parts(program: Program) -> list[tuple[str, Operation, dict[str, Any]]]:
  """The pieces of a program in order: the prefix of their parameters, the operation, and its options."""
  sizes = program["sizes"]
  parts = [("in", INPUTS, program["input"])]
  parts += [(f"b{i}", BLOCKS, block) for i, block in enumerate(program["blocks"])]
  parts += [("out", LOSSES, program["loss"])]
  return [(prefix, table[piece["op"]], {**sizes, **piece}) for prefix, table, piece in parts]


def weights_of(program: Program) -> dict[str, Weight]:
  """Its parameters: `b0_up` is `up` of the first block."""
  return {
    f"{prefix}_{name}": found
    for prefix, op, options in _parts(program)
    for name, found in op.weights(options).items()
  }


def values_of(program: Program, seed: int) -> tuple[Arrays, Arrays]:
  """Parameters and a batch, as numpy arrays."""
  rng = np.random.default_rng(seed)
  params = {name: found.draw(rng) for name, found in weights_of(program).items()}
  sizes = program["sizes"]
  shape = (sizes["batch"],) if sizes["flat"] else (sizes["batch"], sizes["length"])
  batch = {
    "tokens": rng.integers(VOCAB, size=shape, dtype=np.int32),
    "targets": rng.integers(VOCAB, size=shape, dtype=np.int32),
    "features": rng.standard_normal((*shape, sizes["width"])).astype(np.float32),
  }
  return params, batch


def loss_of(program: Program, params: Arrays, batch: Arrays, hold: Callable[[Any], Any] = lambda x: x) -> Any:
  """Runs a program.

  Args:
    program: what `draw` made.
    params: its parameters by name.
    batch: tokens, targets and features.
    hold: applied to the activations after the input and after each block.

  Returns:
    A scalar.
  """
  x: Any = None
  for prefix, op, options in _parts(program):
    own = {name.split("_", 1)[1]: p for name, p in params.items() if name.split("_", 1)[0] == prefix}
    if options.get("tied"):
      own["table"] = params["in_table"]
    y = op.run(own, x, options, batch)
    if prefix == "out":
      return y
    x = hold(x + y if options.get("residual") else y)
  raise AssertionError


# Layouts.

Layout = dict[str, Any]
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
MESHES = (
  *[CUBE] * 10,
  {"fsdp": 8},
  {"data": 8},
  {"fsdp": 2, "tensor": 4},
  {"fsdp": 4, "tensor": 2},
  {"data": 2, "tensor": 4},
  {"data": 4, "tensor": 2},
  {"data": 2, "fsdp": 4},
  {"data": 4, "fsdp": 2},
)
STYLES = ("usual", "fsdp", "beside", "beside", "random", "random", "random")


def draw_layout(program: Program, seed: int, number: int, style: str = "") -> Layout:
  """A random layout.

  Args:
    program: whose parameters it lays out.
    seed: of the program.
    number: of the layout.
    style: one of `STYLES`; drawn where it is empty. "usual" is Megatron's split over tensor and the rest over
      fsdp; "fsdp" splits the largest dim; "beside" is the usual one with up to two parameters laid out at
      random; "random" gives each parameter any axes that divide it.

  Returns:
    `mesh`, `batch` (axes of dim 0), `length` (axes of dim 1), `specs` and `style`.
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


def _batch_axes(
  rng: random.Random, mesh: Mapping[str, int], style: str, sizes: Options
) -> tuple[list[str], list[str]]:
  """Those of the replicas and shards, mostly in the usual order; now and then any other."""
  usual = [axis for axis in ("data", "fsdp") if axis in mesh] or list(mesh)
  if rng.random() < (0.5 if style == "random" else 0.7):
    return usual, []
  chosen = [list(p) for n in range(len(mesh) + 1) for p in itertools.permutations(mesh, n)]
  batch = rng.choice([p for p in chosen if sizes["batch"] % math.prod(mesh[a] for a in p) == 0])
  rest = [axis for axis in mesh if axis not in batch]
  length = [rng.choice(rest)] if rest and not sizes["flat"] and rng.random() < 0.15 else []
  return batch, length


def _random_spec(
  rng: random.Random, shape: tuple[int, ...], mesh: Mapping[str, int], axes: Sequence[str] = AXES
) -> list[list[str]]:
  free = [axis for axis in axes if axis in mesh]
  rng.shuffle(free)
  spec: list[list[str]] = [[] for _ in shape]
  for axis in free:
    dims = [d for d, n in enumerate(shape) if n % (mesh[axis] * math.prod(mesh[a] for a in spec[d])) == 0]
    if dims and rng.random() < 0.7:
      spec[rng.choice(dims)].append(axis)
  return spec


def _largest(shape: tuple[int, ...], mesh: Mapping[str, int], split: Sequence[str]) -> list[list[str]]:
  axes = [axis for axis in split if axis in mesh]
  size = math.prod(mesh[axis] for axis in axes)
  spec: list[list[str]] = [[] for _ in shape]
  dims = [d for d, n in enumerate(shape) if n % size == 0]
  if dims:
    spec[max(dims, key=lambda d: shape[d])] = axes
  return spec


def _homes(rng: random.Random) -> dict[str, tuple[str, ...]]:
  """Mesh axes for each kind of dim, as rules of published models have them."""
  shards = rng.choice((("fsdp",), ("fsdp",), ("data", "fsdp")))
  return {
    "embed": shards,
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "vocab": rng.choice((("tensor",), ("tensor",), ("tensor", "fsdp"))),
    "norm": rng.choice(((), (), ("tensor",), shards)),
    "expert": rng.choice(((), ("tensor",), ("fsdp",), ("data",))),
    "layers": (),
  }


def _by_role(found: Weight, mesh: Mapping[str, int], homes: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
  taken: set[str] = set()
  spec: list[list[str]] = []
  for size, dim in zip(found.shape, found.dims, strict=True):
    axes = [axis for axis in homes.get(dim, ()) if axis in mesh and axis not in taken]
    axes = axes if size % math.prod(mesh[axis] for axis in axes) == 0 else []
    taken |= set(axes)
    spec.append(axes)
  return spec


@functools.lru_cache
def partition_spec(spec: Any) -> jax.sharding.PartitionSpec:
  return jax.sharding.PartitionSpec(
    *(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in spec)
  )


def spec_of(spec: Sequence[Sequence[str]]) -> jax.sharding.PartitionSpec:
  """A spec of a layout as jax has it."""
  return partition_spec(tuple(tuple(axes) for axes in spec))
