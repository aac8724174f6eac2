"""Checks for test suites: a layout is as planned, and training on it gives the same numbers."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path as File
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.extra_args import accept_extra
from nnx_parallel.core.mesh import axis_sizes, no_mesh
from nnx_parallel.core.nodes import path_str
from nnx_parallel.core.types import LossFn
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.plan import check_plan
from nnx_parallel.layout.show.diff import layout_of
from nnx_parallel.layout.table import PlanTable
from nnx_parallel.train.losses import wide
from nnx_parallel.train.step import bind_keywords

__all__ = [
  "GradientNorms",
  "Training",
  "assert_golden_plan",
  "assert_same_numbers",
  "assert_same_training",
  "run_training",
  "with_gradient_norms",
]

_UPDATE = "NNX_PARALLEL_UPDATE_GOLDEN"


class GradientNorms(NamedTuple):
  """State of `with_gradient_norms`.

  Attributes:
    inner: state of the wrapped transformation.
    norms: for each trained array, in the order of Flax, the norm of its gradient in the last step, in
      float32.
  """

  inner: Any
  norms: Any


@check_arguments(PlanError)
def with_gradient_norms(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Keeps the norm of each gradient that the optimizer gets, so that `run_training` can read it.

  The optimizer gets the gradients after they are summed over replicas and microbatches. Losses alone do not
  reveal gradients that are wrong by a factor, because Adam computes the same updates from them.

  Args:
    tx: the transformation to wrap. `with_gradient_norms` must be the outermost transformation.

  Returns:
    A transformation for `plan(optimizer=...)`; its state is a `GradientNorms`.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.testing import run_training, with_gradient_norms
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> tx = with_gradient_norms(optax.sgd(0.0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=1), optimizer=tx)
    >>> run = run_training(plan, lambda model, x: model(x).sum(), [np.ones((8, 8), "float32")] * 2)
    >>> run.history["bias"]  # 8 outputs, each of 8 examples: 8 * sqrt(8)
    array([22.627417, 22.627417], dtype=float32)
  """
  inner = accept_extra(tx)

  def init(params: Any) -> GradientNorms:
    return GradientNorms(inner.init(params), jnp.zeros(len(jax.tree.leaves(params)), jnp.float32))

  def update(grads: Any, state: GradientNorms, params: Any = None, **extra: Any) -> tuple[Any, GradientNorms]:
    norms = jnp.stack([_norm(g) for g in jax.tree.leaves(grads)])
    updates, new = inner.update(grads, state.inner, params, **extra)
    return updates, GradientNorms(new, norms)

  return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _norm(gradient: jax.Array) -> jax.Array:
  """The norm in float32, of a complex gradient too."""
  return jnp.linalg.norm(wide(gradient).ravel()).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Training:
  """The result of `run_training`.

  Attributes:
    losses: the loss of each step.
    norms: dotted path -> norm of the gradient on the last batch. If there is a history, it is the norm in the
      last step; otherwise it is computed after the last step.
    history: dotted path -> norm of the gradient in each step, as the optimizer got it; empty if the plan's
      optimizer is not made by `with_gradient_norms`.
  """

  losses: np.ndarray[Any, Any]
  norms: dict[str, float]
  history: dict[str, np.ndarray[Any, Any]]


@check_arguments(PlanError)
@no_mesh()
def run_training(
  plan: nxp.Plan,
  loss_fn: LossFn,
  batches: Iterable[Any],
  *,
  start: tuple[nnx.Module, nnx.Optimizer[Any]] | None = None,
  **options: Any,
) -> Training:
  """Creates the plan's model and trains it.

  Args:
    plan: a plan that has an optimizer.
    loss_fn: as for `train_step`; a scalar loss, or `nxp.weighted(sum, count)`, with or without metrics.
    batches: host batches, one for each step.
    start: a live model and its optimizer to start from, of the same module. They are copied into the layout
      of the plan, which saves the compilation of a creation. None creates them from the plan.
    **options: arguments of `train_step`, and keyword arguments of the loss function.

  Returns:
    The losses, and the gradient norms.

  Raises:
    PlanError: the plan has no optimizer.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=1), optimizer=optax.sgd(0.1))
    >>> batches = [np.ones((8, 8), "float32")] * 2
    >>> run = nxp.testing.run_training(plan, lambda model, x: (model(x) ** 2).mean(), batches)
    >>> len(run.losses), sorted(run.norms)
    (2, ['bias', 'kernel'])
  """
  check_plan(plan, "run_training(plan, loss_fn, batches)")
  if plan.tx is None:
    raise nxp.errors.PlanError(
      "a plan without an optimizer cannot be trained.",
      fix="nxp.plan(init, mesh, rules, optimizer=optax.sgd(0.1))",
    )
  loss_fn = bind_keywords(loss_fn, options)
  if start is None:
    model, optimizer = nxp.create_sharded_model(plan)
  else:
    model, optimizer = nxp.reshard(start[0], plan, optimizer=start[1])
  step = nxp.train_step(loss_fn, **options)
  recorded = isinstance(optimizer.opt_state, GradientNorms)
  losses: list[float] = []
  history: list[Any] = []
  batch: Any = None
  for host in batches:
    batch = nxp.shard_batch(host, plan)
    # Each step is waited for: simulated devices share few threads, which many programs in flight can starve.
    losses.append(float(step(model, optimizer, batch)["loss"]))
    if recorded:
      history.append(np.asarray(optimizer.opt_state.norms[...]))
  if not recorded:  # the gradients after the last step, on a copy that is not changed by them
    copy = nnx.clone(model)
    optimizer = nnx.Optimizer(copy, with_gradient_norms(optax.set_to_zero()), wrt=plan.wrt)
    nxp.train_step(loss_fn)(copy, optimizer, batch)
  paths = [path_str(path) for path, _ in nnx.to_flat_state(nnx.state(model, plan.wrt))]
  last: Any = optimizer.opt_state.norms  # pyright: ignore[reportAttributeAccessIssue]
  norms = dict(zip(paths, map(float, last[...]), strict=True))
  by_path = dict(zip(paths, np.array(history).T, strict=True)) if history else {}
  return Training(np.array(losses), norms, by_path)


@check_arguments(PlanError, "plans")
def assert_same_training(
  loss_fn: LossFn,
  plans: Mapping[str, nxp.Plan],
  batches: Iterable[Any],
  *,
  rtol: float = 1e-5,
  **options: Any,
) -> dict[str, Training]:
  """Asserts that training on each plan gives the numbers of one device, for each step and each leaf.

  The single-device run uses the first plan's `init`, rules and optimizer on a mesh of one device. Losses are
  compared at every step, and the norms of all gradients at the end. If the optimizer of the plans is made by
  `with_gradient_norms(tx)`, the norms are also compared at every step.

  Args:
    loss_fn: as for `train_step`.
    plans: a dict: name -> plan with an optimizer. All plans are of the same module.
    batches: host batches, one for each step.
    rtol: the relative tolerance. A gradient that is zero except for rounding is compared relative to all
      gradients.
    **options: arguments of the `train_step` of the plans, without which the single device computes full
      batches; and keyword arguments of the loss function.

  Returns:
    A dict: name -> result. The single-device run has the name `"one device"`.

  Raises:
    AssertionError: the numbers differ; the message names the layout, the step or leaf, and both values.
    PlanError: `plans` is not a dict of plans, a plan has no optimizer, or there are no batches.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.testing import assert_same_training
    >>> init = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    >>> plans = {
    ...   "fsdp": nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=1), optimizer=optax.adam(1e-2)),
    ... }
    >>> batches = [np.random.default_rng(i).normal(size=(16, 8)).astype("float32") for i in range(4)]
    >>> runs = assert_same_training(lambda model, x: (model(x) ** 2).mean(), plans, batches)
    >>> sorted(runs)
    ['fsdp', 'one device']
  """
  data = list(batches)
  if not isinstance(plans, Mapping) or not plans or not data:  # pyright: ignore[reportUnnecessaryIsInstance]
    raise nxp.errors.PlanError(
      "assert_same_training needs plans by name and batches.",
      details=f"given a value of type {type(plans).__name__}, and {len(data)} batches",
      fix='assert_same_training(loss_fn, {"fsdp": plan}, batches)',
    )
  for plan in plans.values():
    check_plan(plan, "assert_same_training(loss_fn, plans, batches)")
  first = next(iter(plans.values()))
  alone = nxp.make_mesh(dict.fromkeys(map(str, first.mesh.axis_names), 1), devices=jax.devices()[:1])
  reference = nxp.plan(first.init, alone, first.rules, optimizer=first.tx, wrt=first.wrt)
  loss_fn = bind_keywords(loss_fn, options)
  runs = {"one device": run_training(reference, loss_fn, data)}
  for name, plan in plans.items():
    runs[name] = run_training(plan, loss_fn, data, **options)
    assert_same_numbers(name, runs["one device"], runs[name], rtol=rtol)
  return runs


def assert_same_numbers(name: str, one: Training, many: Training, *, rtol: float = 1e-5) -> None:
  """Asserts that two runs on the same batches have the same losses and gradient norms.

  Args:
    name: the name of the second run, for messages.
    one: the run on one device.
    many: the run to check.
    rtol: the relative tolerance. A gradient that is zero except for rounding is compared relative to all
      gradients.

  Raises:
    AssertionError: the numbers differ; the message names the step or leaf, and both values.

  Example:
    >>> import numpy as np, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.testing import assert_same_numbers, run_training, with_gradient_norms
    >>> init, tx = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), with_gradient_norms(optax.adam(1e-3))
    >>> def run(rules):
    ...   plan = nxp.plan(init, nxp.make_mesh(fsdp=8), rules, optimizer=tx)
    ...   return run_training(plan, lambda m, x: (m(x) ** 2).mean(), [np.ones((8, 8), "float32")] * 4)
    >>> assert_same_numbers("fsdp", run(nxp.replicate()), run(nxp.fsdp(min_size=1)))
  """
  for step, (a, b) in enumerate(zip(one.losses, many.losses, strict=True)):
    assert abs(a - b) <= rtol * abs(a), (
      f"{name}: the loss of step {step} is {b!r}, on one device {a!r} (relative {abs(a - b) / abs(a):.1e})"
    )
  for step in range(len(one.losses) if one.history and many.history else 0):
    a, b = ({path: float(norms[step]) for path, norms in run.history.items()} for run in (one, many))
    _assert_norms_close(f"{name}, step {step}", a, b, rtol)
  _assert_norms_close(name, one.norms, many.norms, rtol)


def _assert_norms_close(name: str, one: dict[str, float], many: dict[str, float], rtol: float) -> None:
  total = float(np.sqrt(sum(norm**2 for norm in one.values())))
  for path, a in one.items():
    b = many[path]
    assert abs(a - b) <= rtol * (a + 0.01 * total), (
      f"{name}: the gradient norm of {path} is {b!r}, on one device {a!r} (ratio {b / a if a else b:.4g})"
    )


def _golden_text(plan: PlanTable) -> str:
  """Only the layout, one readable line for each leaf: the content of golden files."""
  mesh = " ".join(f"{axis}={size}" for axis, size in axis_sizes(plan.mesh).items())
  rows = [
    f"{leaf.name}: {'  '.join(v for v in layout_of(leaf).values() if v != '-')}" for leaf in plan.leaves
  ]
  held = f"{plan.bytes_per_device()} bytes per device"
  return "\n".join([f"mesh {mesh}", *rows, held, ""])


@check_arguments(PlanError)
def assert_golden_plan(plan: PlanTable, file: str | os.PathLike[str], *, update: bool | None = None) -> None:
  """Fails if the layout of a plan differs from the layout in a file that you keep with your tests.

  Types, shapes, dtypes, specs, padding and bytes are compared; reasons and rules may change.

  Args:
    plan: the plan to check.
    file: the text file, for example `tests/golden/llama_fsdp.txt`.
    update: whether to write the file instead of comparing; by default, only if the environment variable
      `NNX_PARALLEL_UPDATE_GOLDEN` is `1`.

  Raises:
    AssertionError: the layout differs (the message shows the lines that differ), or the file does not exist.

  Example:
    >>> import tempfile, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.testing import assert_golden_plan
    >>> init = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   assert_golden_plan(plan, f"{folder}/linear.txt", update=True)
    ...   assert_golden_plan(plan, f"{folder}/linear.txt")
  """
  target, now = File(file), _golden_text(plan)
  if os.environ.get(_UPDATE) == "1" if update is None else update:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(now)
    return
  how = f"If that is meant, write it with {_UPDATE}=1 and read the difference in review."
  if not target.exists():
    raise AssertionError(f"the golden plan {target} does not exist. {how}")
  lines = difflib.unified_diff(
    target.read_text().splitlines(), now.splitlines(), str(target), "this plan", lineterm="", n=0
  )
  changes = "\n".join(lines)
  if changes:
    raise AssertionError(f"the layout differs from the golden layout:\n{changes}\n{how}")
