"""Budgets on what a step needs and sends, for a project's own tests."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

from nnx_parallel.core.text import format_bytes
from nnx_parallel.errors import ReportError
from nnx_parallel.report.chips import Chip
from nnx_parallel.report.chips import chip as chip_named
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.program.collectives import KINDS, Collective

_LIMIT = re.compile(r"\s*(<=|>=|==|<|>)\s*(.+)")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
  "<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_NAMES = {kind.replace("-", "_"): kind for kind in KINDS}


def assert_collectives(
  report: CompileReport, *, names: Mapping[str, float] | None = None, **limits: str | int
) -> None:
  """Checks what a step sends against budgets.

  Args:
    report: of a compiled step.
    names: further names for the expressions, e.g. `{"layers": 32}`.
    **limits: `<kind>_<measure>` or `<kind>_<axis>_<measure>`: a comparison, or a number that is an upper
      limit. Kinds: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `collective_permute`,
      `collective_broadcast`, or `all` for every kind. Measures: `bytes` (payload per step), `sent`
      (bytes that each device sends), `count` (runs per step). Expressions may use `params`, `optimizer` and
      `batch` (global bytes), and `+ - * /`.

  Raises:
    ReportError: a budget is broken, all broken ones in one message; or a budget cannot be read.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax.sharding import AxisType
    >>> from jax.sharding import NamedSharding
    >>> from jax.sharding import PartitionSpec as P
    >>> from nnx_parallel.report.compile_report import compile_report
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    >>> x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data")))
    >>> report = compile_report(jax.jit(lambda x: x.sum(0)).lower(x))
    >>> assert_collectives(report, all_reduce_data_count="==1", all_gather_bytes=0)
  """
  known = {**report.quantities, **(names or {})}
  broken: list[str] = []
  for key, limit in limits.items():
    kind, axis, measure = _read_key(key, report)
    chosen = [c for c in report.collectives if kind in ("all", c.kind) and (axis is None or axis in c.axes)]
    comparison, bound = _read_limit(limit, known)
    seen = _measure(chosen, measure)
    if not _COMPARE[comparison](seen, bound):
      broken.append(f"{key} = {_shown(seen, measure)}, budget {limit} = {_shown(bound, measure)}")
      broken += [f"  {_line(c)}" for c in sorted(chosen, key=lambda c: -c.total_bytes)[:4]]
  if broken:
    raise ReportError(
      "the step breaks its communication budget.",
      details="\n".join(broken),
      fix="print(report) shows where each comes from; raise the budget if that is intended.",
    )


def assert_fits(report: CompileReport, chip: Chip | str | None = None) -> None:
  """Checks that a step fits in a device's memory.

  Args:
    report: of a compiled step.
    chip: name or figures; by default those of the devices it was compiled for.

  Raises:
    ReportError: it does not fit, or the report and the table know no such device.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax.sharding import NamedSharding
    >>> from jax.sharding import PartitionSpec as P
    >>> from nnx_parallel.report.compile_report import compile_report
    >>> x = jax.device_put(jnp.ones(8), NamedSharding(jax.make_mesh((8,), ("data",)), P("data")))
    >>> assert_fits(compile_report(jax.jit(lambda x: x * 2).lower(x)), "h100")
  """
  figures = chip_named(chip) if chip is not None else report.chip
  if figures is None:
    raise ReportError(
      f"the memory of {report.target} is not in the table.", fix="assert_fits(report, 'h100')."
    )
  out_of_memory = not report.compiled and (report.chip is None or figures.name == report.chip.name)
  if report.need_bytes > figures.usable_bytes or out_of_memory:
    raise ReportError(
      f"the step does not fit on {figures.name}.",
      details=f"needs {format_bytes(report.need_bytes)} per device, "
      f"{format_bytes(figures.usable_bytes)} usable",
      fix="more microbatches, remat, or more devices along an axis that splits the parameters.",
    )


def _read_key(key: str, report: CompileReport) -> tuple[str, str | None, str]:
  prefix, _, measure = key.rpartition("_")
  for name in (*_NAMES, "all") if measure in ("bytes", "sent", "count") else ():
    axis = prefix.removeprefix(f"{name}_")
    if prefix == name or (axis != prefix and axis in report.axes):
      return _NAMES.get(name, name), None if prefix == name else axis, measure
  raise ReportError(
    f"cannot read the budget {key!r}.",
    details=f"kinds {', '.join((*_NAMES, 'all'))}; axes {', '.join(report.axes)}",
    fix="write <kind>_bytes, <kind>_count, <kind>_sent or <kind>_<axis>_bytes: all_gather_fsdp_bytes=0.",
  )


def _read_limit(limit: str | int, names: Mapping[str, float]) -> tuple[str, float]:
  if not isinstance(limit, str):
    return "<=", limit
  match = _LIMIT.fullmatch(limit)
  if not match:
    raise ReportError(f"cannot read the limit {limit!r}.", fix='write a comparison: "<=2*params".')
  return match.group(1), _evaluate(match.group(2), limit, names)


def _evaluate(text: str, limit: str, names: Mapping[str, float]) -> float:
  def value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
      return node.value
    if isinstance(node, ast.Name) and node.id in names:
      return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
      return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
    raise ReportError(
      f"cannot read {ast.unparse(node)!r} in the limit {limit!r}.",
      details=f"names: {', '.join(names) or '(none: the report was made without a plan)'}",
      fix="use numbers, + - * / and these names, or pass names={...}.",
    )

  try:
    return value(ast.parse(text, mode="eval").body)
  except SyntaxError as error:
    raise ReportError(f"cannot read the limit {limit!r}.", fix='for example "<=2*params".') from error


def _measure(chosen: list[Collective], measure: str) -> int:
  if measure == "count":
    return sum(c.times for c in chosen)
  return sum(c.total_bytes if measure == "bytes" else c.sent_bytes for c in chosen)


def _shown(value: float, measure: str) -> str:
  return f"{value:g}" if measure == "count" else f"{value:.0f} bytes ({format_bytes(value)})"


def _line(c: Collective) -> str:
  where = c.source or c.op
  return f"{c.kind} over {'+'.join(c.axes)}: {c.times} x {format_bytes(c.bytes)} from {where}"
