"""Which activations layers save for the backward pass: each marked call, or a unit of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.core.checked import is_one_of, shorten_traceback
from nnx_parallel.core.jaxprs import is_inexact
from nnx_parallel.errors import TrainError

T = TypeVar("T")
RematName = Literal["as written", "none", "dots", "full", "offload"]
REMATS: tuple[RematName, ...] = get_args(RematName)
Body: TypeAlias = Callable[
  [Sequence[jax.Array], Sequence[jax.Array]], tuple[list[jax.Array], list[jax.Array]]
]
"""`(carried, rows) -> (carried, results)`, of one layer or of a unit of layers."""
_INPUT = "layer input"
"""The name of the arrays that `"offload"` moves to host memory."""


@shorten_traceback
@dataclasses.dataclass(frozen=True)
class Remat:
  """Which activations the layers of a model save for the backward pass, and which layers.

  Attributes:
    policy: `"none"`, `"dots"`, `"full"` or `"offload"`, or a policy of `jax.checkpoint_policies`; see
      `train_step`.
    every: apply the policy only to every n-th call of layers of one list; the other layers save everything.
    group: the number of consecutive layers that are recomputed as one unit, from the input of the first of
      these layers.

  Raises:
    TrainError: the policy does not exist, or a number is less than 1.

  Source: Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.Remat("full", every=2)
    Remat(policy='full', every=2, group=1)
  """

  policy: RematName | Callable[..., Any] = "full"
  every: int = 1
  group: int = 1

  def __post_init__(self) -> None:
    if not callable(self.policy) and not is_one_of(self.policy, REMATS):
      raise TrainError(
        f"remat={self.policy!r} is not a known policy.",
        fix=f"one of {', '.join(map(repr, REMATS))}, or a policy itself: jax.checkpoint_policies.NAME.",
      )
    counts = self.every, self.group
    if any(type(n) is not int or n < 1 for n in counts) or (self.every > 1 and self.group > 1):
      raise TrainError(
        f"Remat(every={self.every}, group={self.group}) selects no layers.",
        fix='nxp.Remat("full", every=2), or nxp.Remat("full", group=2)',
      )

  @property
  def changes(self) -> bool:
    """Whether a policy is asked for."""
    return self.policy != "as written"

  @property
  def needs_layers(self) -> bool:
    """Whether it is an error if the loss has no layers."""
    return self.policy not in ("as written", "none")

  def __str__(self) -> str:
    name = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "a policy")
    some = f" in one of every {self.every} layers" if self.every > 1 else ""
    return f"{name}{some}" + (f" in groups of {self.group}" if self.group > 1 else "")


AS_WRITTEN = Remat("as written")
Policy = RematName | Callable[..., Any] | Remat | None
"""A word, a policy of `jax.checkpoint_policies` for each layer, a `Remat`; or None: as written."""


def is_joint(remat: Remat) -> bool:
  """Whether a unit of layers is recomputed, or offloaded, as one."""
  return remat.needs_layers and (remat.group > 1 or remat.policy == "offload")


def checkpoint_layer(
  body: Callable[..., T], remat: Remat, call: int, checkpoint: Callable[..., Any] = jax.checkpoint
) -> Callable[..., T]:
  """The program of a layer under its policy, given the number of its call.

  A layer that is to be part of a unit gets the policy too: it holds where no unit is found.
  """
  if not remat.needs_layers or call % remat.every:
    return body
  return checkpoint(body, policy=_saves("full" if remat.policy == "offload" else remat.policy))


def checkpoint_unit(body: Body, remat: Remat, *, in_scan: bool) -> Body:
  """A unit of layers under its policy; with `"offload"`, its carry is in host memory."""
  if not is_joint(remat):
    return body
  if remat.policy != "offload":
    return jax.checkpoint(body, policy=_saves(remat.policy), prevent_cse=not in_scan)

  def named(carry: Sequence[jax.Array], row: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    return body([checkpoint_name(x, _INPUT) if is_inexact(x) else x for x in carry], row)

  offloads = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  )
  return jax.checkpoint(named, policy=offloads, prevent_cse=not in_scan)


def _saves(policy: RematName | Callable[..., Any]) -> Any:
  """What `jax.checkpoint` calls the policy."""
  named = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
  return named[policy] if isinstance(policy, str) else policy
