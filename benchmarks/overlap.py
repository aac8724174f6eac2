"""How much of a step's communication the TPU compiler overlaps, and which options change that.

The figures come from the schedules of compiled programs. The benchmark needs the TPU compiler (the extra
`tpu-aot`) but no TPU, and nothing is timed. The compiler writes an estimate of the cycles of each computation
into the program; the figures in cycles are sums of these estimates. To compile only some cases again, pass a
part of their names:

    python -m benchmarks.overlap "v5p:4x8x8, fsdp 256"
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from benchmarks.plain import decoders
from benchmarks.plain_8b import RULES
from nnx_parallel.report import compile_report as reports
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.program import hlo
from nnx_parallel.report.program.collectives import KINDS, between
from nnx_parallel.report.topology import missing_compiler, read_machine, topology_mesh

GIB = 2**30
TOKENS = 2048
"""The tokens of each device, in one sequence."""

SPARSE_CORE: Mapping[str, Any] = {
  "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
  "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
  "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
  "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
  "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
}
NO_RINGS: Mapping[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
SCOPED_MEMORY: Mapping[str, Any] = {"xla_tpu_scoped_vmem_limit_kib": 98_304}  # MaxText: DENSE_VMEM_LIMIT
OPTIONS: Mapping[str, Mapping[str, Any]] = {
  "no option": {},
  "SparseCore": SPARSE_CORE,
  "SparseCore without rings": {**SPARSE_CORE, **NO_RINGS},
  "SparseCore and scoped memory": {**SPARSE_CORE, **SCOPED_MEMORY},
  "ring of sums": {"xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd"},
  "rings": {
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
  },
  "no rings": NO_RINGS,
  "fused gathers": {  # MaxText: CF_FOR_ALL_GATHER
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
  },
  "no fused gathers": {"xla_tpu_enable_async_collective_fusion": False},
  "fused sums": {  # MaxText: CF_FOR_ALL_REDUCE
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_reduce": True,
  },
  "data parallel": {  # MaxText: DATA_PARALLEL_OVERLAP
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
  },
  "layouts of sums": {  # MaxText: LAYOUT_FOR_ALL_REDUCE_SCATTER
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
  },
  "backward pipelining": {"xla_tpu_enable_ag_backward_pipelining": True},
  "scoped memory": SCOPED_MEMORY,
  "launch barrier": {"xla_tpu_use_enhanced_launch_barrier": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
  """A program on a machine.

  Attributes:
    program: one of `PROGRAMS`.
    topology: the machine.
    axes: the sizes of the mesh axes, in mesh order.
    options: one of `OPTIONS`.
    size: the size of the weights, one of `SIZES`.
  """

  program: str
  topology: str
  axes: Mapping[str, int]
  options: str = "no option"
  size: str = "70B"

  @property
  def group(self) -> str:
    """The program on its machine, and its options."""
    layout = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
    return f"{self.program} of {self.size}, {self.topology}, {layout}, {self.options}"


SIZES: Mapping[str, Mapping[str, int]] = {
  "8B": {"width": 4096, "hidden": 14_336, "heads": 32, "kv_heads": 8},
  "70B": {"width": 8192, "hidden": 28_672, "heads": 64, "kv_heads": 8},
}


def gradient(case: Case, *, form: str = "constraint") -> Any:
  """The gradient of one kernel: a product that contracts all examples; each device keeps some of its rows."""
  mesh, size, axes = topology_mesh(f"tpu:{case.topology}", **case.axes), SIZES[case.size], tuple(case.axes)
  rows = NamedSharding(mesh, P(axes))

  def given(features: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size, TOKENS, features), jnp.bfloat16, sharding=rows)

  def product(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.einsum("btw,bth->wh", x, dy)

  def constrained(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(product(x, dy), rows).astype(jnp.float32)

  def scattered(x: jax.Array, dy: jax.Array) -> jax.Array:
    found = product(x, dy)
    if form == "psum_scatter":
      return jax.lax.psum_scatter(found, axes, tiled=True).astype(jnp.float32)
    # If each part starts with another axis, the parts together could keep all links of a torus busy.
    parts = len(axes) if form == "parts" else 1
    cuts = [part * size["hidden"] // parts // 128 * 128 for part in range(1, parts)]
    done = [in_turn(part, axes[at:] + axes[:at]) for at, part in enumerate(jnp.split(found, cuts, axis=1))]
    return jnp.concatenate(done, axis=1).astype(jnp.float32)

  def in_turn(part: jax.Array, order: tuple[str, ...]) -> jax.Array:
    """Reduce-scatters the rows over one mesh axis after the other."""
    part = part.reshape(*mesh.devices.shape, -1, part.shape[-1])
    for axis in order:
      part = jax.lax.psum_scatter(part, axis, scatter_dimension=axes.index(axis), tiled=True)
    return part.reshape(-1, part.shape[-1])

  by_hand = jax.shard_map(scattered, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
  step = jax.jit(constrained if form == "constraint" else by_hand, compiler_options=OPTIONS[case.options])
  return nxp.compile_report(step.lower(given(size["width"]), given(size["hidden"])))


def mlp_kernels(case: Case, mesh: Mesh, specs: Mapping[str, P]) -> dict[str, jax.ShapeDtypeStruct]:
  """The stacked kernels of 4 MLPs."""
  size = SIZES[case.size]
  shapes = {"up": (4, size["width"], size["hidden"]), "down": (4, size["hidden"], size["width"])}
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, specs[name]))
    for name, shape in shapes.items()
  }


def layers(case: Case) -> CompileReport:
  """The gradients of 4 scanned MLPs; `tensor` shards the hidden dim, and the positions between layers."""
  mesh, size = topology_mesh(f"tpu:{case.topology}", **case.axes), SIZES[case.size]
  fsdp, tensor = ("fsdp" if "fsdp" in case.axes else None), ("tensor" if "tensor" in case.axes else None)
  kernels = mlp_kernels(case, mesh, {"up": P(None, fsdp, tensor), "down": P(None, tensor, fsdp)})
  between_layers, inside = (NamedSharding(mesh, P(fsdp, *rest)) for rest in ((tensor,), (None, tensor)))
  batch = case.axes.get("fsdp", 1)
  x = jax.ShapeDtypeStruct(
    (batch, TOKENS * case.axes.get("tensor", 1), size["width"]), jnp.bfloat16, sharding=between_layers
  )

  @jax.checkpoint
  def layer(x: jax.Array, kernels: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
    up, down = (kernels[name].astype(jnp.bfloat16) for name in ("up", "down"))
    hidden = jax.lax.with_sharding_constraint(jax.nn.silu(x @ up), inside)
    return jax.lax.with_sharding_constraint(x + hidden @ down, between_layers), None

  def step(kernels: Mapping[str, jax.Array], x: jax.Array) -> Any:
    def loss(kernels: Mapping[str, jax.Array]) -> jax.Array:
      return jnp.mean(jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32) ** 2)

    return jax.tree.map(lambda kernel, slope: kernel - 0.1 * slope, kernels, jax.grad(loss)(kernels))

  placed = {name: kernel.sharding for name, kernel in kernels.items()}
  jitted = jax.jit(step, donate_argnums=0, out_shardings=placed, compiler_options=OPTIONS[case.options])
  return nxp.compile_report(jitted.lower(kernels, x))


def layers_by_hand(case: Case) -> CompileReport:
  """The same 4 MLPs in a `shard_map` that gathers, and reduce-scatters gradients, axis after axis."""
  mesh, size, axes = topology_mesh(f"tpu:{case.topology}", **case.axes), SIZES[case.size], tuple(case.axes)
  specs = {"up": P(None, axes), "down": P(None, None, axes)}
  kernels = mlp_kernels(case, mesh, specs)
  x = jax.ShapeDtypeStruct(
    (mesh.size, TOKENS, size["width"]), jnp.bfloat16, sharding=NamedSharding(mesh, P(axes))
  )

  def gathered(kernel: jax.Array, dim: int) -> jax.Array:
    kernel = kernel.astype(jnp.bfloat16)
    for axis in reversed(axes):
      kernel = jax.lax.all_gather(kernel, axis, axis=dim, tiled=True)
    return kernel

  @jax.checkpoint
  def layer(x: jax.Array, kernels: Mapping[str, jax.Array]) -> tuple[jax.Array, None]:
    hidden = jax.nn.silu(x @ gathered(kernels["up"], 0))
    return x + hidden @ gathered(kernels["down"], 1), None

  def step(kernels: Mapping[str, jax.Array], x: jax.Array) -> Any:
    def loss(kernels: Mapping[str, jax.Array]) -> jax.Array:  # of the examples here
      return jnp.mean(jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32) ** 2) / mesh.size

    return jax.tree.map(lambda kernel, slope: kernel - 0.1 * slope, kernels, jax.grad(loss)(kernels))

  mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(axes)), out_specs=specs)
  jitted = jax.jit(mapped, donate_argnums=0, compiler_options=OPTIONS[case.options])
  return nxp.compile_report(jitted.lower(kernels, x))


def decoder(case: Case) -> CompileReport:
  """The train step of the unedited decoder of `plain_8b`, with 2 layers."""
  config = decoders.Config(vocab=32_768, head_dim=128, depth=2, dtype="bfloat16", **SIZES[case.size])
  mesh = nxp.abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1, **case.axes})
  plan = nxp.plan(lambda: decoders.Decoder(config, nnx.Rngs(0)), mesh, RULES, optimizer=llama.optimizer())
  step = nxp.train_step(
    decoders.loss,
    remat="full",
    scan_layers=True,
    attention="fused",
    compiler_options=OPTIONS[case.options],
  )
  tokens = TOKENS * case.axes.get("tensor", 1)
  batch = jax.ShapeDtypeStruct((case.axes.get("fsdp", 1), tokens + 1), jnp.int32)
  return nxp.compile_report(step, plan, batch=batch, topology=f"tpu:{case.topology}")


PROGRAMS: Mapping[str, Callable[[Case], CompileReport]] = {
  "gradient": gradient,
  "gradient, psum_scatter": lambda case: gradient(case, form="psum_scatter"),
  "gradient, axis after axis": lambda case: gradient(case, form="axis after axis"),
  "gradient, parts axis after axis": lambda case: gradient(case, form="parts"),
  "layers": layers,
  "layers, axis after axis": layers_by_hand,
  "decoder": decoder,
}
V5P, V5E, V6E = "v5p:4x8x8", "v5e:4x4", "v6e:16x16"
CASES = (
  # One gradient: which machines reduce-scatter it, and in which form of the program.
  *(
    Case("gradient", machine, {"fsdp": size})
    for machine, size in (
      ("v5p:2x2x4", 16),
      ("v5p:2x4x4", 32),
      ("v5p:4x4x4", 64),
      (V5P, 256),
      (V5E, 16),
      ("v5e:16x16", 256),
      (V6E, 256),
    )
  ),
  *(Case("gradient, psum_scatter", machine, {"fsdp": 256}) for machine in (V5P, V6E)),
  Case("gradient, axis after axis", V5P, {"x": 4, "y": 8, "z": 8}),
  Case("gradient, axis after axis", V6E, {"x": 16, "y": 16}),
  Case("gradient", V5P, {"x": 4, "y": 8, "z": 8}),
  Case("gradient, axis after axis", V5P, {"x": 4, "y": 8, "z": 8}, "SparseCore"),
  Case("gradient, parts axis after axis", V5P, {"x": 4, "y": 8, "z": 8}, "SparseCore"),
  Case("gradient", V5P, {"fsdp": 256}, "ring of sums"),
  Case("gradient", "v5p:4x4x4", {"fsdp": 64}, "ring of sums"),
  Case("gradient", "v5p:2x4x4", {"fsdp": 32}, "no rings"),
  Case("gradient", V6E, {"fsdp": 256}, "layouts of sums"),
  Case("gradient", V5P, {"fsdp": 256}, "SparseCore"),
  *(
    Case("layers, axis after axis", V5P, {"x": 4, "y": 8, "z": 8}, options)
    for options in ("no option", "SparseCore")
  ),
  # A whole step, and layers: what overlaps.
  *(Case("decoder", V5P, {"fsdp": 256}, options) for options in ("no option", "SparseCore")),
  *(
    Case("layers", machine, axes, options, size)
    for machine, axes, size, chosen in (
      (
        V5P,
        {"fsdp": 256},
        "70B",
        ("no option", "SparseCore", "SparseCore and scoped memory", "rings", "fused gathers"),
      ),
      (
        "v5p:4x4x4",
        {"fsdp": 16, "tensor": 4},
        "70B",
        ("no option", "SparseCore", "SparseCore without rings", "no rings", "rings"),
      ),
      (V5E, {"fsdp": 16}, "8B", ("no option", "no rings", "no fused gathers", "fused sums")),
      (V5E, {"fsdp": 4, "tensor": 4}, "8B", ("no option", "no rings", "rings")),
      (V5E, {"tensor": 16}, "8B", ("no option", "no rings")),
      (V6E, {"fsdp": 256}, "70B", ("no option", "SparseCore", "fused gathers", "layouts of sums")),
      (
        V5P,
        {"fsdp": 256},
        "70B",
        ("data parallel", "backward pipelining", "scoped memory", "launch barrier", "layouts of sums"),
      ),
    )
    for options in chosen
  ),
)
TITLE = "How much of a step's communication the TPU compiler overlaps, and which options change that"
NOTES = [
  "Compiled for TPUs that are not here, by `jax[tpu]`; nothing was timed. The NVIDIA compiler was not"
  " installed on this machine: nothing is said about GPUs.",
  "Gradient: one product of all examples, `[256, 2048, 8192] x [256, 2048, 28672] -> [8192, 28672]` on 256"
  " chips, of which each device keeps its rows; by a sharding constraint (as a train step does it), by one"
  " `psum_scatter`, or by a `psum_scatter` for each of several mesh axes in turn. Layers: gradients of 4"
  " scanned and rematerialized MLPs. Decoder: the train step of the unedited decoder of `plain_8b`, with 2"
  " layers.",
  "Sent: by each device with ring algorithms (`Collective.sent_bytes`), in which an all-reduce sends its"
  " payload twice. Overlapped: the collectives between whose start and end something is computed. Cycles: the"
  " compiler's own estimates of the computations, loops multiplied out; in windows: of those that are"
  " scheduled while some collective is under way. Links: the number of axes of the torus that the collectives"
  " that send the most use at the same time (the colours of their strategy); 0 if the program does not say.",
  "Why a train step is left as it is: a `psum_scatter` for each axis of the torus is compiled as"
  " reduce-scatters and halves the bytes, but each of them uses one axis of the torus, while the all-reduce"
  " uses all axes at the same time. By these strategies, a gradient of S bytes keeps each axis of a 3D torus"
  " busy for 2 S / 3 bytes as an all-reduce, and for S bytes as scatters in turn; on a 2D torus both are S. A"
  " sharding constraint over several axes gives the all-reduce again. Parts that start with different axes"
  " become all-reduces in part.",
  "Why no rings are made of the products in a trace: the compiler makes the same rings itself over up to 32"
  " chips, and over more with the option. They need more cycles than the whole products, and on v5p and v6e"
  " the SparseCores overlap the collectives of the whole products.",
  "SparseCore: the compiler accepts the options; whether a machine runs such a program as scheduled was not"
  " tested. Overlapped says that something is computed, not that it takes as long as the transfer.",
  "Refused: the compiler refuses the options on this machine; its reason is in the row.",
]
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_STRATEGY = re.compile(r"(\w*Strategy\w*)\{colors:(\d)")
_CHANNEL = re.compile(r"channel_id=(\d+)")


def estimates(program: hlo.Program) -> Iterator[tuple[hlo.Executed, int]]:
  """The operations that run, each with the cycles that the compiler estimates for it."""
  for run in program.executed():
    found = _ESTIMATE.search(run.instruction.rest)
    inside = run.caller is not None and run.caller.opcode not in ("while", "conditional", "call")
    if found and not inside and run.instruction.opcode != "while":
      yield run, int(found[1])


def cycles(program: hlo.Program) -> tuple[int, int]:
  """The estimated cycles of all computations, and of the computations that run during a collective."""
  within, parts = set[str](), defaultdict[str, list[str]](list)
  for computation in program.reachable:
    for at in computation.instructions:
      if at.opcode.endswith("-start") and not at.opcode.startswith("copy"):
        within.update(other.name for other in between(computation.instructions, at))
  for run in program.executed():
    if "async_collective_fusion_config" in run.instruction.rest and run.caller is not None:
      parts[_CHANNEL.findall(run.instruction.rest)[0]].append(run.caller.name)
  within.update(name for names in parts.values() for name in names)
  total = hidden = 0
  for run, estimate in estimates(program):
    total += run.times * estimate
    hidden += run.times * estimate * (run.instruction.name in within)
  return total, hidden


def links(program: hlo.Program, names: set[str]) -> int:
  """The most torus axes that one of these collectives uses at the same time; 0 if unknown."""
  found = [_STRATEGY.search(at.rest) for at in program.instructions if at.name in names]
  # A color is a path through the torus that uses both directions of each link, or one direction.
  return max((int(way[2]) // (1 + ("UniDirection" in way[1])) for way in found if way), default=0)


def add(record: Record, case: Case) -> None:
  """Compiles a case and adds its rows."""
  kept: list[Any] = []

  def keeping(lowered: jax.stages.Lowered) -> Any:
    kept.append(compiler(lowered))
    return kept[0]

  compiler = reports.run_compiler
  try:
    with mock.patch.object(reports, "run_compiler", keeping):
      report = PROGRAMS[case.program](case)
  except nxp.errors.ReportError as error:
    reason = " ".join(str(error).split())
    record.value("refused", 1, reason[:240], group=case.group)
    print(f"{case.group}: refused, {reason[:300]}", flush=True)
    return
  program = hlo.parse(kept[0].text)
  all_sent, sent = report.sent(), {kind: report.sent(kind).per_device for kind in KINDS}
  hidden = all_sent.per_device - all_sent.exposed
  total, within = cycles(program)
  most = max(KINDS, key=lambda kind: sent[kind])
  record.value("sent", round(all_sent.per_device / GIB, 3), "GiB", group=case.group)
  record.value("overlapped", round(hidden / GIB, 3), "GiB", group=case.group)
  for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all"):
    if sent[kind] > 0.001 * GIB:
      record.value(kind, round(sent[kind] / GIB, 3), "GiB", group=case.group)
  record.value("cycles", round(total / 1e6, 1), "M", group=case.group)
  record.value("in windows", round(within / 1e6, 1), "M", group=case.group)
  record.value(
    "links", links(program, {c.name for c in report.collectives if c.kind == most}), "", group=case.group
  )
  record.value("need", round(report.need_bytes / GIB, 2), "GiB", group=case.group)
  print(
    f"{case.group}: sent {all_sent.per_device / GIB:.3f}, overlapped {hidden / GIB:.3f},"
    f" cycles {total / 1e6:.1f} M, in windows {within / 1e6:.1f} M, {report.seconds:.0f} s",
    flush=True,
  )


def main(*parts: str) -> None:
  """Compiles all cases, or the cases whose names contain one of `parts`, and writes the record."""
  if missing_compiler(read_machine("tpu:v5e:4x4")) is not None:
    print("the TPU compiler is not installed: no record is written")
    return
  record = Record("overlap", TITLE, "python -m benchmarks overlap", notes=NOTES)
  groups = {case.group: functools.partial(add, record, case) for case in CASES}
  record.make(groups, [group for group in groups if not parts or any(part in group for part in parts)])


if __name__ == "__main__":
  main(*sys.argv[1:])
