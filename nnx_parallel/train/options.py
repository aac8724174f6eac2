"""The options of a step."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import AnyArray, LossFn, PyTree
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.layers import LayerOptions
from nnx_parallel.train.losses import AUX, Terms, check_outputs, examples_in, terms

Gradients = Literal["like_parameters", "scattered"]
Constants = Mapping[str, Hashable]
"""Arguments of a loss function that are no arrays, by name."""
CompilerOption = str | int | float | bool


@dataclasses.dataclass(frozen=True)
class StepOptions:
  """The loss function of a step, and the options of `train_step` or `eval_step`.

  `train_step` and `eval_step` have checked their types; a `TrainError` for what does not go together.
  """

  # one loss function, or key -> loss function for several models that are trained in turn
  loss_fn: LossFn | Mapping[Any, LossFn]
  microbatches: int = 1  # the number of parts of each batch
  # how the layers of the loss, its attention and its head are computed
  layers: LayerOptions = dataclasses.field(default_factory=LayerOptions)
  outputs: tuple[str, ...] = ()  # names of metrics that are per-example arrays
  gradients: Gradients | None = None  # the layout of gradients; see `train_step`
  reduction: DTypeLike | None = None  # dtype in which replicas sum their gradients, or None
  pairs: bool = False  # whether metrics come as `(sum, count)` pairs
  diagnostics: bool = False  # whether the norm of the gradients and the learning rate are among the metrics
  compiler_options: Mapping[str, CompilerOption] | None = None  # options of XLA
  has_aux: bool = False  # whether the loss function returns any pytree beside the loss

  def __post_init__(self) -> None:
    for loss_fn in self.losses:
      if isinstance(loss_fn, nnx.Pytree) or not callable(loss_fn):
        raise TrainError(
          f"a step is made from a loss function, and not from {with_article(type(loss_fn).__name__)}.",
          fix="step = nxp.train_step(loss_fn), then step(model, optimizer, batch).",
        )
    if self.has_aux and (self.outputs or self.pairs):
      raise TrainError(
        "has_aux=True returns arrays beside the loss, and outputs= and pairs= are about a dict of metrics.",
        fix="has_aux=True alone; or return loss, {name: value}, with outputs= and pairs=.",
      )
    chosen = _dtype_of(self.reduction)
    if self.reduction is not None and (chosen is None or not jnp.issubdtype(chosen, jnp.floating)):
      raise TrainError(
        f"reduction={chosen or repr(self.reduction)[:60]} would round gradients to whole numbers.",
        fix="reduction=jnp.float32",
      )

  @property
  def losses(self) -> list[LossFn]:
    """All loss functions."""
    return [*self.loss_fn.values()] if isinstance(self.loss_fn, Mapping) else [self.loss_fn]

  def with_constants(self, constants: Constants) -> StepOptions:
    """The options with loss functions to which these arguments are bound: of several, those that take one."""
    if not constants:
      return self
    constants_key(constants)
    losses = self.loss_fn if isinstance(self.loss_fn, Mapping) else {None: self.loss_fn}
    taken = {key: {n: x for n, x in constants.items() if takes_keyword(f, n)} for key, f in losses.items()}
    missing = [name for name in constants if not any(name in found for found in taken.values())]
    if missing:
      which = (
        "the loss function takes no" if len(losses) == 1 else f"none of {len(losses)} loss functions takes"
      )
      raise TrainError(
        f"{which} {missing[0]}=, which the step got.",
        details="\n".join(f"def loss_fn{inspect.signature(f)}" for f in losses.values()),
        fix="give the loss function such an argument; options of a step belong to nxp.train_step(...).",
      )
    bound = {key: functools.partial(f, **taken[key]) if taken[key] else f for key, f in losses.items()}
    return dataclasses.replace(self, loss_fn=bound if isinstance(self.loss_fn, Mapping) else bound[None])

  def terms(self, result: PyTree, batch: PyTree) -> Terms:
    """The terms of what the loss function returned for a batch, or for a part of one."""
    found = terms(result, self.outputs, has_aux=self.has_aux)
    if self.has_aux:
      check_outputs(found, examples_in(batch), self.microbatches)
    return found

  def is_output(self, name: str, value: AnyArray) -> bool:
    """Whether a metric of the step is an array with the examples on dim 0."""
    names = [name]
    if isinstance(self.loss_fn, Mapping):  # "key/name"; both may hold a slash
      names = [name.removeprefix(f"{key}/") for key in self.loss_fn if name.startswith(f"{key}/")]
    aux = self.has_aux and jnp.ndim(value) > 0
    return any(own in self.outputs or (aux and own.startswith(AUX)) for own in names)

  @property
  def in_one_piece(self) -> bool:
    """Whether the batch is not split: its mean loss is differentiated, not sums over parts."""
    return self.microbatches == 1 and self.reduction is None and self.layers.pipeline is None

  @property
  def turns(self) -> int:
    """How often the loss is called for a batch: a pipeline takes all microbatches at once."""
    return 1 if self.layers.pipeline is not None else self.microbatches


def takes_keyword(function: LossFn, name: str) -> bool:
  """Whether a function takes a keyword; those that do not say so may."""
  try:
    inspect.signature(function).bind_partial(**{name: None})
  except TypeError:
    return False
  except ValueError:  # no Python function
    return True
  return True


def constants_key(constants: Constants) -> Hashable:
  """Constants as a key of a dict, in which True, 1 and 1.0 differ; a `TrainError` for others."""
  for name, value in constants.items():
    if isinstance(value, (nnx.Pytree, nnx.Variable)):
      raise TrainError(
        f"{name}= is {with_article(type(value).__name__)}, whose arrays a step would not read again.",
        fix=f'step({{"model": model, "{name}": {name}}}, {{"model": optimizer}}, batch), with a loss of'
        " that dict, which also writes its Variables back.",
      )
    try:
      hash(value)
    except TypeError:
      raise TrainError(
        f"{name}= is {with_article(type(value).__name__)}, and keywords are constants of the program.",
        fix=f'arrays belong to the batch: step(model, optimizer, {{"x": x, "{name}": {name}}}); lists can be'
        " tuples.",
      ) from None
  return tuple(sorted((name, type(value).__name__, value) for name, value in constants.items()))


def _dtype_of(value: Any) -> np.dtype | None:
  """The dtype that a value means, or None."""
  try:
    return None if isinstance(value, (np.ndarray, jax.Array)) else jnp.dtype(value)
  except TypeError:
    return None


def is_scattered(gradients: Gradients | None, stage: int, *, further: bool) -> bool:
  """Whether gradients take the layout of their optimizer state as soon as they exist."""
  # `gradients` is the option of `train_step`, `stage` the plan's ZeRO stage; `further` says whether some
  # optimizer state is split more than its parameter. Otherwise both layouts are the same.
  if gradients == "scattered" and not further and not stage:
    raise TrainError(
      'gradients="scattered" scatters nothing: no optimizer state is split more than its parameter.',
      details="the plan of the optimizer has zero=0",
      fix="nxp.plan(..., zero=2), which a train step follows when gradients= is left out.",
    )
  wanted = stage == 2 if gradients is None else gradients == "scattered"
  return wanted and further
