"""Changes what a loss keeps for its backward pass, layer by layer, without touching the module.

Layers are found in the trace: the call of each module that `find_layers` finds, the body of each scan, and
each part that is already under `jax.checkpoint`. A model that has none of them is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from nnx_parallel.core.jaxprs import (
  CALLS,
  CHECKPOINTS,
  as_function,
  bind,
  called,
  evaluate,
  opened,
  scan_counts,
)
from nnx_parallel.core.layers import find_layers
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.text import few
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.attention import Attention, by_blocks, check_attention
from nnx_parallel.layers.head import check_parts, in_parts
from nnx_parallel.layers.mark import is_marked, marked
from nnx_parallel.layers.roll import Rolled

Remat = Literal["as written", "none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("as written", "none", "dots", "full")
Policy = Remat | Callable[..., Any] | None
"""One of `REMATS`, a policy of `jax.checkpoint_policies` for each layer, or None: as written."""
MARK_LAYERS = "layers of one class in an nnx.List; or @nnx.remat on the __call__ of their class"
_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True)
class LayerOptions:
  """What is done with the layers of a loss.

  Attributes:
    remat: what each layer keeps for the backward pass.
    roll: whether consecutive equal layers become one scan.
    pattern: dotted paths of the layers, with `*` for any part; None: see `find_layers`.
    attention: `"blocks"` or their length; None: as written.
    loss_parts: in how many parts the head and the loss of each token are computed; None: as written.

  Raises:
    TrainError: no such policy, or other option.
  """

  remat: Policy = None
  roll: bool = False
  pattern: str | None = None
  attention: Attention = None
  loss_parts: int | None = None

  def __post_init__(self) -> None:
    check_policy(self.remat)
    check_attention(self.attention)
    check_parts(self.loss_parts)

  def marking(self, model: Any) -> contextlib.AbstractContextManager[None]:
    """Marks the layers of a model that belongs to a trace, if anything is done with them."""
    if self.remat in (None, "as written", "none") and not self.roll:
      return contextlib.nullcontext()
    found = find_layers(model, self.pattern)
    if self.pattern is not None and not found:
      raise TrainError(
        f"layers={self.pattern!r} matches no module.",
        details="modules: " + few([path_str(path) for path, _ in nnx.iter_modules(model) if path]),
        fix='layers="blocks.*", with the dotted paths of the modules that repeat.',
      )
    return marked(model, found)


def with_layers(
  loss: Callable[[Any, Any], Any],
  *,
  remat: Policy = None,
  roll: bool = False,
  layers: str | None = None,
  attention: Attention = None,
  loss_parts: int | None = None,
) -> Callable[[Any, Any], Any]:
  """The same loss with its layers rematerialised, rolled into scans, or both; the model is not edited.

  `train_step(loss, remat=..., roll=...)` does this by itself; this is for a step of your own.

  Args:
    loss: `loss(model, batch)`.
    remat: what each layer keeps for the backward pass. `"none"` keeps everything, `"full"` recomputes each
      layer from its input (and the parts of it that are under `jax.checkpoint` one by one), `"dots"` keeps
      the results of matrix products with weights, `"as written"` or None changes nothing. A policy of
      `jax.checkpoint_policies` holds within each layer.
    roll: make one scan of consecutive equal layers, so that the program does not grow with depth.
    layers: dotted paths of the layers, with `*` for any part, such as `"decoder.blocks.*"`. None: modules of
      one class and structure beside each other, in a list or as attributes that end in numbers.
    attention: `"blocks"` computes every attention of the model by blocks of its queries and keys (of 512, or
      of the number given), so that no array of their product exists. None: as written.
    loss_parts: compute the head and the loss of each token in this many parts, so that the logits of all
      tokens never exist at once. None: as written.

  Returns:
    A loss with the same arguments, value, gradients and changes of state. It raises a `TrainError` where a
    policy other than `"none"` finds no layer.

  Raises:
    TrainError: no such policy.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(9)])
    >>> rolled = with_layers(lambda model, x: model(x).sum(), roll=True)
    >>> [eqn.primitive.name for eqn in jax.make_jaxpr(rolled)(model, jnp.ones((2, 4))).eqns].count("scan")
    1
  """
  options = LayerOptions(remat, roll, layers, attention, loss_parts)

  def changed(model: Any, batch: Any) -> Any:
    graphdef, state = nnx.split(model)

    def pure(state: Any, batch: Any) -> Any:
      module = nnx.merge(graphdef, state)
      with options.marking(module):
        result = loss(module, batch)
      return result, nnx.state(module)

    result, after = with_options(pure, options)(state, batch)
    nnx.update(model, after)
    return result

  return changed


def check_policy(policy: Policy) -> Policy:
  """The policy itself.

  Raises:
    TrainError: no such policy.
  """
  if policy is None or policy in REMATS or callable(policy):
    return policy
  raise TrainError(
    f"remat={policy!r} is not a known policy.",
    fix=f"one of {', '.join(map(repr, REMATS))}, or a policy itself: jax.checkpoint_policies.NAME.",
  )


def with_options(function: Callable[..., Any], options: LayerOptions) -> Callable[..., Any]:
  """A function of pytrees of arrays whose marked layers are treated by `options`.

  It raises a `TrainError` where a policy finds no layer.
  """
  policy = None if options.remat == "as written" else options.remat
  if policy is None and not options.roll and options.attention is None and options.loss_parts is None:
    return function

  def changed(*args: Any) -> Any:
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    if policy not in (None, "none") and not has_layers(traced):
      raise TrainError(
        f"remat={policy!r} finds no layer in the loss, so it would change nothing.",
        details="a layer is one of several modules of one class and structure beside each other (in a list,"
        " or as attributes that end in numbers), the body of a scan, or what is under nnx.remat",
        fix=f"{MARK_LAYERS}; or leave remat out.",
      )
    if options.loss_parts is not None:
      traced = in_parts(traced, options.loss_parts)
    if options.attention is not None:
      traced = by_blocks(traced, options.attention)
    run = functools.partial(_run, policy=policy, in_layer=False)
    in_scan = functools.partial(_run, policy=policy, in_layer=False, in_scan=True)
    leaves = jax.tree.leaves(args)
    flat = Rolled(traced)(leaves, run, in_scan) if options.roll else evaluate(traced, leaves, run)
    return jax.tree.unflatten(jax.tree.structure(shape), flat)

  return changed


def has_layers(jaxpr: Any) -> bool:
  """Whether a traced loss has parts that a policy applies to."""
  for eqn in opened(jaxpr).eqns:
    name = eqn.primitive.name
    if name in CHECKPOINTS or name == "scan":
      return True
    if name in CALLS and (is_marked(eqn) or has_layers(called(eqn))):
      return True
  return False


def _is_layer(eqn: Any) -> bool:
  """Whether a marked call is a layer; one whose products are all in layers of its own is none."""
  return is_marked(eqn) and (not has_layers(called(eqn)) or _has_products(called(eqn)))


def _has_products(jaxpr: Any) -> bool:
  """Whether a program has products outside of scans and checkpoints."""
  return any(
    eqn.primitive.name in _PRODUCTS or (eqn.primitive.name in CALLS and _has_products(called(eqn)))
    for eqn in opened(jaxpr).eqns
  )


def _evaluate(jaxpr: Any, args: Sequence[Any], policy: Policy, in_layer: bool) -> list[Any]:
  return evaluate(jaxpr, args, functools.partial(_run, policy=policy, in_layer=in_layer))


def _run(
  eqn: Any, inputs: list[Any], *, policy: Policy, in_layer: bool, in_scan: bool = False
) -> Sequence[Any]:
  name, params = eqn.primitive.name, eqn.params
  if policy is None:  # as written
    return as_function(called(eqn))(*inputs) if is_marked(eqn) else bind(eqn, inputs)
  if name in CALLS:
    if in_layer or not _is_layer(eqn):
      return _evaluate(called(eqn), inputs, policy, in_layer)
    return _checkpointed(_layer(called(eqn), policy), policy, in_scan=in_scan)(*inputs)
  if name in CHECKPOINTS:
    body = _layer(params["jaxpr"], policy)
    # Within a layer, what the user recomputes piece by piece (blocks of attention) stays so under "full";
    # a policy of the layer cannot see into pieces.
    return body(*inputs) if in_layer and policy != "full" else _checkpointed(body, policy)(*inputs)
  if name == "scan":
    return _scan(eqn, inputs, policy, in_layer)
  return bind(eqn, inputs)


def _scan(eqn: Any, inputs: list[Any], policy: Policy, in_layer: bool) -> list[Any]:
  params = eqn.params
  counts = scan_counts(eqn)
  fixed_count, carry_count = counts.constants, counts.carried
  fixed = inputs[:fixed_count]
  layer = _layer(params["jaxpr"], policy)
  body = layer if in_layer else _checkpointed(layer, policy)

  def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
    out = body(*fixed, *carry, *row)
    return list(out[:carry_count]), list(out[carry_count:])

  carry, rows = jax.lax.scan(
    step,
    inputs[fixed_count : fixed_count + carry_count],
    inputs[fixed_count + carry_count :],
    length=params["length"],
    reverse=params["reverse"],
    unroll=params["unroll"],
  )
  return [*carry, *rows]


def _layer(jaxpr: Any, policy: Policy) -> Callable[..., list[Any]]:
  return lambda *args: _evaluate(jaxpr, args, policy, True)


def _checkpointed(
  body: Callable[..., list[Any]], policy: Policy, *, in_scan: bool = False
) -> Callable[..., list[Any]]:
  if policy == "none":
    return body
  named = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
  saved = named[policy] if isinstance(policy, str) else policy
  return jax.checkpoint(body, policy=saved, prevent_cse=not in_scan)
