"""Named arguments of optax updates: some updates take any name, some none, some only certain names."""

from __future__ import annotations

import inspect
from typing import Any, cast

import optax

from nnx_parallel.core.types import PyTree


def accept_extra(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`optax.with_extra_args_support`, also for an update that takes some names only (`optax.contrib.sam`)."""
  inner = optax.with_extra_args_support(tx)
  names = inspect.signature(inner.update).parameters
  if any(p.kind is p.VAR_KEYWORD for p in names.values()):
    return inner

  def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
    known = {name: value for name, value in extra.items() if name in names}
    return cast(Any, inner).update(grads, state, params, **known)

  return optax.GradientTransformationExtraArgs(inner.init, cast(Any, update))
