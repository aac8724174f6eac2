"""What a loss gathers, read in its trace: which arrays get which constraint, and where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import nnx_parallel as nxp
from nnx_parallel.layers.gather import Gather
from nnx_parallel.layout.constrain import mapped_axes

P, FREE = jax.P, jax.P.UNCONSTRAINED
X, TOKENS = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16), np.arange(24).reshape(8, 3) % 16
W = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)
ROWS = ("data", "fsdp")


def gathered(loss, layout, batch=X, *, axes=ROWS, positions=(), values=None, sizes=(2, 2, 2)):
  """`(what holds it, type, spec)` of each constraint that a loss gets, whose values stay.

  `layout` has the spec of each parameter; a parameter is `W`, unless `values` has another array for it.
  """
  mesh = nxp.make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), explicit=False)
  params = {name: (values or {}).get(name, W) for name in layout}
  where = {(name,): NamedSharding(mesh, spec) for name, spec in layout.items()}
  gather = Gather.of(where, axes, mesh, positions)
  paths = lambda params, batch: [
    *((name,) for name in sorted(params)),
    *(None for _ in jax.tree.leaves(batch)),
  ]
  run = loss if gather is None else gather.on(loss, paths)
  trace = jax.make_jaxpr(run)(params, batch)
  for ours, theirs in zip(*(jax.tree.leaves(jax.jit(f)(params, batch)) for f in (run, loss)), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)
  return [*held(trace.jaxpr, "")]


def held(jaxpr, inside):
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "sharding_constraint":
      yield inside, eqn.outvars[0].aval.str_short(), eqn.params["sharding"].spec
    for value in eqn.params.values():
      for program in value if isinstance(value, tuple) else [value]:
        if hasattr(getattr(program, "jaxpr", program), "eqns"):
          yield from held(getattr(program, "jaxpr", program), eqn.primitive.name)


FT, TF = P("fsdp", "tensor"), P("tensor", "fsdp")
KEPT = P(ROWS, FREE)
PRODUCT = [("", "float32[8,16]", KEPT), ("", "float32[16,8]", P(None, "tensor")), ("", "float32[8,8]", KEPT)]
"""The examples stay where they are, and the parameter loses their axes."""


def times_w(p, x):
  return x @ p["w"]


def inside(name, found):
  return [(name, *rest) for _, *rest in found]


def test_a_product_gathers_its_parameter_after_a_cast_and_keeps_its_examples():
  cast = lambda p, x: x.astype("bfloat16") @ p["w"].astype("bfloat16")
  in_half = [(held, kind.replace("float32", "bfloat16"), spec) for held, kind, spec in PRODUCT]
  assert gathered(cast, {"w": FT}) == in_half
  assert gathered(lambda p, x: x @ p["w"].T.T, {"w": FT}) == PRODUCT
  assert gathered(lambda p, x: x @ jnp.stack([p["v"], p["w"]])[0], {"v": FT, "w": FT}) == PRODUCT
  assert gathered(lambda p, x: x.mean(0) @ p["w"], {"w": FT}) == PRODUCT[1:2]  # no examples
  assert gathered(times_w, {"w": FT}, X[:6]) == PRODUCT[1:2]  # not as many as devices


def test_a_layer_that_is_sliced_from_a_stack_is_gathered_alone():
  def loss(p, batch):
    return batch["x"] @ jax.lax.dynamic_slice_in_dim(p["w"], batch["n"], 1, 0)[0]

  batch, stack = {"x": X, "n": np.int32(1)}, {"w": np.stack([W, 2 * W, W])}
  found = gathered(loss, {"w": P(None, "fsdp", "tensor")}, batch, values=stack)
  assert found == PRODUCT


def test_a_parameter_beside_another_array_is_gathered_before_they_are_joined():
  joined = lambda p, x: x @ jnp.concatenate([p["w"], jnp.ones((16, 1))], 1)
  assert gathered(joined, {"w": FT}) == PRODUCT[1:2]


def test_examples_are_followed_to_where_they_are():
  swapped = lambda p, x: p["w"].T @ jnp.sin(x.T)
  found = [
    ("", "float32[8,16]", P("tensor", None)),
    ("", "float32[16,8]", P(FREE, ROWS)),
    ("", "float32[8,8]", P(FREE, ROWS)),
  ]
  assert gathered(swapped, {"w": FT}) == found
  scalar = lambda p, batch: batch["scale"] * (batch["x"] @ p["w"])
  assert gathered(scalar, {"w": FT}, {"x": X, "scale": np.float32(2)}) == PRODUCT


def test_other_reads_gather_too():
  assert gathered(lambda p, x: x * p["w"].T, {"w": FT}) == [("", "float32[8,16]", P("tensor", None))]
  larger = lambda p, x: x[:, :, None] + jnp.broadcast_to(p["w"][None], (8, 16, 8))
  assert gathered(larger, {"w": FT}) == [("", "float32[1,16,8]", P(None, None, "tensor"))]
  reversed_ = lambda p, x: x @ p["w"][::-1]  # mixes the positions of a dim that is split
  assert gathered(reversed_, {"w": FT}) == PRODUCT[1:2]


def test_nothing_is_gathered_where_nothing_is_split_by_examples():
  assert gathered(times_w, {"w": P(None, "tensor")}) == []
  assert gathered(times_w, {"w": FT}, axes=("data",), sizes=(8, 1, 1)) == []
  assert gathered(times_w, {"w": P("fsdp")}, sizes=(8, 1, 1)) == []
  assert (
    Gather.of({("w",): NamedSharding(nxp.make_mesh(fsdp=8, explicit=True), P("fsdp"))}, ("fsdp",), None)
    is None
  )
  explicit = nxp.make_mesh(data=2, fsdp=4, explicit=True)
  assert Gather.of({("w",): NamedSharding(explicit, P("fsdp"))}, ROWS, explicit) is None


def test_on_one_axis_only_the_examples_are_kept():
  kept = P("fsdp", FREE)
  found = gathered(times_w, {"w": FT}, sizes=(1, 8, 1), axes=("fsdp",))
  assert found == [("", "float32[8,16]", kept), ("", "float32[8,8]", kept)]


def test_the_constraints_are_where_the_read_is():
  """So the backward pass of a checkpoint or a scan gathers again."""
  assert gathered(lambda p, x: jax.checkpoint(lambda w: x @ w)(p["w"]), {"w": FT}) == inside(
    "remat2", PRODUCT
  )
  layers = np.ones((3, 16, 16), np.float32) / 16
  rolled = lambda p, x: jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, p["w"])[0]
  found = gathered(rolled, {"w": P(None, "fsdp", "tensor")}, values={"w": layers})
  assert found == inside(
    "scan", [(*PRODUCT[0][:2], KEPT), ("", "float32[16,16]", P(None, "tensor")), ("", "float32[8,16]", KEPT)]
  )
  chosen = lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda w: 2 * (x @ w), lambda w: x @ w, p["w"])
  assert gathered(chosen, {"w": FT}) == 2 * inside("cond", PRODUCT)


def test_examples_are_followed_through_the_rows_of_a_scan():
  x = np.linspace(-1, 1, 8 * 3 * 16, dtype=np.float32).reshape(8, 3, 16)

  def loss(p, x):
    rows = jax.lax.scan(lambda c, row: (c, jnp.sin(row @ p["w"])), 0.0, x.swapaxes(0, 1))[1]
    return rows @ p["v"].T

  assert gathered(loss, {"v": FT, "w": FT}, x) == [
    *inside("scan", PRODUCT),
    ("", "float32[3,8,8]", P(FREE, ROWS, FREE)),
    ("", "float32[8,16]", P("tensor", None)),
    ("", "float32[3,8,16]", P(FREE, ROWS, FREE)),
  ]


def test_only_arrays_on_a_mesh_are_parameters():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2, explicit=False)
  others = {("key",): None, ("count",): jax.sharding.SingleDeviceSharding(jax.devices()[0])}
  assert Gather.of({("w",): NamedSharding(mesh, FT), **others}, ROWS, mesh).reads.keys() == {("w",)}


def test_a_custom_rule_gets_its_parameter_gathered():
  product = jax.custom_vjp(lambda x, w: x @ w)
  product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
  assert gathered(lambda p, x: product(x, p["w"]), {"w": FT}) == PRODUCT[1:2]


def test_a_loop_that_carries_a_parameter_gets_it_gathered():
  step = lambda carry, _: (jax.checkpoint(lambda w, t: (w, t + w.sum()))(*carry), None)
  found = gathered(lambda p, x: jax.lax.scan(step, (p["w"], x[0, 0]), None, length=2)[0][1], {"w": FT})
  assert found == [("", "float32[16,8]", P(None, "tensor"))]


def test_a_parameter_that_a_branch_chooses_is_refused_unless_both_are_alike():
  loss = lambda p, x: x @ jax.lax.cond(x[0, 0] > 0, lambda v, w: v, lambda v, w: w, p["v"], p["w"])
  assert gathered(loss, {"v": FT, "w": FT}) == PRODUCT
  with pytest.raises(
    nxp.errors.TrainError, match=r"dot_general .* reads a parameter that comes from a branch"
  ):
    gathered(loss, {"v": FT, "w": TF})
  assert gathered(loss, {"v": P("tensor"), "w": P(None, "tensor")}) == []


def test_a_shard_map_reads_its_parameters_itself():
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2, explicit=False)
  run = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P(ROWS), P()), out_specs=P(ROWS))
  assert gathered(lambda p, x: run(x, p["w"]), {"w": FT}) == []


@pytest.mark.parametrize("rows", [TF, P(("tensor", "fsdp")), P(("fsdp", "tensor"))])
def test_a_table_is_looked_up_by_columns(rows):
  found = gathered(lambda p, t: p["w"][t], {"w": rows}, TOKENS)
  assert found == [
    ("", "int32[8,3,1]", P("data", None, None)), ("", "float32[16,8]", TF),
    ("", "float32[8,3,8]", P("data", None, "fsdp")), ("", "float32[8,3,8]", P(ROWS, None, None)),
  ]  # fmt: skip


def test_a_table_that_cannot_be_looked_up_by_columns_is_gathered():
  look_up = lambda p, t: p["w"][t]
  whole = [("", "float32[16,8]", P(None, None))]
  assert gathered(look_up, {"w": P("data")}, TOKENS) == whole  # not the minor axis of the examples
  assert gathered(look_up, {"w": P("fsdp")}, TOKENS[:6]) == whole  # not as many tokens as devices
  assert gathered(look_up, {"w": P("fsdp")}, TOKENS, values={"w": W[:, :7]})[-1][1] == "float32[16,7]"
  constant = lambda p, x: p["w"][jnp.arange(3)] * x[0, 0]
  assert gathered(constant, {"w": P("fsdp")}) == whole


def test_rows_over_another_axis_keep_the_columns_of_the_result():
  look_up = lambda p, t: p["w"][t]
  columns = [("", "float32[8,3,8]", P(FREE, FREE, None))]
  assert gathered(look_up, {"w": P("data")}, TOKENS, axes=("fsdp", "tensor")) == columns
  assert gathered(look_up, {"w": P("tensor")}, TOKENS) == columns
  assert gathered(look_up, {"w": P("tensor")}, TOKENS, axes=("fsdp",)) == []  # right on one axis
  assert gathered(look_up, {"w": P(None, "tensor")}, TOKENS) == []


def test_positions_stay_whole_in_a_product_with_a_parameter_over_their_axis():
  loss, x = lambda p, x: jnp.einsum("bse,eh->bsh", x, p["w"]), np.ones((8, 4, 16), np.float32)
  found = gathered(loss, {"w": P(None, "tensor")}, x, axes=("data",), positions=["tensor"])
  assert found == [("", "float32[8,4,8]", P(FREE, FREE, "tensor"))]
  found = gathered(loss, {"w": FT}, x, positions=["tensor"])
  assert found == [
    ("", "float32[8,4,16]", P(ROWS, FREE, FREE)),
    ("", "float32[16,8]", P(None, "tensor")),
    ("", "float32[8,4,8]", P(ROWS, FREE, "tensor")),
  ]
  assert gathered(loss, {"w": P("data", "tensor")}, x, positions=["tensor"], axes=("fsdp",)) == [
    ("", "float32[8,4,8]", P(FREE, FREE, "tensor"))
  ]


def test_the_axes_of_an_enclosing_vmap_are_left_to_it():
  with mapped_axes(("data",)):
    found = gathered(times_w, {"w": FT})
  assert [spec for *_, spec in found] == [P("fsdp", FREE), P(None, "tensor"), P("fsdp", FREE)]
