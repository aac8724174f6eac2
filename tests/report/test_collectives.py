from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.report.program.collectives import collectives, ring_bytes, totals
from nnx_parallel.report.program.cost import cost
from nnx_parallel.report.program.hlo import parse

PROGRAMS = Path(__file__).parent / "programs"
AXES = {"data": 2, "fsdp": 2, "tensor": 2}


def compiled(function, shape, spec, out=None, names=("data", "model"), sizes=(2, 4)):
  mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
  x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
  shardings = {"out_shardings": NamedSharding(mesh, out)} if out is not None else {}
  text = jax.jit(function, **shardings).lower(x).compile().as_text()
  return collectives(text, dict(mesh.shape))


def test_a_sum_over_one_axis():
  (found,) = compiled(lambda x: x.sum(1), (8, 64), P("data", "model"), P("data"))
  told = (found.kind, found.axes, found.complete, found.bytes, found.times)
  assert told == ("all-reduce", ("model",), True, 4 * 4, 1)
  assert found.sent_bytes == 2 * 16 * 3 // 4


def test_a_collective_in_a_loop_counts_once_per_pass():
  steps = lambda x: jax.lax.fori_loop(0, 7, lambda _, y: y / y.sum(), x)
  found = compiled(steps, (64,), P("model"), P("model"))
  assert [(c.kind, c.axes, c.times) for c in found] == [("all-reduce", ("model",), 7)]


def test_manual_collectives_keep_their_kind():
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

  def body(x):
    x = jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.all_to_all(x, "model", 1, 0, tiled=True)

  mapped = jax.shard_map(body, mesh=mesh, in_specs=P("data", "model"), out_specs=P(("data", "model"), None))
  x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, P("data", "model")))
  found = collectives(jax.jit(mapped).lower(x).compile().as_text(), dict(mesh.shape))
  wanted = [(kind, ("model",), 8 * 16 * 4) for kind in ("collective-permute", "all-to-all")]
  assert [(c.kind, c.axes, c.bytes) for c in found] == wanted


@pytest.mark.parametrize("size", [2, 8])
def test_ring_bytes(size):
  payload = 4096
  assert ring_bytes("all-reduce", payload, size) == 2 * ring_bytes("all-gather", payload, size)
  assert ring_bytes("collective-permute", payload, size) == payload


# The stored programs are one train step of 4 scanned layers (256 x 512, batch 8 x 64, float32, remat) on
# data 2 x fsdp 2 x tensor 2, compiled here by the CPU, TPU v5e and H100 compilers of both jax versions.
PASSES, LAYERS, KERNEL = 2, 4, 256 * 512 // 2 * 4
TOKENS, DEVICES = 8 * 64, 8


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.hlo")), ids=lambda p: p.stem)
def test_stored_programs_of_each_backend(path):
  found = collectives(path.read_text(), AXES)
  by = totals(found, lambda c: (c.kind, c.axes))
  tensor = LAYERS * 2 * (TOKENS // 4 * 256 * 4)
  assert by[("all-reduce", ("tensor",))] == tensor
  # Gradients of both kernels, summed over data after they are split over fsdp.
  assert by[("all-reduce", ("data",))] == LAYERS * 2 * KERNEL // 2
  bf16 = 2 if path.stem.startswith("tpu") else 1
  gathered = by[("all-gather", ("fsdp",))] * bf16
  assert gathered in (LAYERS * n * KERNEL for n in (4, 5))
  scattered = by.get(("reduce-scatter", ("fsdp",)), by.get(("all-reduce", ("fsdp",))))
  assert scattered == LAYERS * 2 * KERNEL
  assert {name for c in found if c.kind == "all-gather" for name in c.parameters} == {"p[0]", "p[1]"}
  assert all(c.source.endswith(f"proto.py:{c.source.rpartition(':')[2]}") for c in found)


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.hlo")), ids=lambda p: p.stem)
def test_flops_of_stored_programs_are_the_analytic_count(path):
  product = 2 * TOKENS * 256 * 512
  # Two products forward, the first one again, four backward.
  assert cost(path.read_text()).flops == LAYERS * 7 * product // DEVICES


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_overlap_is_seen(backend):
  paths = sorted(PROGRAMS.glob(f"{backend}*.hlo"))
  assert paths
  for path in paths:
    found = collectives(path.read_text(), AXES)
    assert {c.overlapped for c in found} == {True, False}


def test_what_the_hosts_carry_between_tpu_slices_is_counted():
  # One step of benchmarks/layouts.py on two v5e slices of 4x4: batch over data (the slices) and fsdp.
  text = (PROGRAMS / "slices" / "tpu13.hlo").read_text()
  found = collectives(text, {"data": 2, "fsdp": 16, "tensor": 1})
  kernel = 64 * 128
  across = [c for c in found if c.axes == ("data",)]
  # Shards of both gradients; the loss, which TPU pads to 128 numbers.
  assert sorted(c.bytes for c in across) == [128 * 4, kernel * 4 // 16, kernel * 4 // 16]
  assert all(c.kind == "all-reduce" and c.complete and c.group_size == 2 and c.overlapped for c in across)
  assert {c.source.rpartition(":")[0] for c in across} == {"benchmarks/layouts.py"}
  # Groups in the text are those of one slice; they are the same in the other.
  inside = totals((c for c in found if c.axes == ("fsdp",)), lambda c: (c.kind, c.complete, c.group_size))
  reduced = 2 * kernel * 4 + 128 * 4
  assert inside == {("all-gather", True, 16): 2 * kernel * 2, ("all-reduce", True, 16): reduced}


def test_text_without_a_program_is_an_error():
  with pytest.raises(ValueError, match="no HLO entry computation"):
    parse("HloModule nothing")
