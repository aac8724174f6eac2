"""Changes what a loss keeps for its backward pass, layer by layer, without touching the module.

Layers are found in the trace: the call of each module that `find_layers` finds, the body of each scan, and
each part that is already under `jax.checkpoint`. A model that has none of them is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from nnx_parallel.core.jaxprs import CALLS, CHECKPOINTS, bind, called, evaluate, opened, scan_counts
from nnx_parallel.core.layers import find_layers
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.mark import is_marked, marked

Remat = Literal["as written", "none", "dots", "full"]
REMATS: tuple[Remat, ...] = ("as written", "none", "dots", "full")
Policy = Remat | Callable[..., Any] | None
"""One of `REMATS`, a policy of `jax.checkpoint_policies` for each layer, or None: as written."""
MARK_LAYERS = "layers of one class in an nnx.List; or @nnx.remat on the __call__ of their class"
_PRODUCTS = ("dot_general", "conv_general_dilated")


def with_remat(loss: Callable[[Any, Any], Any], policy: Policy) -> Callable[[Any, Any], Any]:
  """The same loss with another choice of what its layers keep for the backward pass.

  `train_step(loss, remat=policy)` does this by itself; this is for a step of your own.

  Args:
    loss: `loss(model, batch)`.
    policy: `"none"` keeps everything, `"full"` recomputes each layer from its input (and the parts of it that
      are under `jax.checkpoint` one by one), `"dots"` keeps the results of matrix products with weights,
      `"as written"` or None changes nothing. A policy of `jax.checkpoint_policies` holds within each layer.

  Returns:
    A loss with the same arguments, value, gradients and changes of state. It raises a `TrainError` where a
    policy other than `"none"` finds no layer.

  Raises:
    TrainError: no such policy.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Sequential(*[nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(4)])
    >>> loss = with_remat(lambda model, x: model(x).sum(), "full")
    >>> float(loss(model, jnp.zeros((1, 2))))
    0.0
  """
  if check_policy(policy) in (None, "as written"):
    return loss

  def changed(model: Any, batch: Any) -> Any:
    graphdef, state = nnx.split(model)

    def pure(state: Any, batch: Any) -> Any:
      module = nnx.merge(graphdef, state)
      with marked(module, find_layers(module)):
        result = loss(module, batch)
      return result, nnx.state(module)

    result, after = rematerialised(pure, policy)(state, batch)
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


def rematerialised(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
  """A function of pytrees of arrays whose layers keep for the backward pass what `policy` says.

  See `with_remat`; the function raises a `TrainError` where there is no layer.
  """
  if check_policy(policy) in (None, "as written"):
    return function

  def changed(*args: Any) -> Any:
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    if policy != "none" and not has_layers(traced):
      raise TrainError(
        f"remat={policy!r} finds no layer in the loss, so it would change nothing.",
        details="a layer is one of several modules of one class and structure beside each other (in a list, or"
        " attributes that end in numbers), the body of a scan, or what is under nnx.remat or jax.checkpoint",
        fix=f"{MARK_LAYERS}; or leave remat out.",
      )
    flat = _evaluate(traced, jax.tree.leaves(args), policy, False)
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
  return evaluate(jaxpr, args, lambda eqn, inputs: _run(eqn, inputs, policy, in_layer))


def _run(eqn: Any, inputs: list[Any], policy: Policy, in_layer: bool) -> Sequence[Any]:
  name, params = eqn.primitive.name, eqn.params
  if name in CALLS:
    if in_layer or not _is_layer(eqn):
      return _evaluate(called(eqn), inputs, policy, in_layer)
    return _checkpointed(_layer(called(eqn), policy), policy)(*inputs)
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


def _checkpointed(body: Callable[..., list[Any]], policy: Policy) -> Callable[..., list[Any]]:
  if policy == "none":
    return body
  named = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
  saved = named[policy] if isinstance(policy, str) else policy
  return jax.checkpoint(body, policy=saved)
