"""The table of a plan: every Variable and its layout. Text, JSON, audits and differences read only this."""

from __future__ import annotations

import dataclasses
import functools

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import AnyMesh
from nnx_parallel.core.nodes import Path, path_str
from nnx_parallel.core.text import few
from nnx_parallel.errors import PlanError
from nnx_parallel.layout.decide import nearest
from nnx_parallel.layout.leaf import LeafPlan, Root
from nnx_parallel.rules.ruleset import RuleSet


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PlanTable:
  """The layout of a model and of its optimizer; see `Plan`, which says how both are built."""

  mesh: AnyMesh
  rules: RuleSet
  leaves: tuple[LeafPlan, ...]
  notes: tuple[str, ...] = ()
  zero: int = 0
  layers: tuple[str, ...] = ()

  @check_arguments(PlanError)
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

  @check_arguments(PlanError)
  def of(self, root: Root) -> dict[Path, LeafPlan]:
    """The leaves of the model or of the optimizer, by path.

    Args:
      root: `"model"` or `"optimizer"`.

    Returns:
      Path -> leaf, in Flax's order; empty for the optimizer of a plan without an optimizer.
    """
    return {leaf.path: leaf for leaf in self.leaves if leaf.root == root}

  @check_arguments(PlanError)
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
