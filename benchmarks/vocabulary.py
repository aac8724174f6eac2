"""The vocabulary-parallel cross-entropy against whole logits, as the vocabulary grows.

Values and gradients of a head and its loss on data x fsdp x tensor. Whole logits are what people write: a
product and optax's cross-entropy, whose logits the compiler splits by batch and vocabulary. What is sent is
compared with what must be: see `analytic`.
"""

from __future__ import annotations

import collections
import functools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnx_parallel as nxp
from benchmarks.harness import Record, measure
from nnx_parallel.core.mesh import axis_sizes
from nnx_parallel.report.program.collectives import collectives
from nnx_parallel.report.topology import missing_compiler, read_machine

MIB = 2**20
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
RULES = nxp.LogicalRules(batch=("data", "fsdp"), embed="fsdp", vocab="tensor")
MACHINES = ("cpu:8", "tpu:v5e:2x4", "gpu:h100:1x8")
NOTES = [
  "Mesh data=2 x fsdp=2 x tensor=2, the head (features, vocabulary) over (fsdp, tensor), float32, value and"
  " gradients. Whole logits: `optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)`.",
  "Sent: payload of all collectives of one kind over one set of axes, as compiled, and as it must be. The TPU"
  " gathers the head in bfloat16, in which its products are computed by default.",
  "Times: 8 x 512 tokens, 64 features, 8 simulated devices on the cores below. Temporaries and bytes: 8 x"
  " 4096 tokens, 1024 features.",
]


def whole(hidden: Any, head: Any, labels: Any) -> Any:
  """The mean loss by whole logits."""
  logits = nxp.constrain(hidden @ head, "batch", None, "vocab")
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def in_parts(parts: int) -> Any:
  """The mean loss by the scheme."""

  def loss(hidden: Any, head: Any, labels: Any) -> Any:
    return nxp.parallel.vocabulary_cross_entropy(hidden, head, labels, parts=parts).mean()

  return loss


def arguments(mesh: Mesh, batch: int, seq: int, features: int, vocabulary: int) -> list[Any]:
  """Abstract hidden states, head and labels."""
  tokens, table = PartitionSpec(("data", "fsdp")), PartitionSpec("fsdp", "tensor")
  given = (
    ((batch, seq, features), jnp.float32, tokens),
    ((features, vocabulary), jnp.float32, table),
    ((batch, seq), jnp.int32, tokens),
  )
  return [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in given
  ]


def gradients(loss: Any, mesh: Mesh, given: list[Any]) -> Any:
  """The compiled value and gradients of a loss."""

  def run(*args: Any) -> Any:
    with nxp.use_rules(RULES, mesh if jax.devices()[0] in mesh.devices.flat else mesh.abstract_mesh):
      return jax.value_and_grad(loss, (0, 1))(*args)

  results = NamedSharding(mesh, PartitionSpec()), (given[0].sharding, given[1].sharding)
  return jax.jit(run, out_shardings=results).lower(*given).compile()


def analytic(batch: int, seq: int, features: int, vocabulary: int) -> dict[tuple[str, tuple[str, ...]], int]:
  """Bytes of payload by kind and axes, of float32 arrays.

  Three numbers per token, and the gradient of the hidden states, are reduced over `tensor`. The head is
  gathered over `fsdp`, its gradient scattered over both axes of the batch and gathered over `data`; the loss
  is one number.
  """
  tokens = batch * seq // (SIZES["data"] * SIZES["fsdp"])
  share = features * vocabulary // SIZES["tensor"] * 4
  return {
    ("all-reduce", ("tensor",)): tokens * 3 * 4 + tokens * features * 4,
    ("all-reduce", ("data", "fsdp")): 4,
    ("all-gather", ("fsdp",)): share,
    ("reduce-scatter", ("data", "fsdp")): share,
    ("all-gather", ("data",)): share // SIZES["fsdp"],
  }


def sent(compiled: Any) -> dict[tuple[str, tuple[str, ...]], int]:
  """Bytes of payload by kind and axes, of a compiled program."""
  found: dict[tuple[str, tuple[str, ...]], int] = collections.defaultdict(int)
  for item in collectives(compiled.as_text(), SIZES):
    found[item.kind, item.axes] += item.total_bytes
  return dict(found)


def machine(name: str) -> Mesh | None:
  """The mesh on a machine; None without its compiler."""
  if name == "cpu:8":
    return nxp.make_mesh(SIZES)
  return nxp.report.topology_mesh(name, **SIZES) if missing_compiler(read_machine(name)) is None else None


def real(given: list[Any]) -> list[Any]:
  """Arrays of these shapes."""
  keys = jax.random.split(jax.random.key(0), 3)
  made = [0.1 * jax.random.normal(key, x.shape) for key, x in zip(keys[:2], given, strict=False)]
  made.append(jax.random.randint(keys[2], given[2].shape, 0, given[1].shape[1]))
  return [jax.device_put(x, like.sharding) for x, like in zip(made, given, strict=True)]


def main() -> None:
  """Times on this machine; temporaries and bytes on each whose compiler is installed."""
  record = Record("vocabulary", "Vocabulary-parallel cross-entropy", "python -m benchmarks vocabulary", NOTES)
  losses = {"whole logits": whole, "parts=1": in_parts(1), "parts=8": in_parts(8)}
  mesh = nxp.make_mesh(SIZES)
  assert axis_sizes(mesh) == SIZES
  for vocabulary in (2048, 8192, 32768):
    given = arguments(mesh, 8, 512, 64, vocabulary)
    programs = {name: gradients(loss, mesh, given) for name, loss in losses.items()}
    args = real(given)
    cases = {name: functools.partial(program, *args) for name, program in programs.items()}
    record.compare(measure(cases, rounds=5, warmup=1), baseline="whole logits", group=f"{vocabulary} columns")
  for name in MACHINES:
    mesh = machine(name)
    if mesh is None:
      continue
    for vocabulary in (32768, 131072):
      sizes = 8, 4096, 1024, vocabulary
      programs = {case: gradients(loss, mesh, arguments(mesh, *sizes)) for case, loss in losses.items()}
      for case, program in programs.items():
        temporaries = program.memory_analysis().temp_size_in_bytes / MIB
        record.value(f"temporaries, {case}", temporaries, "MiB", group=f"{name}, {vocabulary} columns")
    found, wanted = sent(programs["parts=8"]), analytic(*sizes)
    for kind, axes in sorted({*found, *wanted}):
      label = f"{kind} over {', '.join(axes)}"
      record.value(f"{label}, compiled", found.get((kind, axes), 0) / 1024, "KiB", group=name)
      record.value(f"{label}, analytic", wanted.get((kind, axes), 0) / 1024, "KiB", group=name)
  record.write()


if __name__ == "__main__":
  main()
