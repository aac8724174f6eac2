"""Creation by slices: equal to eager construction bit for bit, and one program per distinct initializer."""

import functools
import logging
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel as nxp
from create.models import Stack, arrays_of, assert_same_arrays
from nnx_parallel.core.jaxprs import inner_equations
from nnx_parallel.core.mesh import use_mesh
from nnx_parallel.create import slices
from nnx_parallel.create.constructor import cut_plan

MESH = functools.partial(nxp.make_mesh, fsdp=8)
RULES = [nxp.LogicalRules(embed=None, mlp=None), nxp.fsdp(min_size=0)]
# Shards have 8 columns or more: XLA's CPU backend (jax 0.12) may round loops shorter than a vector otherwise.
SHAPES = {"delta_orthogonal": (3, 3, 8, 16), "orthogonal": (32, 32), "stacked": (4, 16, 32)}
INIT = nnx.initializers


class Kernels(nnx.Module):  # Three kernels of one initializer, in an order that names do not follow
  def __init__(self, make: Callable[..., jax.Array], shape: tuple[int, ...] = (16, 64)):
    rngs = nnx.Rngs(0)
    for name in "zxy":
      setattr(self, name, nnx.Param(make(rngs.params(), shape, jnp.float32)))


INITIALIZERS = {
  "constant": INIT.constant(0.5), "delta_orthogonal": INIT.delta_orthogonal(),
  "glorot_uniform": INIT.glorot_uniform(), "he_normal": INIT.he_normal(), "lecun_normal": INIT.lecun_normal(),
  "normal": INIT.normal(0.02), "ones": INIT.ones_init(), "orthogonal": INIT.orthogonal(),
  "truncated_normal": INIT.truncated_normal(0.02, lower=-3, upper=3), "uniform": INIT.uniform(0.1),
  "variance_scaling": INIT.variance_scaling(0.7, "fan_avg", "normal", out_axis=0),
}  # fmt: skip


def created(init: Callable[[], nnx.Module], **options: object) -> nnx.Module:
  return nxp.create_sharded_model(init, MESH(), RULES, **options)


def programs(plan: nxp.Plan) -> list[tuple[int, list[nxp.LeafPlan]]]:
  """How often each program runs, and the leaves that it makes."""
  sliced = cut_plan(plan, [leaf.sharding for leaf in plan.leaves])
  return [(len(group), [plan.leaves[one.output] for one in group]) for group in sliced.groups]


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers(name):
  init = lambda: Kernels(INITIALIZERS[name], SHAPES.get(name, (16, 64)))
  assert_same_arrays(arrays_of(created(init)), arrays_of(init()))
  assert [runs for runs, _ in programs(nxp.plan(init, MESH(), RULES))] == [3]


class Scaled(nnx.Module):  # Each layer's scale depends on its depth, as in GPT-2
  def __init__(self, rngs: nnx.Rngs):
    inits = [INIT.normal(0.02 / (i + 1) ** 0.5) for i in range(4)]
    self.layers = nnx.List(nnx.Linear(32, 64, kernel_init=init, rngs=rngs) for init in inits)


class Lstm(nnx.Module):  # A recurrent cell: orthogonal recurrent kernels, and streams of its own
  def __init__(self, rngs: nnx.Rngs):
    self.cell = nnx.OptimizedLSTMCell(16, 32, rngs=rngs)
    self.norm = nnx.BatchNorm(32, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)


class Stacked(nnx.Module):  # Layers stacked by nnx.vmap, and by nnx.scan-like splits of the streams
  def __init__(self, depth: int, width: int):
    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Linear:
      return nnx.Linear(width, 64, bias_init=INIT.normal(0.1), rngs=rngs)

    self.layers = make(nnx.Rngs(0))


class Compiled(nnx.Module):  # Blocks from a constructor that the user compiled already
  def __init__(self, rngs: nnx.Rngs):
    make = nnx.jit(lambda rngs: nnx.Linear(16, 64, rngs=rngs))
    self.blocks = nnx.List(make(rngs) for _ in range(3))


TABLE = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)


class Computed(nnx.Module):
  """Constants from numpy, one array in two Variables, values computed from others, several dtypes."""

  def __init__(self, rngs: nnx.Rngs):
    self.pretrained = nnx.Param(jnp.asarray(TABLE))
    self.cast = nnx.Param(jnp.asarray(TABLE).astype(jnp.bfloat16))
    self.once = nnx.Linear(64, 64, rngs=rngs)
    self.again = nnx.Param(self.once.kernel[...])
    self.double = nnx.Param(self.once.kernel[...] * 2.0)
    self.row = nnx.Variable(self.once.kernel[...][0])
    self.counts = nnx.Variable(jnp.arange(128, dtype=jnp.int32))
    self.phases = nnx.Variable(jax.lax.complex(jnp.linspace(0.0, 3.0, 128), jnp.ones(128)))
    self.mask = nnx.Variable(jnp.tril(jnp.ones((16, 16), bool)))


class Pair(nnx.Module):
  """Two arrays of one compiled function."""

  def __init__(self, rngs: nnx.Rngs):
    make = jax.jit(lambda key: (jax.random.normal(key, (16, 64)), jnp.ones((16, 64)) * 2))
    self.drawn, self.twos = map(nnx.Param, make(rngs.params()))


class Rounded(nnx.Module):
  """Products, and a sum of them, each of which rounds."""

  def __init__(self, rngs: nnx.Rngs):
    one, two = (jax.random.normal(rngs.params(), (16, 64)) for _ in range(2))
    self.kernel = nnx.Param(one * 0.1 + two * 0.3 * 0.7)


def old_random_numbers() -> nnx.Module:
  with jax.threefry_partitionable(False):
    rngs = nnx.Rngs(jax.random.split(jax.random.key(0), 4)[2])
    return nnx.Linear(16, 64, rngs=rngs)


CONSTRUCTORS: dict[str, Callable[[], nnx.Module]] = {
  "compiled": lambda: Compiled(nnx.Rngs(0)), "computed": lambda: Computed(nnx.Rngs(0)),
  "old random numbers": old_random_numbers,
  "lora": lambda: nnx.LoRALinear(32, 64, lora_rank=4, rngs=nnx.Rngs(0)),
  "lstm": lambda: Lstm(nnx.Rngs(0, params=1, dropout=2)), "scaled": lambda: Scaled(nnx.Rngs(0)),
  "stack": lambda: Stack(3, 16, nnx.Rngs(5, params=1, dropout=2)), "stacked": lambda: Stacked(4, 16),
  "pair": lambda: Pair(nnx.Rngs(0)), "rounded": lambda: Rounded(nnx.Rngs(0)),
  "old style key": lambda: Kernels(lambda _, *rest: jax.random.normal(jax.random.PRNGKey(7), *rest)),
}  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors(name):
  init = CONSTRUCTORS[name]
  with nnx.use_eager_sharding(False):
    expected = arrays_of(init())
  # jax 0.10 may fuse arithmetic around an initializer, which rounds otherwise without optimizations of LLVM.
  fused = name in ("computed", "rounded") and jax.__version_info__ < (0, 12)
  assert_same_arrays(arrays_of(created(init)), expected, atol=2e-7 if fused else 0.0)


def number(depth: int, optimizer: optax.GradientTransformation | None = None) -> int:
  init = lambda: Stack(depth, 16, nnx.Rngs(0, dropout=1))
  return len(programs(nxp.plan(init, MESH(), RULES, optimizer=optimizer)))


def test_the_number_of_programs_does_not_depend_on_depth():
  assert number(2) == number(9)
  assert number(2, optax.adamw(1e-3)) == number(5, optax.adamw(1e-3))


def test_layers_that_differ_in_a_number_share_a_program(caplog):
  with caplog.at_level(logging.INFO, "nnx_parallel"):
    created(CONSTRUCTORS["scaled"])
  text = "     4 x float32[32,64] P(None, 'fsdp'): layers.0.kernel and 3 more"
  assert caplog.messages == [f"1 programs make 4 arrays; 4 are placed as they are\n{text}"]


def test_variables_that_share_work_share_no_buffers():
  plan = nxp.plan(CONSTRUCTORS["computed"], MESH(), RULES)
  together = {"once.kernel", "again"}
  assert together in [{leaf.name for leaf in leaves} for _, leaves in programs(plan)]
  model = nxp.create_sharded_model(plan)
  first, second = model.once.kernel.get_value(), model.again.get_value()
  first.delete()  # as a donating step would
  np.testing.assert_allclose(second, CONSTRUCTORS["computed"]().again[...], rtol=0, atol=1e-7)


def test_a_large_compiled_constructor_is_opened():
  plan = nxp.plan(lambda: nnx.jit(lambda: Stack(12, 16, nnx.Rngs(0)))(), MESH(), RULES)
  assert len(programs(plan)) == number(12)
  with nnx.use_eager_sharding(False):
    assert_same_arrays(arrays_of(nxp.create_sharded_model(plan)), arrays_of(Stack(12, 16, nnx.Rngs(0))))


def names(operations):
  """Of operations, and of those that they run."""
  return [eqn.primitive.name for op in operations for eqn in (op, *inner_equations(op))]


def test_an_array_is_made_without_what_it_does_not_need():
  """Also of a compiled function of two results."""
  plan = nxp.plan(CONSTRUCTORS["pair"], MESH(), RULES)
  sliced = cut_plan(plan, [leaf.sharding for leaf in plan.leaves])
  draws = {
    plan.leaves[one.output].name: any("random" in name for name in names(one.operations))
    for group in sliced.groups
    for one in group
  }
  assert draws == {"drawn": True, "twos": False}


@pytest.mark.parametrize(("limit", "waits"), [(4095, 3), (4096, 1), (8192, 1), (12288, 0)])
def test_no_more_bytes_than_a_limit_are_under_way(limit, waits, monkeypatch):
  """Of three arrays of 4096 bytes, on the way to all devices at once."""
  plan = nxp.plan(lambda: Kernels(INIT.normal()), MESH(), RULES)
  shardings, waited = [leaf.sharding for leaf in plan.leaves], []
  found = cut_plan(plan, shardings)
  monkeypatch.setattr(slices, "IN_FLIGHT", limit)
  monkeypatch.setattr(slices.jax, "block_until_ready", waited.append)
  with use_mesh(plan.mesh):
    programs = [slices.lower_slice(found, group[0], shardings).compile() for group in found.groups]
  assert len(slices.run_slices(found, programs, shardings)) == 3
  assert len(waited) == waits


def test_an_array_of_one_process_goes_to_the_devices_of_several_by_its_shards(monkeypatch):
  """jax refuses to move a committed array there."""
  made = []
  monkeypatch.setattr(slices.jax, "make_array_from_callback", lambda shape, *_: made.append(shape))
  slices.put(jnp.ones(2), types.SimpleNamespace(is_fully_addressable=False))
  assert made == [(2,)]


def test_many_keys_do_not_tie_variables_together():
  init = lambda: Stacked(80, 8)  # more layers than a tiny array has elements
  plan = nxp.plan(init, MESH(), RULES)
  found = [[leaf.name for leaf in leaves] for _, leaves in programs(plan)]
  assert found == [["layers.bias"], ["layers.kernel"]]
  assert_same_arrays(arrays_of(nxp.create_sharded_model(plan)), arrays_of(init()))


class Talkative(nnx.Module):  # Has a side effect in its constructor
  def __init__(self, rngs: nnx.Rngs):
    self.linear = nnx.Linear(16, 64, rngs=rngs)
    jax.debug.callback(lambda x: None, self.linear.kernel[...].sum())


def test_a_constructor_with_side_effects_runs_whole_and_says_so(caplog):
  init = lambda: Talkative(nnx.Rngs(0))
  with caplog.at_level(logging.WARNING):
    model = created(init)
  assert_same_arrays(arrays_of(model), arrays_of(init()))
  reason = "it has side effects (Debug)"
  assert caplog.messages == [f"creating the model as one program: {reason}"]
  plan = nxp.plan(init, MESH(), RULES)
  assert f"\nnote: created as one program, which takes longer to compile: {reason}" in str(plan)


@pytest.mark.parametrize("explicit", [False, True])
def test_one_call_runs_the_constructor_once(explicit):
  calls = []

  def init():
    calls.append(len(calls))
    return Stack(2, 16, nnx.Rngs(5, params=calls[-1]))

  mesh = nxp.make_mesh(fsdp=8, explicit=explicit)
  model, _ = nxp.create_sharded_model(init, mesh, RULES, optimizer=optax.adamw(1e-3))
  assert len(calls) == 1
  with nnx.use_eager_sharding(False):
    assert_same_arrays(arrays_of(model), arrays_of(Stack(2, 16, nnx.Rngs(5, params=0))))


def test_constants_are_copied():
  table = np.ones((64, 32), np.float32)
  model = created(lambda: nnx.Dict(table=nnx.Param(jnp.asarray(table))))
  table[:] = 7
  assert float(model.table[...].max()) == 1
