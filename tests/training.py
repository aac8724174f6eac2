"""What most comparisons of layouts need: a model of a plan, some steps, and their losses."""

import os
from typing import Any, NamedTuple

from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.layout.known_faults import OWN_STEP

DECODER_RULES = nxp.PathRules(  # FSDP and tensor parallelism for `benchmarks.plain.decoders`
  {
    "embed.embedding": ("tensor", "fsdp"),
    r"(.*\.)?(q|k|v|gate|up|head)\.kernel": ("fsdp", "tensor"),
    r".*\.(o|down)\.kernel": ("tensor", "fsdp"),
    r"(.*\.)?norm\d?\.scale": (None,),
  }
)


class Run(NamedTuple):
  """A live model and its optimizer after some steps, the loss of each step, and the step itself."""

  model: Any
  optimizer: Any
  losses: list[float]
  step: Any


def placed(plan: nxp.Plan) -> Any:
  """What `create_sharded_model` returns for a plan, as plain code makes it, in the layout of the plan.

  To compile their creation on each layout takes as long as to compile a step, so only nightly runs do it.
  """
  if os.environ.get("NXP_NIGHTLY"):
    return nxp.create_sharded_model(plan)
  model = nxp.unsharded(plan.init)
  if plan.tx is None:
    return nxp.reshard(model, plan)
  return nxp.reshard(model, plan, optimizer=nnx.Optimizer(model, plan.tx, wrt=plan.wrt))


def other_notes(plan: nxp.Plan) -> tuple[str, ...]:
  """The notes of a plan but those of its mesh: on steps of one's own, and on axes without a use."""
  return tuple(note for note in plan.notes if not note.startswith((OWN_STEP, "no array and no rule uses")))


def run_steps(plan: nxp.Plan, loss: Any, batches: Any, **options: Any) -> Run:
  """Takes a `train_step` with these options on each host batch, from the values of the plan's `init`."""
  model, optimizer = placed(plan)
  step = nxp.train_step(loss, **options)
  losses = [float(step(model, optimizer, nxp.shard_batch(batch, plan))["loss"]) for batch in batches]
  return Run(model, optimizer, losses, step)


def plain_step(loss: Any) -> Any:
  """The step that a user writes: it returns the loss of a batch, and updates the model."""

  @nnx.jit
  def step(model: Any, optimizer: Any, batch: Any) -> Any:
    value, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)
    return value

  return step
