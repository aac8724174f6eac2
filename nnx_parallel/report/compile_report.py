"""What a compiled step needs, sends and computes, according to the compiler of its target machine."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from nnx_parallel.core.axes import count_shards
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.jaxprs import nbytes
from nnx_parallel.core.mesh import axis_sizes, explicit_axes, no_mesh
from nnx_parallel.core.nodes import path_str, variables
from nnx_parallel.core.text import Shown
from nnx_parallel.core.types import PyTree
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.decode.generate import Generator
from nnx_parallel.errors import ReportError
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.report.chips import Chip, chip_of
from nnx_parallel.report.chips import chip as chip_named
from nnx_parallel.report.inputs import batch_structs, check_batch, state_categories
from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.collectives import KINDS, Collective, collectives, totals
from nnx_parallel.report.program.compiler import (
  Compiled,
  MemoryStats,
  Reshard,
  find_reshards,
  memory_stats,
  run_compiler,
)
from nnx_parallel.report.program.cost import Cost, cost
from nnx_parallel.report.program.hlo_devices import Labels
from nnx_parallel.report.program.peak import PeakBuffer, at_peak
from nnx_parallel.report.program.replicated import SHARE, Batch, ReplicatedActivation, replicated_activations
from nnx_parallel.report.topology import slice_numbers, topology_mesh
from nnx_parallel.train.step import EvalStep, TrainStep


@dataclasses.dataclass(frozen=True)
class Argument:
  """An array that the step takes, by JAX's name or its path in the plan, with its bytes per device."""

  name: str
  bytes: int
  donated: bool


class Sent(NamedTuple):
  """The totals of some collectives of a step.

  Attributes:
    bytes: payload per step: the bytes that each group of devices holds in total, global bytes.
    per_device: bytes that each device sends in a step.
    times: the number of runs per step.
    exposed: the part of `per_device` that no computation overlaps with, by the schedule of the compiler.
  """

  bytes: int
  per_device: int
  times: int
  exposed: int


@functools.singledispatch
def text_of(report: Any) -> str:
  """A report as text; the module that writes it registers itself for the type of the report."""
  raise TypeError(f"no text of {type(report).__name__}")


@functools.singledispatch
def page_of(report: Any) -> str:
  """A report as an HTML page; registered like `text_of`."""
  raise TypeError(f"no page of {type(report).__name__}")


class Paged(Shown):
  """Has an HTML page, which notebooks show in a frame, so that its style stays its own."""

  def to_html(self) -> str:
    """One self-contained HTML page."""
    return page_of(self)

  def _repr_html_(self) -> str:
    page = html.escape(self.to_html(), quote=True)
    return (
      f"<iframe srcdoc='{page}' width='100%' height='700' style='border:0' sandbox='allow-scripts'></iframe>"
    )


@dataclasses.dataclass(frozen=True)
class CompileReport(Paged):
  """The figures of a compiled step, per device and per step.

  Attributes:
    target: the devices of the compilation, e.g. `"16 x TPU v5 lite"`.
    chip: published figures of the device, or None if the table does not have the device. If the program is
      for devices of this process, `usable_bytes` is the limit that they report.
    axes: mesh axis -> size in devices.
    memory: the memory figures of the compiler.
    need_bytes: the memory that one device needs, measured as its backend requires.
    fits: whether `need_bytes` is within `chip.usable_bytes`; None without a chip.
    compiled: False if the compiler stopped because the program does not fit. The other figures are then read
      from the program at the point where the compiler stopped.
    arguments: every array that the step takes, largest first.
    categories: the bytes per device of the arguments by category (`{"parameters": ...}`), and of the memory
      that the compiler adds.
    cost: the matrix FLOPs, the memory traffic, and the operations that neither of them counts.
    collectives: the collectives, in program order.
    peak: the arrays that are in memory when the step uses the most memory, without the arguments; largest
      first.
    reshards: arrays that the compiler replicates in order to shard them in another way.
    seconds: the compile time.
    quantities: global sizes in bytes, to compare `sent` with: `params`, `optimizer`, `batch`.
    examples: the number of examples of a microbatch on one device, or None if unknown.
    batch_split: the number of shards into which the plan divides the batch, or None without a plan.
    replicated_activations: the activations that hold all examples on every device although the plan shards
      the batch, if they take 1 % or more of the needed memory; largest first. None without a plan, or if the
      plan does not shard the batch, or the arrays of the batch have different numbers of examples.
    layers: lines of text that say how the layers of a `train_step` or `eval_step` are computed; for a
      pipeline, its schedule and its bubble.
    slices: the number of TPU slices, or of hosts with other devices, that the mesh spans. `Collective.slices`
      says between how many of them a collective sends.
  """

  target: str
  chip: Chip | None
  axes: Mapping[str, int]
  memory: MemoryStats
  need_bytes: int
  fits: bool | None
  compiled: bool
  arguments: tuple[Argument, ...]
  categories: Mapping[str, int]
  cost: Cost
  collectives: tuple[Collective, ...]
  peak: tuple[PeakBuffer, ...]
  reshards: tuple[Reshard, ...]
  seconds: float
  quantities: Mapping[str, int]
  examples: int | None = None
  batch_split: int | None = None
  replicated_activations: tuple[ReplicatedActivation, ...] | None = None
  layers: tuple[str, ...] = ()
  slices: int = 1

  @property
  def available_bytes(self) -> int | None:
    """The memory of one device that a program may use, in bytes."""
    return self.chip.usable_bytes if self.chip else None

  @property
  def kept(self) -> tuple[Argument, ...]:
    """The arguments whose memory the results do not reuse (they are not donated), largest first."""
    return tuple(argument for argument in self.arguments if not argument.donated)

  @check_arguments(ReportError)
  def sent(self, kind: str | None = None, *, axis: str | None = None) -> Sent:
    """Returns the totals of the collectives of the step, for communication budgets in your tests.

    Args:
      kind: `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"`,
        `"collective-broadcast"`, or None for every kind.
      axis: count only collectives over this mesh axis, alone or together with other axes; None counts all.

    Returns:
      The bytes and the runs per step. Compare them with `report.quantities`, which has the bytes of `params`,
      `optimizer` and `batch`.

    Raises:
      ReportError: there is no such kind or axis.

    Example:
      >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
      >>> x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(nxp.make_mesh(data=8), jax.P("data")))
      >>> report = compile_report(jax.jit(lambda x: x.sum(0)).lower(x))
      >>> report.sent("all-reduce", axis="data").times, report.sent("all-gather").bytes
      (1, 0)
    """
    for value, known, what in ((kind, KINDS, "collective"), (axis, self.axes, "mesh axis")):
      if value is not None and value not in known:
        raise ReportError(
          f"there is no {what} {value!r}.", details=f"known: {', '.join(known)}", fix="one of these."
        )
    chosen = [c for c in self.collectives if kind in (None, c.kind) and (axis is None or axis in c.axes)]
    return Sent(
      bytes=sum(c.total_bytes for c in chosen),
      per_device=sum(c.sent_bytes for c in chosen),
      times=sum(c.times for c in chosen),
      exposed=sum(c.sent_bytes for c in chosen if not c.overlapped),
    )

  @check_arguments(ReportError)
  def bytes_by(self, *keys: str) -> dict[tuple[str, ...], int]:
    """Returns the payload bytes per step, grouped by fields of `Collective`, largest first.

    Args:
      *keys: field names, e.g. `"kind"`, `"axes"`, `"source"`.

    Returns:
      A dict: the values of these fields as text -> bytes.

    Raises:
      ReportError: there is no such field.

    Example:
      >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
      >>> x = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(nxp.make_mesh(data=8), jax.P("data")))
      >>> report = compile_report(jax.jit(lambda x: x.sum(0)).lower(x))
      >>> report.bytes_by("kind", "axes")
      {('all-reduce', 'data'): 32}
    """
    known = [field.name for field in dataclasses.fields(Collective)]
    if unknown := [key for key in keys if key not in known]:
      raise ReportError(f"collectives have no field {unknown[0]!r}.", fix=f"one of {', '.join(known)}.")
    sums = totals(self.collectives, lambda item: tuple(_text(getattr(item, name)) for name in keys))
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))

  def to_json(self) -> str:
    """Returns the report as JSON, with the verdict and the totals."""
    body = dataclasses.asdict(self)
    body["cost"]["flops"] = self.cost.flops
    body["available_bytes"] = self.available_bytes
    body["sent_bytes"] = sum(item.sent_bytes for item in self.collectives)
    return json.dumps(body, indent=2)

  def __str__(self) -> str:
    return text_of(self)


@check_arguments(ReportError)
def compile_report(
  step: Any,
  plan: Plan | None = None,
  *args: PyTree,
  batch: PyTree = None,
  topology: str | None = None,
  chip: Chip | str | None = None,
) -> CompileReport:
  """Compiles a step without running it, and reports its memory, arithmetic and collectives.

  Args:
    step: a result of `train_step`, `eval_step` or `generator`, a function under `nnx.jit` or `jax.jit`, or a
      program that is already lowered or compiled.
    plan: the plan of the step's model and optimizer, which need not exist yet. Its rules are in scope for
      `constrain`, unless you have put other rules in scope.
    *args: without a plan, the arguments of the step, real or abstract; with a plan, the arguments of the step
      after the batch.
    batch: a pytree of arrays or `jax.ShapeDtypeStruct`s of the global batch; for a generator, the prompts.
    topology: the name of a machine that you need not have, such as `"tpu:v5e:4x4"` or `"gpu:h100:2x8"`; by
      default the devices of the plan's mesh. The guide "Will it fit, and which layout?" lists the names.
    chip: the chip whose memory decides whether the program fits; by default the chip that the step is
      compiled for.

  Returns:
    The report; print it, read its fields, or turn it into JSON or a page.

  Raises:
    ReportError: an abstract plan has no topology, or one with another number of devices or without its
      compiler; the compiler rejects the program for another reason than memory; `step` is no step; or the
      batch has no array or does not divide.

  Example:
    >>> import jax, jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))
    >>> step = nxp.train_step(lambda model, x: (model(x) ** 2).mean())
    >>> report = compile_report(step, plan, batch=jax.ShapeDtypeStruct((16, 8), jnp.float32))
    >>> report.fits, report.memory.arguments, report.bytes_by("kind")[("all-gather",)]
    (True, 100, 256)
  """
  if isinstance(step, jax.stages.Lowered | jax.stages.Compiled):
    return report_of(step, chip)
  if not hasattr(step, "lower") or isinstance(step, str | bytes):
    raise ReportError(
      f"compile_report needs a step, and cannot lower {getattr(step, '__name__', type(step).__name__)}.",
      fix="nxp.compile_report(nxp.train_step(loss_fn), plan, batch=batch); jax.jit and nnx.jit make steps"
      " too.",
    )
  if plan is None:
    if not args and isinstance(step, TrainStep | Generator):
      check_plan(plan, "nxp.compile_report(step, plan, batch=batch)")
    return report_of(step.lower(*args), chip)
  check_plan(plan, "nxp.compile_report(step, plan, batch=batch)")
  if batch is None:
    raise ReportError(
      "compile_report with a plan needs a batch.",
      details=f"{len(args) or 'no'} other arguments were given after the plan",
      fix="nxp.compile_report(step, plan, batch=jax.ShapeDtypeStruct((512, 128), 'int32')); arrays work too.",
    )
  if args and isinstance(step, TrainStep | Generator):
    raise ReportError(
      f"compile_report got {len(args)} more arguments than a {type(step).__name__} takes.",
      fix="nxp.compile_report(step, plan, batch=batch)",
    )
  check_arrays(ReportError, "batch", batch)
  batch = batch_structs(batch)
  here = _place(plan, topology)
  check_batch(here, batch)
  objects = instantiate(here, {root: here.abstract_state(root) for root in ("model", "optimizer")})
  objects = objects if isinstance(objects, tuple) else (objects,)
  # Nothing can run on an absent machine: this mesh is only for the trace.
  with no_mesh(), default_scope(dataclasses.replace(here.activation_rules, mesh=here.mesh.abstract_mesh)):
    lowered = step.lower(*objects, abstract_batch(here, batch), *args)
  paths = enumerate(variables(objects))
  names = {f"arrays[{n}]": f"{'optimizer/' * (path[0] == 1)}{path_str(path[1:])}" for n, path in paths}
  if isinstance(step, Generator):
    names = step.argument_names(*objects)
  sizes = axis_sizes(here.mesh)
  shards = count_shards(here.batch_axes, sizes)
  examples, looked_for = _examples(step, batch), None
  if examples is not None and shards > 1:
    looked_for = Batch(examples, math.prod(sizes.values()) // shards, {leaf.shape for leaf in here.leaves})
  slices = slice_numbers(cast("Mesh", here.mesh), topology)
  report = report_of(lowered, chip, sizes, state_categories(here), names, looked_for, slices)
  quantities = {
    "params": sum(x.bytes for x in here.leaves if x.is_parameter),
    "optimizer": sum(x.bytes for x in here.leaves if x.root == "optimizer"),
    "batch": sum(map(nbytes, jax.tree.leaves(batch))),
  }
  layers = step.layers.done if isinstance(step, TrainStep | EvalStep | Generator) else ()
  on_one = None if examples is None or not isinstance(step, TrainStep) else max(1, examples // shards)
  return dataclasses.replace(
    report, quantities=quantities, examples=on_one, batch_split=shards, layers=layers
  )


def _examples(step: Any, batch: PyTree) -> int | None:
  """The global number of examples of one microbatch; None if the arrays of the batch have several lengths."""
  sizes = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
  if len(sizes) != 1:
    return None
  return sizes.pop() // (step.options.microbatches if isinstance(step, TrainStep) else 1)


def abstract_batch(plan: Plan, batch: PyTree) -> PyTree:
  """A batch of arrays or `ShapeDtypeStruct`s as abstract arrays, with the plan's layout."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(plan.mesh, plan.batch_spec(len(x.shape)))
    ),
    batch,
  )


def _place(plan: Plan, text: str | None) -> Plan:
  """The plan on the devices to compile for: its own devices, or the devices of a named topology."""
  if text is None:
    if isinstance(plan.mesh, AbstractMesh):
      raise ReportError(
        "a plan on an abstract mesh names no devices to compile for.",
        details=f"mesh {axis_sizes(plan.mesh)}",
        fix="nxp.compile_report(..., topology='tpu:v5e:4x4'), or 'cpu:8' for simulated devices.",
      )
    return plan
  mesh = topology_mesh(text, explicit=explicit_axes(plan.mesh), **axis_sizes(plan.mesh))
  leaves = tuple(dataclasses.replace(leaf, mesh=mesh) for leaf in plan.leaves)
  return dataclasses.replace(plan, mesh=mesh, leaves=leaves)


def report_of(
  program: Any,
  chip: Chip | str | None = None,
  axes: Mapping[str, int] | None = None,
  state: Mapping[str, int] | None = None,
  names: Mapping[str, str] | None = None,
  batch: Batch | None = None,
  slices: Labels | None = None,
) -> CompileReport:
  """Reports on a program that JAX has lowered (it is compiled here) or compiled, or on its `nnx.jit` wrapper.

  `state` has the bytes per device of arguments by category; `names` maps JAX's names to names to print;
  `batch` says which activations to look for.
  """
  program, names = getattr(program, "lowered", program), names or {}
  if isinstance(program, jax.stages.Lowered):
    done = run_compiler(program)
  else:
    done = Compiled(program.as_text() or "", "", memory_stats(program), None, "", 0.0)
  mesh = _mesh_of(program)
  axes = axes or (dict(mesh.shape) if mesh is not None else None)
  if axes is None:
    raise ReportError(
      "the program's arguments are on no mesh.",
      fix="lower it with arguments on one: jax.device_put(x, NamedSharding(mesh, PartitionSpec())).",
    )
  device = mesh.abstract_device if mesh is not None else None
  kind = device.device_kind if device else ""
  compiled_for = chip_of(kind)
  figures = chip_named(chip) if chip is not None else _measure(compiled_for, kind)
  final = hlo.parse(done.text or done.partitioned)
  # Backends rewrite matrix products beyond recognition; right after partitioning they are still `dot`.
  split = hlo.parse(done.partitioned) if done.partitioned else final
  before = hlo.parse(done.before) if done.before and batch is not None else None
  arguments, memory = _arguments(final, done.text, names), done.memory
  if done.shortage is not None:
    memory = dataclasses.replace(memory, arguments=sum(a.bytes for a in arguments))
  kept = sum(a.bytes for a in arguments if not a.donated)
  need = _need(memory, done, compiled_for.platform if compiled_for else "", kept)
  count = math.prod(axes.values())
  replicated = None  # unknown
  if before is not None and batch is not None:
    replicated = replicated_activations(before, final, batch, SHARE * need)
  return CompileReport(
    target=f"{count} x {kind}" if kind else f"{count} devices",
    chip=figures,
    axes=dict(axes),
    memory=memory,
    need_bytes=need,
    fits=None if figures is None else done.shortage is None and need <= figures.usable_bytes,
    compiled=done.shortage is None,
    arguments=arguments,
    categories=_categories(memory, need, state or {}),
    cost=dataclasses.replace(cost(split), hbm_bytes=cost(final).hbm_bytes),
    collectives=tuple(
      dataclasses.replace(
        c, parameters=tuple(names.get(p, p) for p in c.parameters), op=names.get(c.op, c.op)
      )
      for c in collectives(final, axes, slices)
    ),
    peak=at_peak(done.live, final, names),
    reshards=find_reshards(done.log, split.frames),
    seconds=done.seconds,
    quantities={},
    replicated_activations=replicated,
    slices=1 if slices is None else len(set(slices.tolist())),
  )


def _measure(figures: Chip | None, kind: str) -> Chip | None:
  """The figures with the memory limit of a device of this kind, if this process has such a device."""
  here = next((device for device in jax.local_devices() if device.device_kind == kind), None)
  limit = (here.memory_stats() or {}).get("bytes_limit") if here is not None else None
  return dataclasses.replace(figures, usable_bytes=limit) if figures is not None and limit else figures


def _need(memory: MemoryStats, done: Compiled, platform: str, kept: int) -> int:
  """Bytes that one device needs; `kept` are the bytes of arguments that are not donated."""
  if done.shortage is not None:
    return done.shortage.bytes + (0 if done.shortage.total else kept)
  # The peak of CPU and GPU is incomplete.
  if platform == "tpu" and memory.peak:
    return memory.peak
  return memory.arguments + memory.temporaries + memory.outputs - memory.aliased


def _categories(memory: MemoryStats, need: int, known: Mapping[str, int]) -> dict[str, int]:
  result = {name: size for name, size in known.items() if size}
  result["inputs" if known else "arguments"] = max(0, memory.arguments - sum(result.values()))
  result["working memory"] = max(0, need - sum(result.values()))
  return result


def _arguments(program: hlo.Program, text: str, names: Mapping[str, str]) -> tuple[Argument, ...]:
  donated = {number for _, number in program.aliases}
  arguments = [
    Argument(names.get(i.op_name, i.op_name or i.name), i.bytes, not text or i.index in donated)
    for i in program.entry.parameters
  ]
  return tuple(sorted(arguments, key=lambda argument: -argument.bytes))


def _mesh_of(program: jax.stages.Lowered | jax.stages.Compiled) -> AbstractMesh | None:
  """The mesh of the arguments; abstract, so it does not matter whether its devices exist."""
  for aval in jax.tree.leaves(program.in_avals):
    mesh = aval.sharding.mesh
    if not mesh.empty:
      return mesh
  return None


def _text(value: object) -> str:
  return "+".join(value) if isinstance(value, tuple) else str(value)
