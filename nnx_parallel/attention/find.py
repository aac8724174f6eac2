"""Computes the attention of any model by blocks of its queries and keys, without an edit.

Attention is found in the trace of a loss: a product, whatever elementwise follows (a scale, masks, biases, a
soft cap, casts), `exp(x - max)`, its sum over the keys, and a product of the quotient with the values. It is
replaced by the same operations on blocks, with a running maximum and sum (arXiv:2112.05682, 2205.14135), so
that no array of the size queries x keys exists, forward or backward. For example

  softmax(where(rows >= columns, q @ k.T, -1e9)) @ v

of 1024 positions becomes a scan over the 3 of 4 tiles of 512 x 512 scores that the mask does not hide.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator, Hashable, Iterable
from typing import Any, Literal, get_args

import jax
from jax.sharding import AxisType

from nnx_parallel.attention.blocks import OVER_AXIS, NotAttention, Way, blocked
from nnx_parallel.attention.fused import by_kernel
from nnx_parallel.attention.kernels import kernel_in_use
from nnx_parallel.attention.sink import sink_masks
from nnx_parallel.attention.softmaxes import NotByBlocks, NotFused, Softmax, Softmaxes, named_dims
from nnx_parallel.core.checked import is_one_of
from nnx_parallel.core.interpret import inline_calls
from nnx_parallel.core.jaxprs import (
  CALLS,
  change_params,
  equations,
  has_rule,
  is_checkpoint,
  is_marked,
  open_jaxpr,
  params_of,
  program_of,
  without_unused,
)
from nnx_parallel.core.keys import identity
from nnx_parallel.core.types import ClosedJaxpr, Jaxpr, JaxprEqn, Program, Value
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.constrain import manual_too

AttentionName = Literal["blockwise", "fused", "ring", "ulysses"]
Attention = AttentionName | int | None
"""`"blockwise"`, or the block length; `"fused"`: a fused kernel where JAX has a suitable kernel; `"ring"`,
`"ulysses"`: blockwise too, over the mesh axis that shards positions; None: as written."""
WORDS: tuple[AttentionName, ...] = get_args(AttentionName)
BLOCK = 512
_INNER = (*CALLS, "scan", "while", "cond")
_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("axis of the positions", default=None)


@dataclasses.dataclass
class Found:
  """The attentions of a program: the rewritten ones, by why they use no kernel; and those as written.

  `kept` are rewritten, but their weights are read elsewhere too; `reasons` are of what is no attention.
  """

  taken: list[str | None] = dataclasses.field(default_factory=list[str | None])
  left: list[str] = dataclasses.field(default_factory=list[str])
  kept: list[str] = dataclasses.field(default_factory=list[str])
  reasons: list[str] = dataclasses.field(default_factory=list[str])

  def add(self, other: Found) -> None:
    """Adds the attentions of another program."""
    for field in dataclasses.fields(self):
      getattr(self, field.name).extend(getattr(other, field.name))

  def line(self, way: Way) -> str:
    """How many attentions were rewritten, out of how many, and why the rest were not."""
    count = len(self.taken) + len(self.left)
    text = f"{way}: {len(self.taken)}{f' of {count}' if self.left else ''} found"
    if way.kernel is not None:
      text = f"attention by the fused kernel: {self.taken.count(None)} of {count} found"
      why = _once(reason for reason in self.taken if reason is not None)
      text += f"; by blocks of {way.block}: {why}" if why else ""
    text += f"; as written: {_once(self.left)}" if self.left else ""
    if self.kept:
      text += f"; its scores or weights are read elsewhere too, so all of them exist: {_once(self.kept)}"
    return f"{text}; no fused kernel for this platform" if way.asked == "fused" and not way.kernel else text


def _once(reasons: Iterable[str]) -> str:
  return "; ".join(dict.fromkeys(reasons))


@contextlib.contextmanager
def queries_over(axis: str | None) -> Generator[None, None, None]:
  """Lets the devices of a mesh axis, which splits the positions, share the attention that is by blocks."""
  token = _AXIS.set(axis)
  try:
    yield
  finally:
    _AXIS.reset(token)


def check_attention(attention: Attention) -> None:
  """Raises a `TrainError` for an option that is not valid."""
  if attention is None or is_one_of(attention, [*WORDS]) or (type(attention) is int and attention > 0):
    return
  raise TrainError(
    f"attention={attention!r} is not a way to compute attention.",
    fix='attention="blockwise", or the length of the blocks: attention=256; "fused"; "ring"; "ulysses";'
    " None: as written.",
  )


def by_blocks(jaxpr: ClosedJaxpr, attention: Attention) -> tuple[ClosedJaxpr, str]:
  """The trace of a loss with its attention so computed, and a line on what was found; or a `TrainError`."""
  way, found = way_of(attention), Found()
  changed = rewrite(jaxpr, way, found, {})
  if way.is_over_axis and found.left:
    raise TrainError(
      f"attention={attention!r}: {way.axis}={way.size} cannot share an attention that was found.",
      details=_once(found.left),
      fix='dropout off, and lengths (attention="ring") or heads (attention="ulysses") that are'
      f' multiples of {way.size}; or attention="blockwise".',
    )
  if not found.taken:
    raise TrainError(
      f"attention={attention!r} finds no attention in the loss.",
      details=_once([*found.left, *found.reasons]) or "no softmax is followed by a product with values",
      fix="softmax(q k^T) v with dropout off, in jax.numpy, jax.nn.dot_product_attention or"
      " nnx.dot_product_attention; nxp.parallel.attention(q, k, v, scores=...); or leave attention out.",
    )
  return changed, found.line(way)


def way_of(attention: Attention) -> Way:
  """How attention is computed on the mesh that is active."""
  block = attention if isinstance(attention, int) else BLOCK
  kernel = kernel_in_use() if attention == "fused" else None
  mesh: Any = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  axis, mapped = _AXIS.get(), manual_too(mesh)
  if axis is not None and axis not in mapped and kinds.get(axis) == AxisType.Auto:
    return Way(attention, block, kernel, axis, mesh.shape[axis], mapped)
  if attention in OVER_AXIS:
    raise TrainError(
      f"attention={attention!r} needs a mesh axis that splits the positions.",
      details=f"mesh {dict(mesh.shape)}"
      + (f", whose axis {axis!r} is {kinds[axis].name}" if axis in kinds else ""),
      fix="nxp.make_mesh(data=2, context=4), and nxp.presets.context(), or a rule for `seq` on an axis that"
      " splits no weight; on Explicit axes, a model that states no shardings.",
    )
  return Way(attention, block, kernel, None, 1)


def rewrite(jaxpr: Program, way: Way, found: Found, layers: dict[Hashable, tuple[Program, Found]]) -> Any:
  """The program with its attention rewritten; equal layers share one. `found` receives what was found."""
  flat = inline_calls(jaxpr, opens_attention)
  body = sink_masks(flat.jaxpr)
  softmaxes = Softmaxes(body)
  eqns: dict[int, JaxprEqn] = {}
  matches: list[Softmax] = []
  identities: dict[int, Hashable] = {}
  here = Found()
  for eqn in body.eqns:
    if eqn.primitive.name == "exp":
      products = softmaxes.products(eqn, *named_dims(eqn.outvars[0].aval.shape))
      if not products and (reason := softmaxes.before_sum(eqn)) is not None:
        here.reasons.append(reason)
      for product in products:
        try:
          match = softmaxes.match(eqn, product)
          new, why = _replace(body, match, way)
        except NotByBlocks as problem:
          here.left.append(str(problem))
        except NotAttention as problem:
          here.reasons.append(str(problem))
        else:
          here.taken.append(why)
          if new is not None:
            eqns[id(product)] = new
            matches.append(match)
    elif is_marked(eqn):
      program = program_of(eqn)
      if id(program) not in identities:  # equal layers may be one program already
        identities[id(program)] = identity(program)
      layer = identities[id(program)]
      if layer not in layers:
        inside = Found()
        layers[layer] = rewrite(program, way, inside, layers), inside
      here.add(layers[layer][1])
      eqns[id(eqn)] = eqn.replace(params=eqn.params | {"jaxpr": layers[layer][0]})
    elif eqn.primitive.name in _INNER or is_checkpoint(eqn):
      inside = {key: _inner(value, way, here, layers) for key, value in params_of(eqn).items()}
      eqns[id(eqn)] = eqn.replace(params=change_params(eqn, inside))
  if here.taken:
    body = without_unused(body.replace(eqns=[eqns.get(id(eqn), eqn) for eqn in body.eqns]))
    remaining = {id(eqn) for eqn in body.eqns}
    for match in matches:
      if any(id(eqn) in remaining for eqn in (match.exp, *softmaxes.products_before(match.exp))):
        here.kept.append(str(match))
  found.add(here)
  if not here.taken:
    return jaxpr
  return flat.replace(jaxpr=body) if open_jaxpr(jaxpr) is not jaxpr or flat.consts else body


def _inner(value: Value, *args: Value) -> Value:
  if isinstance(value, tuple):
    return tuple(_inner(item, *args) for item in value)
  return rewrite(value, *args) if hasattr(open_jaxpr(value), "eqns") else value


def opens_attention(eqn: JaxprEqn) -> bool:
  """Whether an operation is a call whose operations may be part of an attention."""
  name = eqn.primitive.name
  if has_rule(eqn) and "bwd" not in params_of(eqn):  # jax.nn.softmax
    inside = {e.primitive.name for e in equations(program_of(eqn))}
    return {"reduce_max", "exp", "reduce_sum"} <= inside
  return name in CALLS and not is_marked(eqn)


def _replace(body: Jaxpr, match: Softmax, way: Way) -> tuple[JaxprEqn | None, str | None]:
  """The blockwise or fused operation of an attention, None for a single block; and why it has no kernel."""
  if way.kernel is None:
    return blocked(body, match, way), ""
  try:
    return by_kernel(body, match, way.kernel, zeros=way.zeros), None
  except NotFused as problem:
    return blocked(body, match, way), f"{match}: {problem}"
