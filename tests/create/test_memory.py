"""No whole parameter anywhere: temporaries from the compiler, resident memory from the kernel."""

import jax
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.create import slices

KERNEL = 1024 * 1024 * 4


def layers(depth: int) -> nnx.List:
  rngs = nnx.Rngs(0)
  return nnx.List(nnx.Linear(1024, 1024, use_bias=False, rngs=rngs) for _ in range(depth))


@pytest.mark.parametrize("explicit", [False, True])
def test_temporaries_are_those_of_one_shard(explicit, monkeypatch):
  programs = []

  def record(*arguments: object) -> jax.stages.Lowered:
    programs.append(lower(*arguments))
    return programs[-1]

  lower = slices.lower_slice
  monkeypatch.setattr(slices, "lower_slice", record)
  mesh, rules = nxp.make_mesh(fsdp=4, tensor=2, explicit=explicit), nxp.fsdp(("fsdp", "tensor"), min_size=0)
  nxp.create_sharded_model(lambda: layers(3), mesh, rules, optimizer=optax.adam(1e-3))
  memory = [program.compile().memory_analysis() for program in programs]
  assert sorted(m.output_size_in_bytes for m in memory) == [KERNEL // 8] * 2
  # Bits, uniform numbers and their error function are alive together: three shards, not one whole kernel.
  assert max(m.temp_size_in_bytes for m in memory) < 3.2 * KERNEL / 8
