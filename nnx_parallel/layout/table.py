"""The layout of a model on a mesh: the one table that everything else reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import jax
from jax.sharding import PartitionSpec

from nnx_parallel.core.mesh import AnyMesh, axis_sizes
from nnx_parallel.core.nodes import Path, path_str
from nnx_parallel.core.text import few
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.batch import batch_axes, input_spec, no_batch_axes, with_batch
from nnx_parallel.layout.constrain import Scope, scoped
from nnx_parallel.layout.decide import nearest
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.rules.ruleset import RuleSet


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Table:
  """The layout of a model, and of its optimizer, on a mesh.

  Attributes:
    mesh: the mesh that the specs refer to.
    rules: the rules that were applied.
    leaves: every Variable of the model, then of the optimizer, in flax's order.
    notes: for the reader, for example rules that matched nothing.
    zero: ZeRO stage of the optimizer state (1), and of the gradients too (2).
    layers: the layers of the model, a line for each group.
  """

  mesh: AnyMesh
  rules: RuleSet
  leaves: tuple[LeafPlan, ...]
  notes: tuple[str, ...] = ()
  zero: int = 0
  layers: tuple[str, ...] = ()

  def __getitem__(self, name: str) -> LeafPlan:
    """The leaf with this dotted path (`optimizer/...` for optimizer state)."""
    found = self._by_name.get(name)
    if found is None:
      inside = [full for full in self._by_name if full.startswith(f"{name}.")]
      near = few(inside) if inside else ", ".join(nearest(name, self._by_name)) or "nothing like it"
      raise PlanError(
        f"the plan has no leaf {name!r}.",
        details=f"{'in it' if inside else 'nearest'}: {near}",
        fix="list them with [leaf.name for leaf in plan.leaves].",
      )
    return found

  @functools.cached_property
  def _by_name(self) -> dict[str, LeafPlan]:
    found = {leaf.name: leaf for leaf in self.leaves}
    tied = {path_str(path): leaf for leaf in self.leaves for path in leaf.aliases}
    return tied | found

  def of(self, root: Root) -> dict[Path, LeafPlan]:
    """The leaves of one object by path.

    Args:
      root: `"model"` or `"optimizer"`.

    Returns:
      Path -> leaf, in flax's order; empty for the optimizer of a plan without one.
    """
    return {leaf.path: leaf for leaf in self.leaves if leaf.root == root}

  def abstract_state(self, root: Root = "model") -> dict[Path, jax.ShapeDtypeStruct]:
    """Abstract arrays with the planned sharding, as stored; what a restore or an AOT compile needs.

    Args:
      root: `"model"` or `"optimizer"`.

    Returns:
      Path -> `ShapeDtypeStruct` (global storage shape, dtype, sharding).
    """
    return {path: leaf.struct for path, leaf in self.of(root).items()}

  def bytes_per_device(self, root: Root | None = None, *, host: bool = False) -> int:
    """Bytes that each device holds in its own memory.

    Args:
      root: count only this object; both when None.
      host: count the arrays in host memory instead (`plan(optimizer_memory="pinned_host")`).

    Returns:
      Bytes per device.
    """
    rows = (leaf for leaf in self.leaves if leaf.on_host == host and root in (None, leaf.root))
    return sum(leaf.bytes_per_device for leaf in rows)

  @functools.cached_property
  def batch_axes(self) -> tuple[str, ...]:
    """The mesh axes that split dim 0 of the inputs, major to minor; `()` for a replicated batch.

    Those of `InputRules`; else those of the `batch` rule; else the axes called `replica`, `data`, `dp` and
    `fsdp`, and the fallback's, as far as the mesh has them.

    Raises:
      ShardingError: no `batch` rule and no such axis.
    """
    axes = batch_axes(self.rules, axis_sizes(self.mesh))
    if axes is None:
      raise no_batch_axes(self.rules, axis_sizes(self.mesh))
    return axes

  def batch_spec(self, ndim: int) -> PartitionSpec:
    """The spec of an input: that of `InputRules`; else `batch_axes` on dim 0 only.

    Args:
      ndim: rank of the input; a scalar is replicated.

    Returns:
      A spec with `ndim` entries.

    Raises:
      ShardingError: no `batch` rule and no such axis.
    """
    return input_spec(self.rules, ndim, axis_sizes(self.mesh))

  def scope(self) -> contextlib.AbstractContextManager[None]:
    """Puts this plan's rules and mesh in scope; the default of a missing `batch` rule is `batch_axes`.

    `train_step` and `eval_step` do so by themselves. This is for a user's own step.

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
    """The rules and mesh of `scope`; the Variables of a model from this plan carry them as metadata."""
    return Scope(with_batch(self.rules, axis_sizes(self.mesh)), self.mesh, self.rules.inputs)

  def num_parameters(self) -> int:
    """Counts the elements of the model's parameters; tied ones once, padding not at all.

    Returns:
      Elements in all, over all devices.

    Example:
      >>> import nnx_parallel as nxp
      >>> from flax import nnx
      >>> nxp.plan(lambda: nnx.Linear(8, 64, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8)).num_parameters()
      576
    """
    return sum(math.prod(leaf.shape) for leaf in self.leaves if leaf.is_parameter)
