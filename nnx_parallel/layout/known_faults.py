"""Known wrong results of XLA's partitioner: where they occur, and what avoids them.

Such a fault raises no error, and the loss is often right. `train_step`, `eval_step` and `nxp.generator` avoid
all of them on Auto axes. Seen with Shardy and with GSPMD, jax 0.10.2 to 0.12.0.1:

- grouped convolution (or depthwise), beside axes that do not shard the batch: the kernel gradient is
  multiplied by the sizes of these axes, or the compiler aborts.
- split window: a convolution over a sharded dim, beside axes that shard nothing of it: the kernel gradient is
  multiplied by the sizes of these axes.
- swapped examples: the batch over two axes, a parameter over the minor one and a third axis of the same size:
  a device gets the product of another device's examples, often in the gradients below a layer alone.
- crossed gradient: the batch over one axis, parameters over it and two more axes of the same size: the
  gradient of a kernel whose two dims end up on the two other axes is off by half.
- looked-up rows: a table whose rows are over one axis, tokens over two others, the minor one first, and the
  columns of the result over the first axis: rows of other tokens, so that the loss itself is wrong.
- split kernel: a dilated convolution whose kernel is sharded over its spatial dims: the kernel gradient has
  no relation to the right one, or the compiler stops.

A grouped convolution is corrected (`train/mend.py`), and plans with a split window or kernel are errors. For
the others, a parameter is gathered where it is read (`gather.py`); the note of the plan says where a step of
one's own needs that too. No plan tells which arrays come out wrong: `nxp.check_gradients` does.

Each fault has a canary of the same name in `tests/train/test_known_faults.py`, which fails once XLA computes
it right. The rule may go when the canary fails with every jax that pyproject.toml allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flax import nnx

from nnx_parallel.core.axes import axes_in, count_shards
from nnx_parallel.core.nodes import Path, iter_nodes, path_str
from nnx_parallel.core.text import few
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.batch import input_spec, position_axes
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.rules.ruleset import RuleSet

KNOWN_FAULTS = (
  "grouped convolution", "split window", "swapped examples", "crossed gradient", "looked-up rows",
  "split kernel",
)  # fmt: skip
OWN_STEP = "in a step of your own, XLA can compute wrong gradients on this mesh"


def check_convolutions(
  model: nnx.Module,
  leaves: Iterable[LeafPlan],
  rules: RuleSet,
  batch: Sequence[str],
  sizes: Mapping[str, int],
) -> None:
  """A `PlanError` for a layout whose kernel gradients XLA gets wrong in every step."""
  dilated = dilated_kernels(model)
  taps = [x.name for x in leaves if x.path in dilated and axes_in(x.spec[-2 - dilated[x.path] : -2])]
  if taps:
    raise PlanError(
      f"{few(taps)}: XLA cannot compute the gradient of a dilated convolution whose kernel is sharded over"
      " its spatial dims.",
      details=f"the gradient has no relation to the right one, or the compiler stops; mesh {dict(sizes)}",
      fix="shard its channels: a rule of None for the names of the spatial dims.",
    )
  split = sorted(axis for axis in _positions(rules, sizes) if sizes[axis] > 1)
  idle = [axis for axis, size in sizes.items() if size > 1 and axis not in (*batch, *split)]
  whole = [path_str(path) for path, groups in convolutions(model) if groups == 1]
  if whole and split and idle:
    raise PlanError(
      f"{few(whole)}: XLA makes the kernel gradient of a convolution over sharded positions"
      f" {count_shards(idle, sizes)} times too large on this mesh.",
      details=f"{few(split)} shards positions, and {few(idle)} neither them nor the examples;"
      f" mesh {dict(sizes)}",
      fix=f"let {few(idle)} shard the examples too: nxp.LogicalRules(batch={(*batch, *idle)}); or no rule"
      " that shards positions (`seq`, nxp.InputRules).",
    )


def own_step_notes(
  model: nnx.Module,
  leaves: Iterable[LeafPlan],
  tables: Iterable[LeafPlan],
  batch: Sequence[str],
  sizes: Mapping[str, int],
) -> list[str]:
  """What a step of one's own must do on this mesh, which `train_step` does."""
  others = [axis for axis, size in sizes.items() if size > 1 and axis not in batch]
  used = {axis for leaf in leaves if leaf.is_parameter for axis in axes_in(leaf.spec)}
  both = [axis for axis in batch if sizes[axis] > 1 and axis in used]
  notes: list[str] = []
  if grouped := [path_str(path) for path, groups in convolutions(model) if groups > 1 and others]:
    factor = count_shards(others, sizes)
    notes.append(
      f"{few(grouped)}: grouped convolutions, whose kernel gradients XLA makes up to {factor} times too large"
      " on this mesh in a step of your own; nxp.train_step computes them right"
    )
  split = {axis for leaf in tables for axis in axes_in(leaf.spec[-2:-1])}
  rows = [axis for axis in others if axis in split and sum(sizes[axis] > 1 for axis in batch) > 1]
  why = f"{few(both)} shards parameters and examples, {few(others)} no examples" if both and others else ""
  if why or rows:
    why = why or f"{few(rows)} shards the rows of tables, several axes shard the examples"
    mend = "differentiate nxp.parallel.gather_on_read(loss, model), as nxp.train_step does by itself"
    notes.append(f"{OWN_STEP} ({why}): {mend}")
  return notes


def _positions(rules: RuleSet, sizes: Mapping[str, int]) -> set[str]:
  """Mesh axes that split positions: dims of the inputs other than dim 0, or activations between layers."""
  ranks = () if rules.inputs is None else rules.inputs.by_rank
  inputs = {axis for rank in ranks for axis in axes_in(input_spec(rules, rank, sizes)[1:])}
  return inputs | {*position_axes(rules, sizes)}


def convolutions(model: nnx.Module) -> Iterator[tuple[Path, int]]:
  """The convolutions of a module: path, and number of groups."""
  for path, module in iter_nodes(model):
    groups = getattr(module, "feature_group_count", None)
    if isinstance(module, nnx.Module) and isinstance(groups, int):
      yield path, groups


def dilated_kernels(model: nnx.Module) -> dict[Path, int]:
  """The kernels of convolutions with gaps in their input, as transposed ones have, and their spatial dims."""
  found: dict[Path, int] = {}
  for path, module in iter_nodes(model):
    steps = module.strides if isinstance(module, nnx.ConvTranspose) else getattr(module, "input_dilation", 1)
    if isinstance(module, nnx.Module) and max(steps if isinstance(steps, Sequence) else (steps or 1,)) > 1:
      size = getattr(module, "kernel_size", ())
      found[(*path, "kernel")] = len(size) if isinstance(size, Sequence) else 1
  return found
