"""The plan: one table of every Variable, its layout, and the decision behind it.

Creation, training, checkpoints and reports read this table, and derive no layout. `planning.plan` makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from typing_extensions import TypeVar  # with a default, which typing has from Python 3.13 on

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.core.nodes import Path, kind_of, path_str, value_of
from nnx_parallel.core.padding import logical_transformation
from nnx_parallel.core.text import as_html, format_array
from nnx_parallel.core.types import AnyArray
from nnx_parallel.errors import PlanError
from nnx_parallel.layout import offload
from nnx_parallel.layout.batch import batch_axes, input_spec, no_batch_axes, with_batch
from nnx_parallel.layout.constrain import Scope, scoped
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.layout.sharded_optimizer import Placement
from nnx_parallel.layout.show import audit, diff, json, picture, text
from nnx_parallel.layout.show.audit import Audit, Trainable
from nnx_parallel.layout.show.diff import PlanDiff
from nnx_parallel.layout.table import PlanTable
from nnx_parallel.layout.tracing import Abstract

R = TypeVar("R", default=Any)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Plan(PlanTable, Generic[R]):
  """The layout of a model and its optimizer on a mesh. The function `nxp.plan` makes it.

  For type checkers, the class is generic in the objects that it creates: `Plan[Model]`, or
  `Plan[tuple[Model, ShardedOptimizer[Model]]]` with an optimizer. A plan that was read from JSON can be
  printed and compared, but it cannot create a model.

  Attributes:
    mesh: the mesh that the specs refer to.
    rules: the rules that were applied.
    leaves: a `LeafPlan` for every Variable of the model, then for every Variable of the optimizer, in the
      order of Flax.
    notes: remarks for the reader, for example about rules that matched nothing.
    zero: the ZeRO stage: 1 shards the optimizer state, and 2 also the gradients; 0 shards neither.
    layers: the layers of the model, one line of text for each group of equal layers.
    init: the constructor that was planned; None if the plan was read from JSON.
    tx: the Optax transformation, or None if the plan has no optimizer.
    wrt: which Variables the optimizer trains.
    abstract: graph definition and abstract state of the model and of the optimizer; empty without `init`.
  """

  init: Callable[[], nnx.Module] = None  # pyright: ignore[reportAssignmentType]  # check_plan refuses it
  tx: optax.GradientTransformation | None = None
  wrt: nnx.filterlib.Filter = nnx.Param
  abstract: Mapping[Root, Abstract] = dataclasses.field(default_factory=dict[Root, Abstract])

  @check_arguments(PlanError)
  def abstract_state(self, root: Root = "model") -> dict[Path, jax.ShapeDtypeStruct]:
    """Returns abstract arrays with the planned shardings, as stored, for a restore or an AOT compilation.

    Args:
      root: `"model"` or `"optimizer"`.

    Returns:
      A dict: path -> `ShapeDtypeStruct` (global storage shape, dtype and sharding).
    """
    return {path: leaf.struct for path, leaf in self.of(root).items()}

  @functools.cached_property
  def batch_axes(self) -> tuple[str, ...]:
    """The mesh axes that shard dim 0 of the inputs, major to minor; `()` for a replicated batch.

    The axes come from `InputRules` if there are any, and otherwise from the `batch` rule. Without that rule,
    they are the axes called `replica`, `data`, `dp` and `fsdp`, and the axis of the fallback, as far as the
    mesh has them.

    Raises:
      ShardingError: there is no `batch` rule and no such axis.
    """
    axes = batch_axes(self.rules, axis_sizes(self.mesh))
    if axes is None:
      raise no_batch_axes(self.rules, axis_sizes(self.mesh))
    return axes

  @check_arguments(PlanError, ndim=range(65))
  def batch_spec(self, ndim: int) -> PartitionSpec:
    """Returns the spec of an input with `ndim` dims, by `InputRules`; else `batch_axes` on dim 0 only.

    Args:
      ndim: the rank of the input; a scalar is replicated.

    Returns:
      A spec with `ndim` entries.

    Raises:
      ShardingError: there is no `batch` rule and no such axis.
    """
    return input_spec(self.rules, ndim, axis_sizes(self.mesh))

  def scope(self) -> contextlib.AbstractContextManager[None]:
    """Puts the rules and the mesh of this plan in scope. Without a `batch` rule, `batch_axes` is the rule.

    `train_step` and `eval_step` already do this. Use `scope` in a step that you write yourself.

    Returns:
      A context manager; see `use_rules`.

    Example:
      >>> import jax.numpy as jnp, nnx_parallel as nxp
      >>> from flax import nnx
      >>> plan = nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
      >>> with plan.scope():
      ...   nxp.constrain(jnp.ones((8, 4)), "batch", None).sharding.spec
      P('data', None)
    """
    return scoped(self.activation_rules)

  @functools.cached_property
  def activation_rules(self) -> Scope:
    """The rules and the mesh of `scope`. Variables that this plan creates carry them as metadata."""
    rules, stated = self.rules, "batch" in self.rules.logical or self.rules.inputs is not None
    return Scope(with_batch(rules, axis_sizes(self.mesh)), self.mesh, rules.inputs, stated)

  def num_parameters(self) -> int:
    """Counts the elements of the model's parameters: tied parameters only once, and padding not at all.

    Returns:
      The total number of elements, over all devices.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> nxp.plan(lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)).num_parameters()
      576
    """
    return sum(math.prod(leaf.shape) for leaf in self.leaves if leaf.is_parameter)

  @check_arguments(PlanError)
  def explain(self, name: str) -> str:
    """Explains how the layout of one leaf was decided.

    Args:
      name: the dotted path of the leaf, as in `LeafPlan.name`; for a tied Variable, any of its paths.

    Returns:
      A few lines of text: the array, the origin of its names, each rule that was tried and its result, the
      part on each device, and the optimizer state that has the same layout.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> names = {"out_sharding": ("embed", "mlp")}
      >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0), kernel_metadata=names)
      >>> rules = nxp.LogicalRules(embed=None, mlp="tensor")
      >>> print(nxp.plan(init, nxp.make_mesh(data=2, tensor=4), rules).explain("kernel"))
      kernel: Param float32[8,64] -> P(None, 'tensor')
        from its metadata: ('embed', 'mlp')
        'embed' -> None
        'mlp' -> 'tensor'
        each device holds float32[8,16], 512 bytes of 2048 (2 copies on 8 devices)
    """
    return text.explain(self, self[name])

  def __repr__(self) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in axis_sizes(self.mesh).items())
    return f"<{type(self).__name__}: {len(self.leaves)} arrays on mesh {mesh}; print it for the table>"

  def __str__(self) -> str:
    return text.plan_text(self)

  def _repr_html_(self) -> str:
    return as_html(text.plan_text(self, width=160))

  def show(self) -> None:
    """Prints the plan: in a terminal with colours and at its width, in a notebook as HTML."""
    text.show(self)

  @check_arguments(PlanError)
  def picture(self, name: str) -> str:
    """Draws which devices hold which block of an array, as text.

    Args:
      name: the dotted path of the leaf.

    Returns:
      A table of the blocks, to print. At most 16 x 16 blocks are drawn, and the others are counted below.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> init = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0))
      >>> plan = nxp.plan(init, nxp.make_mesh(data=2, fsdp=4), nxp.fsdp(min_size=0))
      >>> print(plan.picture("kernel"))
      kernel  float32[8,64]  (-, fsdp), 512 B per device on mesh data=2 x fsdp=4
      in each block: its devices; to the right: dim 1 over fsdp
        0:16  16:32  32:48  48:64
        0, 4  1, 5   2, 6   3, 7
    """
    return picture.draw_blocks(self[name])

  @check_arguments(PlanError)
  def audit(self, *, min_bytes: int = 2**20) -> Audit:
    """Lists the large leaves that every device holds in full, and the mesh axes that could shard them.

    Args:
      min_bytes: leaves of at most this many bytes are not reported.

    Returns:
      An `Audit`, with the largest leaves first. It prints as a table, and it is empty (falsy) if nothing
      large is replicated.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> plan = nxp.plan(lambda: nnx.Linear(1024, 512, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8))
      >>> [(found.leaf.name, found.wasted, found.remedy) for found in plan.audit()]
      [('kernel', 1835008, 'fsdp could split dim 0 (1024)')]
    """
    return audit.audit(self, min_bytes=min_bytes)

  def warn_replicated(self) -> bool:
    """Warns once about large parameters that are replicated without a rule.

    There is no warning for a parameter that a rule replicates (with `None`, `replicate()` or the threshold of
    `fsdp()`), although `audit` lists this parameter.

    Returns:
      Whether there was a reason to warn.
    """
    return audit.warn_replicated(self)

  @check_arguments(PlanError)
  def diff(self, other: Plan[Any]) -> PlanDiff:
    """Compares the layout of this plan with another plan.

    Args:
      other: the plan to compare with, for example on another mesh, with other rules, or of another version of
        the model.

    Returns:
      A `PlanDiff`, which prints as a table and is falsy if both layouts are equal. Reasons are not compared.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> init, mesh = lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)
      >>> before, after = nxp.plan(init, mesh, nxp.replicate()), nxp.plan(init, mesh, nxp.fsdp(min_size=64))
      >>> print(before.diff(after))
      changed  n  what  before      after
      kernel   1  spec  replicated  (-, fsdp)
      per device 2.25 KiB -> 512 B
    """
    check_plan(other, "plan.diff(other)", creates=False)
    return diff.diff(self, other)

  def to_json(self) -> str:
    """Returns the plan as JSON: mesh axes, rules, and every leaf with its decision, but not the constructor.

    Returns:
      JSON text with one line for each leaf; `from_json` reads it.

    Raises:
      PlanError: a part of a path is not a string, an int or a tuple of these.
    """
    return json.to_json(self)

  @check_arguments(PlanError)
  def trainable(self, wrt: nnx.filterlib.Filter | None = None) -> Trainable:
    """Counts the parameters that a filter trains and the parameters that it freezes.

    Args:
      wrt: a filter as in `nnx.Optimizer`; None uses the `wrt` of the plan.

    Returns:
      The trained leaves and the frozen leaves. The result prints as counts, bytes and paths.

    Raises:
      PlanError: the filter selects no parameter.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> plan = nxp.plan(lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8))
      >>> print(plan.trainable(nnx.PathContains("bias")))
      trained      1 arrays               64 elements   total size 256 B, 256 B per device
      frozen       1 arrays              512 elements   total size 2 KiB, 2 KiB per device
      trained: bias
      frozen: kernel
    """
    check_plan(self, "plan.trainable(wrt)")
    return audit.trainable(self, self.abstract["model"], self.wrt if wrt is None else wrt)

  @classmethod
  @check_arguments(PlanError)
  def from_json(cls, text: str) -> Plan[R]:
    """Reads a plan from JSON, to print it or to compare it with another plan.

    Args:
      text: the text that `to_json` wrote.

    Returns:
      A plan with the stored layout, on an abstract mesh. It cannot create a model.

    Raises:
      PlanError: the text is not a plan in JSON.
    """
    return cls(**json.from_json(text))

  @functools.cached_property
  def abstract_model(self) -> Any:
    """The module with `ShapeDtypeStruct` values. Read it, but do not change it."""
    check_plan(self, "plan.abstract_model")
    return self.abstract["model"].node

  @functools.cached_property
  def abstract_optimizer(self) -> nnx.Optimizer[Any] | None:
    """The optimizer with `ShapeDtypeStruct` values, or None."""
    return self.abstract["optimizer"].node if "optimizer" in self.abstract else None

  def without_optimizer(self) -> Plan:
    """The plan of the model alone."""
    leaves = tuple(leaf for leaf in self.leaves if leaf.root == "model")
    abstract: dict[Root, Abstract] = {root: x for root, x in self.abstract.items() if root == "model"}
    return dataclasses.replace(self, leaves=leaves, tx=None, abstract=abstract)

  @functools.cached_property
  def live_tx(self) -> Any:
    """The transformation of live optimizers: `tx`, adapted to padded arrays and to state in host memory."""
    tx = self.tx
    if tx is not None and any(any(leaf.padding) for leaf in self.leaves):
      tx = logical_transformation(tx, nnx.as_pure(self.abstract["model"].chosen(self.wrt)))
    away = {path_str(x.path[1:]): (x.parameter, x.bytes_per_device) for x in self.leaves if x.on_host}
    return offload.stream(tx, away) if tx is not None and away else tx

  @functools.cached_property
  def placement(self) -> Placement:
    """The shardings to which `ShardedOptimizer.update` constrains the parameters and the state."""
    roots: tuple[Root, ...] = ("model", "optimizer")
    model, optimizer = ({path: leaf.sharding for path, leaf in self.of(root).items()} for root in roots)
    gradients = self._scattered
    tables = (tuple(table.items()) for table in (model, optimizer, gradients))
    made = Placement(model, optimizer, self.zero, gradients)
    return _PLACEMENTS.setdefault((self.zero, *tables), made)

  @property
  def _scattered(self) -> dict[Path, NamedSharding]:
    """The shardings of gradients in the layout of their optimizer state, where that is split further."""
    parameters, found = self.of("model"), dict[Path, NamedSharding]()
    for leaf in self.leaves:
      own = parameters[leaf.parameter] if leaf.parameter is not None else leaf
      if leaf.shape == own.shape and math.prod(leaf.shards) > math.prod(own.shards):
        # The state may be stored in the host's memory; gradients are not.
        found.setdefault(own.path, NamedSharding(self.mesh, leaf.spec))  # pyright: ignore[reportArgumentType]
    return found


_PLACEMENTS: weakref.WeakValueDictionary[Hashable, Placement] = weakref.WeakValueDictionary()
"""Equal placements are one object, since steps are compiled for its identity."""


def check_plan(plan: object, call: str, *, creates: bool = True) -> None:
  """Raises a `PlanError` unless `plan` is a plan, with a constructor if the `call` creates."""
  if not isinstance(plan, Plan):
    name = call.partition("(")[0].removeprefix("nxp.")
    raise PlanError(
      f"{name} needs a plan, and got a value of type {type(plan).__name__}.",
      fix=f"{call}, with plan = nxp.plan(init, mesh, rules).",
    )
  if creates and not plan.abstract:
    raise PlanError(
      "this plan was read from JSON, without its constructor, so it cannot build a module.",
      fix="nxp.plan(init, mesh, rules).",
    )


def check_structure(
  leaves: Iterable[LeafPlan], arrays: Mapping[Root, Mapping[Path, AnyArray]], what: str, fix: str
) -> None:
  """Raises a `PlanError` for the first array of a built module or optimizer that is not as planned."""
  planned = {leaf.name: _described(leaf.kind, leaf.shape, leaf.dtype, leaf.is_parameter) for leaf in leaves}
  built: dict[str, str] = {}
  for root, found in arrays.items():
    prefix = "" if root == "model" else "optimizer/"
    for path, leaf in found.items():
      value, is_parameter = value_of(leaf), not prefix and isinstance(leaf, nnx.Param)
      # Numbers and numpy arrays have the dtype that jax gives them under a trace.
      dtype = value.dtype if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) else jnp.result_type(value)
      built[prefix + path_str(path)] = _described(kind_of(leaf), np.shape(value), dtype, is_parameter)
  for name in dict.fromkeys([*planned, *built]):
    if planned.get(name) != built.get(name):
      details = f"planned {planned.get(name, 'nothing')}, built {built.get(name, 'nothing')}"
      raise PlanError(f"{what}: {name}.", details=details, fix=fix)


def _described(kind: str, shape: tuple[int, ...], dtype: DTypeLike, is_parameter: bool) -> str:
  return f"{kind} {format_array(dtype, shape)}" + (", a parameter" if is_parameter else "")
