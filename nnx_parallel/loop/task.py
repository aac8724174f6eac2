"""A full task in one call: the layout, the state, the specs and every step of a model."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.text import format_spec, text_table
from nnx_parallel.core.types import LossFn, PyTree
from nnx_parallel.create.constructor import create_sharded_model
from nnx_parallel.decode.generate import Generator
from nnx_parallel.errors import TrainError
from nnx_parallel.layout.plan import Plan
from nnx_parallel.layout.planning import plan as make_plan
from nnx_parallel.loop.sums import in_evaluation_mode
from nnx_parallel.train.step import EvalStep, TrainStep, eval_step, train_step, unknown_option


@dataclasses.dataclass(frozen=True)
class Task:
  """A model on a mesh, with its optimizer and its steps. Print it for an overview.

  Attributes:
    plan: the layout of the model and the optimizer.
    train_step: `train_step(model, optimizer, batch)`.
    eval_step: `eval_step(model, batch)`, in evaluation mode: without dropout, with running averages.
    generate: the generator, or None.
    batch: the abstract global batch, or None.
  """

  plan: Plan
  train_step: TrainStep
  eval_step: EvalStep
  generate: Generator | None
  batch: PyTree

  @property
  def model(self) -> nnx.Module:
    """The live module. The first access creates it, and the optimizer, in their shards."""
    return self._state[0]

  @property
  def optimizer(self) -> nnx.Optimizer[Any]:
    """The live optimizer of `model`."""
    return self._state[1]

  @functools.cached_property
  def _state(self) -> tuple[Any, Any]:
    return create_sharded_model(self.plan)

  @property
  def state_specs(self) -> dict[str, PartitionSpec]:
    """A dict: name of each array of the model and the optimizer -> its spec."""
    return {leaf.name: leaf.spec for leaf in self.plan.leaves}

  @property
  def input_specs(self) -> PyTree:
    """The specs of the batch, as a pytree of the same structure."""
    return jax.tree.map(lambda x: self.plan.batch_spec(len(x.shape)), self.batch)

  @property
  def num_parameters(self) -> int:
    """The number of elements of all parameters."""
    return self.plan.num_parameters()

  def __str__(self) -> str:
    arrays = jax.tree_util.tree_leaves_with_path(self.batch)
    rows = [
      (f"batch{jax.tree_util.keystr(path)}", f"{x.dtype}{list(x.shape)}", format_spec(spec))
      for path, x in arrays
      for spec in [self.plan.batch_spec(len(x.shape))]
    ]
    steps = ["train_step(model, optimizer, batch)", "eval_step(model, batch)"]
    steps += [] if self.generate is None else ["generate(model, prompts, ...)"]
    return "\n\n".join(
      [
        str(self.plan).rstrip(),
        *([text_table(("input", "global array", "spec"), rows)] if rows else []),
        f"{self.num_parameters:,} parameters; {', '.join(steps)}",
      ]
    )


@check_arguments(TrainError)
def task(
  init: Callable[[], nnx.Module],
  mesh: AnyMesh | None = None,
  rules: Any = None,
  *,
  loss: LossFn | None = None,
  optimizer: Any = None,
  batch: PyTree = None,
  generate: Generator | None = None,
  plan: Mapping[str, Any] | None = None,
  **options: Any,
) -> Task:
  """Sets up a task in one call: the plan, the state, the specs, the steps and the number of parameters.

  Args:
    init: a function that makes the model.
    mesh: the mesh of the task.
    rules: as for `nxp.plan`.
    loss: as for `train_step`.
    optimizer: an Optax transformation.
    batch: a pytree of arrays or `jax.ShapeDtypeStruct`s of a global batch; `input_specs` needs it.
    generate: a generator, for example `nxp.generator(max_new_tokens)`.
    plan: other arguments of `nxp.plan` as a dict, such as `{"uneven": "pad", "zero": 1}`.
    **options: arguments of `train_step`. Arguments that `eval_step` also has apply to both steps
      (`microbatches` only with a pipeline).

  Returns:
    The task. Its arrays are created when `model` or `optimizer` is first read. Its `eval_step` evaluates
    without dropout and with running averages, and leaves the modes of the model as they are.

  Raises:
    TrainError: there is no loss, no optimizer or no mesh.
    ShardingError: as for `nxp.plan`.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> import nnx_parallel as nxp
    >>> made = nxp.task(
    ...   lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=8),
    ...   loss=lambda model, x: (model(x) ** 2).mean(), optimizer=optax.sgd(0.1),
    ...   batch=jax.ShapeDtypeStruct((16, 8), "float32"),
    ... )
    >>> made.num_parameters, made.state_specs["kernel"], made.input_specs
    (72, P(None, 'fsdp'), P('fsdp', None))
    >>> batch = nxp.shard_batch(jnp.ones((16, 8)), made.plan)
    >>> sorted(made.train_step(made.model, made.optimizer, batch))
    ['loss']
  """
  missing = [name for name, x in (("loss", loss), ("optimizer", optimizer), ("mesh", mesh)) if x is None]
  if missing or loss is None or mesh is None:
    raise TrainError(
      f"a task needs {' and '.join(missing)}.",
      fix="nxp.task(init, nxp.make_mesh(...), rules, loss=loss_fn, optimizer=optax.adam(1e-3)).",
    )
  check_arrays(TrainError, "batch", batch)
  if unknown := [name for name in plan or {} if name not in inspect.signature(make_plan).parameters]:
    raise unknown_option(make_plan, unknown[0])
  shared = {name: x for name, x in options.items() if name in inspect.signature(eval_step).parameters}
  if "pipeline" not in shared:
    shared.pop("microbatches", None)
  return Task(
    make_plan(init, mesh, rules, optimizer=optimizer, **(plan or {})),
    train_step(loss, **options),
    eval_step(in_evaluation_mode(loss), **shared),
    generate,
    jax.tree.map(jax.typeof, batch) if batch is not None else None,
  )
