"""Known wrong results of XLA's partitioner: the layouts that may meet them, and what avoids them.

Such a fault raises no error, and the loss is often right. `train_step`, `eval_step` and `nxp.generator` avoid
all of them on Auto axes. A hand-written step does, if it differentiates `nxp.parallel.gather_on_read(loss,
model)`; grouped convolutions need `nxp.verify.with_correct_convolutions` too. A plan that would split a
window or a kernel is an error. The plan of a model with grouped convolutions, or on a mesh with swapped
examples, has a note, and `plan.audit()` names the arrays.

Each fault has a canary of the same name in `tests/train/test_known_faults.py`, which fails once XLA computes
it right. The rule may go when the canary fails with every jax that pyproject.toml allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flax import nnx

from nnx_parallel.core.axes import axes_in, axes_of
from nnx_parallel.core.nodes import Path, iter_nodes, path_str
from nnx_parallel.core.text import few
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.batch import input_spec, position_axes
from nnx_parallel.layout.leaf import LeafPlan
from nnx_parallel.rules.ruleset import RuleSet


@dataclasses.dataclass(frozen=True)
class Fault:
  """One kind of program with wrong results.

  Attributes:
    name: the name of this entry, and of its canary.
    where: the layouts that have it.
    what: which numbers are wrong, and by how much.
    rule: how a step computes it right.
    seen: the versions of jax with the fault, with Shardy and with GSPMD.
  """

  name: str
  where: str
  what: str
  rule: str
  seen: str = "0.10.2 to 0.12.0.1"

  def __str__(self) -> str:
    return f"{self.name}: {self.where}: {self.what}"


GROUPED = Fault(
  "grouped convolution",
  "a grouped or depthwise convolution, on a mesh with axes that do not split the batch",
  "the kernel gradient is multiplied by the sizes of these axes; with two groups and channels over 4 devices"
  " the compiler aborts the process",
  "each device computes the kernel gradient on its own examples, and the devices sum it",
)
WINDOW = Fault(
  "split window",
  "a convolution over a dim that a mesh axis splits, on a mesh with axes that split nothing of it",
  "the kernel gradient is multiplied by the sizes of the axes that split nothing",
  "such a plan is an error",
)
EXAMPLES = Fault(
  "swapped examples",
  "the batch over two axes, a parameter over the minor one and a third axis of the same size",
  "a device gets the product of another device's examples: everything computed from it is wrong, often"
  " the gradients below a layer alone, while the loss is right",
  "a parameter is gathered over the axes that split the batch where it is read (`layout/gather.py`)",
)
CROSSED = Fault(
  "crossed gradient",
  "the batch over one axis, parameters over this axis and over two more axes of the same size",
  "the gradient of a kernel whose two dims end up on the two other axes is off by half",
  "a parameter is gathered where it is read, and its gradient is summed in the same layout",
)
KERNEL = Fault(
  "split kernel",
  "a dilated convolution whose kernel is split over its spatial dims",
  "the kernel gradient has no relation to the right one, or the compiler stops: with an error, or with the"
  " process where each device has two taps",
  "such a plan is an error, and `fsdp` does not split these dims",
)
OWN_STEP = "XLA can make the gradients of a jit of your own wrong on this mesh"
KNOWN_FAULTS = (GROUPED, WINDOW, EXAMPLES, CROSSED, KERNEL)


def possible_faults(
  leaves: Sequence[LeafPlan],
  model: nnx.Module | None,
  rules: RuleSet,
  batch: Sequence[str],
  sizes: Mapping[str, int],
) -> list[tuple[Fault, str]]:
  """The faults that a layout may meet, in the order of `KNOWN_FAULTS`, and the names of layers or leaves."""
  found: list[tuple[Fault, str]] = []
  others = {axis for axis, size in sizes.items() if axis not in batch and size > 1}
  layers = [] if model is None else list(convolutions(model))
  grouped = [path_str(path) for path, groups in layers if groups > 1]
  if grouped and others:
    found.append((GROUPED, few(grouped)))
  split = {axis for axis in _positions(rules, sizes) if sizes[axis] > 1}
  whole = [path_str(path) for path, groups in layers if groups == 1]
  if whole and split and others - split:
    found.append((WINDOW, few(whole)))
  matrices = [leaf for leaf in leaves if len(leaf.shape) > 1]
  larger = [axis for axis in batch if sizes[axis] > 1]
  used = {axis for leaf in matrices for axis in axes_in(leaf.spec)}
  for axis in (*larger[1:], *larger[:1]):
    equal = {other for other in others if sizes[other] == sizes[axis]}
    fault = CROSSED if axis == larger[0] else EXAMPLES
    names = [
      leaf.name
      for leaf in matrices
      if _crossed(leaf, axis, equal) and (fault is CROSSED or _meets(leaf, axis, equal, leaves))
    ]
    if names and (fault is EXAMPLES or len(equal & used) > 1):
      found.append((fault, few(names)))
  dilated = {} if model is None else dilated_kernels(model)
  taps = [x.name for x in leaves if x.path in dilated and axes_in(x.spec[-2 - dilated[x.path] : -2])]
  return [*found, (KERNEL, few(taps))] if taps else found


def check_faults(
  found: Iterable[tuple[Fault, str]], rules: RuleSet, sizes: Mapping[str, int], batch: Sequence[str]
) -> None:
  """A `PlanError` for a layout whose gradients XLA gets wrong in every step."""
  for fault, names in found:
    if fault is KERNEL:
      raise PlanError(
        f"{names}: XLA cannot compute the gradient of a dilated convolution whose kernel is sharded over its"
        " spatial dims.",
        details=f"{fault.what}; mesh {dict(sizes)}",
        fix="shard its channels: a rule of None for the names of the spatial dims.",
      )
    if fault is WINDOW:
      split = sorted(axis for axis in _positions(rules, sizes) if sizes[axis] > 1)
      idle = [axis for axis, size in sizes.items() if size > 1 and axis not in (*batch, *split)]
      raise PlanError(
        f"{names}: XLA makes the kernel gradient of a convolution over sharded positions"
        f" {math.prod(sizes[axis] for axis in idle)} times too large on this mesh.",
        details=f"{few(split)} shards positions, and {few(idle)} neither them nor the examples; mesh"
        f" {dict(sizes)}",
        fix=f"let {few(idle)} shard the examples too: nxp.LogicalRules(batch={(*batch, *idle)}); or no rule"
        " that shards positions (`seq`, nxp.InputRules).",
      )


def _meets(leaf: LeafPlan, axis: str, others: set[str], leaves: Sequence[LeafPlan]) -> bool:
  """Whether another array may split the dim that `axis` splits here, as part of an activation, otherwise.

  XLA gets the product wrong if it has an activation that one of the `others` splits on that dim, for example
  after a norm whose scale it splits.
  """
  lengths = {leaf.shape[dim] for dim, entry in enumerate(leaf.spec) if axis in axes_of(entry)}
  return any(
    others & {*axes_of(entry)} and other.shape[dim] in lengths
    for other in leaves
    for dim, entry in enumerate(other.spec)
  )


def _crossed(leaf: LeafPlan, axis: str, others: set[str]) -> bool:
  """Whether one dim is over `axis`, and another dim over one of the `others`."""
  over = [dim for dim, entry in enumerate(leaf.spec) if axis in axes_of(entry)]
  return any(others & {*axes_of(entry)} for dim, entry in enumerate(leaf.spec) if dim not in over and over)


def fault_notes(
  found: Iterable[tuple[Fault, str]], sizes: Mapping[str, int], batch: Sequence[str]
) -> tuple[list[str], list[str]]:
  """A line for each fault: faults of operations that the model has, and faults that the layout may meet."""
  factor = math.prod(size for axis, size in sizes.items() if axis not in batch)
  sure: list[str] = []
  perhaps: list[str] = []
  for fault, names in found:
    if fault is GROUPED:
      sure.append(
        f"{names}: grouped convolutions, whose kernel gradients XLA makes up to {factor} times too large on"
        " this mesh; train_step computes them right, a jit of your own does not"
      )
      continue
    perhaps.append(
      f"{names}: a fault of XLA ({fault.name}) can make results wrong here, and the gradients of the layers"
      " before it, in a jit of your own, not in train_step and eval_step;"
      " nxp.check_gradients(model, batch, loss) checks your step"
    )
  return sure, perhaps


def own_step_note(leaves: Iterable[LeafPlan], batch: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
  """The note on a mesh where XLA may confuse axes: one shards parameters and examples, another does not."""
  others = [axis for axis, size in sizes.items() if size > 1 and axis not in batch]
  used = {axis for leaf in leaves if leaf.is_parameter for axis in axes_in(leaf.spec)}
  both = [axis for axis in batch if sizes[axis] > 1 and axis in used]
  if not both or not others:
    return []
  return [
    f"{OWN_STEP} ({few(both)} shards parameters and examples, beside {few(others)}), but not in train_step;"
    " differentiate nxp.parallel.gather_on_read(loss, model) there"
  ]


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
