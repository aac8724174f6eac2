"""Pictures: the blocks drawn are the ones that the devices hold."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_parallel as nxp
from layout.models import named
from nnx_parallel.layout.show.picture import elements, holders


class Holder(nnx.Module):
  def __init__(self, shape, names):
    self.w = nnx.Param(jnp.zeros(shape), **named(*names))


def plan_of(shape, names, mesh, **kwargs):
  return nxp.plan(lambda: Holder(shape, names), mesh, **kwargs)


CASES = {
  "rows and columns": ((8, 8), ("x", "y")), "one split dim": ((8, 8), (None, "y")),
  "two axes on one dim": ((8, 8), (("y", "x"), None)), "three dims": ((4, 2, 4), ("z", "x", "y")),
  "whole": ((8, 8), (None, None)), "scalar": ((), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_blocks_are_those_of_jax(case):
  shape, names = CASES[case]
  mesh = nxp.make_mesh(x=2, y=2, z=2)
  leaf = plan_of(shape, names, mesh)["w"]
  blocks = holders(leaf)
  held = {
    device: f"[{', '.join(elements(leaf, dim, shard) for dim, shard in enumerate(index))}]"
    for *index, device in ((*at[:-1], int(device)) for at, device in np.ndenumerate(blocks))
  }
  for device, slices in leaf.sharding.devices_indices_map(shape).items():
    whole = [piece == slice(None) for piece in slices]
    told = [":" if w else f"{p.start}:{p.stop}" for w, p in zip(whole, slices, strict=True)]
    assert held[device.id] == f"[{', '.join(told)}]"
  assert len(held) == 8
