"""What the package assumes of the inside of jax, flax, optax and orbax: one assertion each.

When one fails under a new version, its docstring names the file that has to change.
"""

import inspect
import logging
import signal
import subprocess
import sys
import threading
import weakref

import absl.logging
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from flax import nnx
from flax.linen import get_logical_axis_rules
from flax.nnx import graphlib
from jax.experimental import mesh_utils, multihost_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import nnx_parallel as nxp
from nnx_parallel.checkpoint import array_io
from training import run_steps

OLD = jax.__version_info__ < (0, 12)


def equations(function, *args):
  return {eqn.primitive.name: eqn for eqn in jax.make_jaxpr(function)(*args).eqns}


X = np.ones((4, 4), np.float32)
layer = lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def table_is_new(module):
  before = vars(module)["_pytree__nodes"]
  module.extra = nnx.Param(jnp.ones(1))
  return vars(module)["_pytree__nodes"] is not before


def has_arguments(*functions, name):
  return all(name in inspect.signature(function).parameters for function in functions)


def reads_rules_of_flax():
  with nnx.logical_axis_rules((("embed", "fsdp"),)):
    return get_logical_axis_rules() == (("embed", "fsdp"),)


def names_barriers():  # the public `sync_global_devices` has no timeout, and names nobody
  from jax._src import distributed
  from jax._src.lib import _jax

  wait = _jax.DistributedRuntimeClient.wait_at_barrier
  return distributed.global_state.client is None and "barrier_id: str, timeout_in_ms: int" in wait.__doc__


ASSUMED = {
  "checkpoint/array_io.py: Orbax logs through absl": lambda: (
    absl.logging.get_absl_logger() is logging.getLogger("absl")
  ),
  "checkpoint/checkpointer.py: a background save ends before threads are joined at exit": lambda: callable(
    threading._register_atexit
  ),
  "core/mesh.py: devices are arranged by their links": lambda: has_arguments(
    mesh_utils.create_device_mesh, mesh_utils.create_hybrid_device_mesh, name="allow_split_physical_axes"
  ),
  "core/nodes.py: items of an nnx.List are attributes named by their numbers": lambda: (
    [x for x in vars(nnx.List([nnx.Param(jnp.ones(1))])) if x[:9] != "_pytree__"] == ["_length", "0"]
  ),
  "core/padding.py: the last read of a Variable is not kept alive": lambda: (
    weakref.ref(array := jnp.ones(2))() is array
  ),
  "hosts/compilation_cache.py: jax decides once whether there is a cache": lambda: callable(
    compilation_cache.reset_cache
  ),
  "hosts/agree.py: barriers have names and timeouts": names_barriers,
  "hosts/stop.py: jax tells a job when it is asked to end": lambda: (
    jax.config.jax_enable_preemption_service and callable(multihost_utils.reached_preemption_sync_point)
  ),
  "layers/stacks.py: a checkpoint has a policy": lambda: (
    getattr(jax.config, "jax_remat3", False)
    or "policy" in equations(jax.checkpoint(jnp.sin), X)["remat2"].params
  ),
  "layout/constrain.py: the rules of a context of flax can be read": reads_rules_of_flax,
  "layout/tracing.py: an optimizer keeps its state in opt_state": lambda: (
    {"opt_state", "step"} <= set(vars(nnx.Optimizer(layer(), optax.adam(1e-3), wrt=nnx.Param)))
  ),
  "report/memory.py: the leaves of a pullback are what the backward pass keeps": lambda: (
    [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(lambda x: jnp.sin(x).sum(), x)[1], X))]
    == [(4, 4)]
  ),
  "train/donation.py: a Variable keeps its value in a slot": lambda: (
    (variable := nnx.Param(jnp.ones(3)))._raw_value is variable.get_value()
  ),
  "train/update.py: states that hold more than moments": lambda: (
    hasattr(optax.contrib, "SAMState") and hasattr(optax, "LookaheadState")
  ),
  "train/watch.py: a new attribute replaces the table of a module": lambda: table_is_new(layer()),
}


@pytest.mark.each_case
@pytest.mark.parametrize("what", ASSUMED)
def test_what_has_no_stable_name_is_there(what):
  assert ASSUMED[what]()


def test_the_context_of_an_equation_has_the_known_fields():
  """`create/slices.py` compares these to find equal programs: a new field must join the comparison."""
  (eqn,) = jax.make_jaxpr(jnp.sin)(X).eqns
  known = {"compute_type", "threefry_partitionable", "xla_metadata", "cur_abstract_mesh", "configs"}
  known |= {"remove_size_one_mesh_axis"} | (set() if OLD else {"cur_layout_mode", "no_collectives"})
  assert {name for name in type(eqn.ctx).__slots__ if not name.startswith("_")} == known
  with eqn.ctx.manager:  # also core/jaxprs.py, layout/offload.py
    assert eqn.primitive.bind(X, **eqn.primitive.get_bind_params(eqn.params)) is not None


@pytest.mark.skipif(not OLD, reason="newer versions refuse by themselves")
def test_old_tracers_have_a_sharding_that_can_be_replaced():
  """`layout/tracing.py` (`_quick_errors`): goes with jax 0.10."""
  from jax.interpreters.partial_eval import DynamicJaxprTracer

  assert "sharding" not in vars(DynamicJaxprTracer)


def test_numpy_memory_that_is_not_aligned_is_copied():
  """`checkpoint/array_io.py` (`unshared_zeros`): what is shared cannot be donated."""
  for shape in ((), (3,), (64, 64)):
    block = array_io.unshared_zeros(shape, np.dtype(np.float32))
    made = jax.device_put(block, jax.devices()[1])
    assert block.ctypes.data % 64 == 32
    assert made.unsafe_buffer_pointer() != block.ctypes.data


def test_what_a_compiler_refuses_is_a_runtime_error_of_jax():
  """`report/program/compiler.py` restates it."""
  lowered = jax.jit(jnp.sin).lower(X)
  with pytest.raises(jax.errors.JaxRuntimeError):
    lowered.compile(compiler_options={"xla_no_such_option": 1})


def test_flax_resolves_names_by_the_rules_of_their_variable():
  """`create/instantiate.py`: `sharding_rules` has the axes of names, for several in one dim also by text."""
  rules = ((("a", "b"), ("x", "y")), ("('a', 'b')", ("x", "y")), ("c", None))
  mesh = nxp.make_mesh(x=2, y=4)
  variable = nnx.Param(
    jnp.ones((8, 2)), out_sharding=(("a", "b"), "c"), sharding_rules=rules, mesh=mesh, eager_sharding=True
  )
  assert nnx.get_partition_spec(variable).get_raw_value() == variable.get_value().sharding.spec
  assert variable.get_value().sharding.spec == P(("x", "y"), None)
  assert nnx.get_partition_spec(nnx.Param(jnp.ones(2))).get_raw_value() == P()


def test_flax_does_not_name_the_dim_of_a_stack_unless_it_is_told_to():
  """When this fails (flax PR 5508 makes None its name by default), names are never shorter than their stack.

  Then the note in `layout/checks.py` and the exception for short names in `layout/decide.py` can go.
  """
  metadata = {"out_sharding": ("embed", "mlp")}
  with nnx.use_eager_sharding(False):
    make = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key), kernel_metadata=metadata))
    stack = make(jax.random.split(jax.random.key(0), 3))
  assert stack.kernel.shape == (3, 2, 2)
  assert stack.kernel.out_sharding == ("embed", "mlp")


def test_a_struct_in_a_tuple_is_an_array_of_the_module_only_where_it_is_marked_as_data():
  struct = jax.ShapeDtypeStruct((2,), jnp.float32)
  module = nnx.Dict(plain=nnx.data((struct,)), marked=nnx.data((graphlib.DataElem(struct),)))
  assert dict(nnx.to_flat_state(nnx.state(module))) == {("marked", 0): struct}


def test_auto_axes_refuse_the_shardings_of_explicit_ones():
  """`train/axes.py` knows a model that states shardings by these errors, which name the type of axis."""
  mesh = nxp.make_mesh(x=8)
  where = NamedSharding(nxp.make_mesh(x=8, explicit=True), P("x"))
  a = np.ones((8, 8), np.float32)
  stated = (
    lambda a: jax.reshard(a, P("x")),
    lambda a: jax.reshard(a, where) + 1,
    lambda a: jnp.dot(a, a, out_sharding=P("x")),
    lambda a: jnp.asarray(a).at[jnp.arange(8)].get(out_sharding=P("x")),
    lambda a: jax.lax.with_sharding_constraint(a, where),
  )
  for function in stated:
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="Auto"):
      jax.eval_shape(function, a)


def test_types_of_partial_sums_do_not_replace_the_analysis_of_a_loss():
  """`train/linearity.py`: why the step reads a trace to find partial sums, and does not ask for a type.

  A type `unreduced` exists on Explicit axes alone, where modules that state no sharding do not run; and a
  partial sum keeps its type in no product, not even with a constant, as in a mean or a mask.
  """
  auto, mesh = (
    jax.make_mesh((8,), ("data",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)
  )
  with pytest.raises(ValueError, match="Unreduced axes can only refer to mesh axes that is of type"):
    NamedSharding(auto, P(unreduced={"data"}))
  partial = NamedSharding(mesh, P(unreduced={"data"}))
  x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, P("data")))
  gradient = lambda x: jax.lax.dot_general(x, x, (((0,), (0,)), ((), ())), out_sharding=partial)
  summed = jax.jit(gradient)(x)
  assert jax.typeof(jax.jit(lambda x: x + x)(summed)).sharding.spec.unreduced == {"data"}
  with pytest.raises(Exception, match="should be reduced along the same axes"):
    jax.jit(lambda x: 0.5 * x)(summed)


def test_orbax_shows_the_end_of_a_save_before_its_clean_up(tmp_path):
  """`checkpoint/array_io.py` (`_result`) reads it: the clean-up after a failure waits for other processes."""
  response = ocp.save_checkpointables_async(tmp_path / "run", {"model": {"w": jnp.ones(4)}})
  assert response._thread_runner._future.exception(60) is None
  response.result()


def test_optax_skips_only_updates_of_the_dtype_of_their_gradients():
  """`skip_nonfinite` in `optimizers/wrappers.py` could be `optax.apply_if_finite` if it took others."""
  params = {"w": jnp.ones(4, jnp.bfloat16)}
  tx = optax.apply_if_finite(optax.adam(1e-3, mu_dtype=jnp.float32), 5)
  with pytest.raises(TypeError, match="cond branches must have equal output types"):
    tx.update(params, tx.init(params), params)


def test_a_grouped_product_is_mapped_only_over_all_operands():
  """`schemes/expert_functions.py`: `ragged_dot` maps it over any of them, one element after the other."""
  rows, weights, sizes = jnp.ones((2, 3, 4)), jnp.ones((2, 2, 4, 5)), jnp.array([[1, 2], [3, 0]])
  assert jax.vmap(jax.lax.ragged_dot)(rows, weights, sizes).shape == (2, 3, 5)
  with pytest.raises(NotImplementedError, match="ragged_dot vmap over any dim but 0 - NYI"):
    jax.vmap(jax.lax.ragged_dot, (0, None, None))(rows, weights[0], sizes[0])


def test_vmap_under_jit_does_not_stack_a_plain_array_of_a_layer():
  # searches/seams.py leaves such models out; a flax that stacks it makes them right
  class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
      self.linear, self.scale = nnx.Linear(4, 4, rngs=rngs), jnp.ones(8)

  layers = lambda: nnx.vmap(lambda rngs: Layer(rngs))(nnx.Rngs(0).split(3))
  assert layers().scale.shape == (3, 8)
  assert nnx.jit(layers)().scale.shape == (8,)


ONE_GATHERS = """
import jax, jax.numpy as jnp
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
def at(*spec):
  return jax.NamedSharding(mesh, jax.P(*spec))
def both(x, kernel):
  y = jnp.einsum("bls,ws->blw", x, kernel)
  y = jax.lax.with_sharding_constraint(y, at(("data", "fsdp"), None, "tensor"))
  return jax.lax.with_sharding_constraint(kernel, at("tensor")).sum() + y.sum()
x = jax.device_put(jnp.ones((16, 4, 8)), at(("data", "fsdp"), None, "tensor"))
print(jax.jit(both)(x, jax.device_put(jnp.ones((16, 8)), at(("tensor", "fsdp")))))
"""


@pytest.mark.slow
def test_a_parameter_that_only_one_of_two_products_gathers_ends_the_process():
  """Why `layers/gather.py` gathers a parameter at each read, not only in products with the batch."""
  found = subprocess.run([sys.executable, "-c", ONE_GATHERS], capture_output=True, text=True, check=False)
  assert found.returncode == (0 if OLD else -signal.SIGABRT), found.stderr
  assert OLD or "HloShardingV3" in found.stderr


def test_an_empty_list_of_local_devices_keeps_jax_from_taking_one_gpu(monkeypatch):
  """`hosts/bringup.py` passes it where a Slurm task has its host for itself."""
  from jax._src import clusters

  step = {"JOB_ID": "1", "STEP_NODELIST": "node0", "NTASKS": "4", "PROCID": "3", "LOCALID": "3"}
  for name, value in step.items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
  assert detect("node0:1", 4, 3, None, None, 1)[3] == [3]
  assert detect("node0:1", 4, 3, [], None, 1)[3] == []


class _Layer(nnx.Module):
  def __init__(self, rngs):
    self.query, self.value = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

  @nnx.remat
  def __call__(self, x):
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", self.query(x), x))
    return x + nnx.relu(jnp.einsum("bqk,bkd->bqd", weights, self.value(x)))


class _Layers(nnx.Sequential):
  def __init__(self):
    rngs = nnx.Rngs(0)
    super().__init__(*(_Layer(rngs) for _ in range(4)))


def what_a_step_does():
  """Losses and lines of steps, and a memory plan."""
  loss = lambda model, x: (model(x) ** 2).mean()
  plan = nxp.plan(_Layers, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.sgd(0.1))
  batch, found = np.linspace(-1, 1, 16 * 6 * 8, dtype=np.float32).reshape(16, 6, 8), []
  for options in ({"microbatches": 2}, {"remat": "dots", "scan_layers": True, "attention": 3}):
    run = run_steps(plan, loss, [batch] * 2, **options)
    found.append(([round(x, 5) for x in run.losses], str(run.step.layers), run.step.reduction))
  return found, str(nxp.memory_plan(plan, loss, jax.ShapeDtypeStruct((16, 6, 8), jnp.float32)))


UPGRADES = [
  ("jax_remat3",), ("jax_custom_vjp3",), ("jax_custom_jvp3",), ("jax_custom_jvp3", "jax_softmax_custom_jvp"),
  ("jax_remat3", "jax_remat_barrier_no_cotangents"),
]  # fmt: skip


@pytest.fixture
def upgraded():
  """Turns flags on for one test."""
  before = {}

  def turn_on(flags):
    if OLD and "jax_custom_vjp3" in flags:
      pytest.skip("fails under jax.checkpoint in plain JAX 0.10 (safe_zip)")
    if any(flag not in jax.config.values for flag in flags):
      pytest.skip("this jax has no such flag")
    before.update({flag: jax.config.values[flag] for flag in flags})
    for flag in flags:
      jax.config.update(flag, True)
    jax.clear_caches()

  yield turn_on
  for flag, value in before.items():
    jax.config.update(flag, value)
  jax.clear_caches()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("flags", UPGRADES, ids=" ".join)
def test_operations_that_jax_is_to_keep_in_objects_are_read(flags, upgraded):
  """`core/jaxprs.py:params_of` reads them: each of these flags is to become the default."""
  plain = what_a_step_does()
  upgraded(flags)
  assert what_a_step_does() == plain


def test_the_next_scan_has_no_gradient_yet(upgraded):
  """When it has one, add `jax_scan3` to `UPGRADES`, and read it in `core/jaxprs.py`."""
  upgraded(("jax_scan3",))
  with pytest.raises(NotImplementedError, match="vjp_fwd"):
    jax.grad(lambda x: jax.lax.scan(lambda c, y: (c * y, c), 1.0, x)[0])(jnp.ones(3))


class _Counting(_Layers):  # Also counts its calls
  def __init__(self):
    super().__init__()
    self.calls = nnx.BatchStat(jnp.zeros(()))

  def __call__(self, x):
    self.calls[...] += 1
    return super().__call__(x)


MODES = {
  "trees without updates": {"nnx_graph_mode": False, "nnx_graph_updates": False},
  "trees": {"nnx_graph_mode": False},
  "hijax Variables": {"flax_hijax_variable": True},
}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
def test_the_next_defaults_of_flax(flags, tmp_path):
  """Plan, create, train, remat, restore and a step of one's own by `nnx.compat` compute what they do now."""

  def trained(folder):
    plan = nxp.plan(_Counting, nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0), optimizer=optax.adam(0.1))
    batch = nxp.shard_batch(np.linspace(-1, 1, 16 * 6 * 8, dtype=np.float32).reshape(16, 6, 8), plan)
    found = []
    loss = lambda model, x: (model(x) ** 2).mean()
    step = nxp.train_step(loss, remat="dots", scan_layers=True)
    model, optimizer = nxp.create_sharded_model(plan)
    found += [float(step(model, optimizer, batch)["loss"]) for _ in range(2)]
    found += [float(model.calls[...]), str(step.layers)]
    keeper = nxp.Checkpointer(folder)
    keeper.save(1, model, optimizer)
    model, optimizer = keeper.restore(plan)
    found.append(float(step(model, optimizer, batch)["loss"]))

    @nnx.compat.jit
    def own(model, optimizer, x):
      value, grads = nnx.compat.value_and_grad(loss)(model, x)
      optimizer.update(model, grads)
      return value

    return [*found, float(own(model, optimizer, batch)), float(step(model, optimizer, batch)["loss"])]

  now = trained(tmp_path / "now")
  before = {name: getattr(flax.config, name) for name in flags}
  try:
    for name, value in flags.items():
      flax.config.update(name, value)
    assert trained(tmp_path / "next") == now
  finally:
    for name, value in before.items():
      flax.config.update(name, value)


@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_flax_cannot_make_other_variables_in_a_trace(kind):
  """`layout/tracing.py:plain_variables`: when this passes, let plans keep these kinds."""
  with nnx.var_defaults(**{kind: True}):
    with pytest.raises((AttributeError, ValueError, flax.errors.ImmutableVariableError)):
      nnx.jit(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)))()
    plan = nxp.plan(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
  assert plan.notes == (
    f"Variables are made without {kind}, the default here, because flax cannot trace it in init",
  )
  assert isinstance(nxp.create_sharded_model(plan).kernel, nnx.Param)


def test_tensorstore_tells_a_missing_chunk(tmp_path):
  """`checkpoint/array_io.py`: a chunk that is not there is damage, not zeros."""
  with nxp.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, {"w": jnp.ones((8, 8))})
  files = {"driver": "ocdbt", "base": f"file://{tmp_path}/1/model/"}
  del ts.KvStore.open(files).result()["w/c/0/0"]
  spec = {"driver": "zarr3", "kvstore": {**files, "path": "w/"}, "fill_missing_data_reads": False}
  opened = ts.open(spec, open=True, read=True).result()
  with pytest.raises(ValueError, match="missing"):
    opened.read().result()


def test_jax_reports_each_compilation_as_an_event():
  """`loop/fit.py`: the time of a step says whether it holds a compilation."""
  seen: list[str] = []
  note = lambda event, seconds, **_: seen.append(event)
  program = jax.jit(lambda x: x * 3 + 1)
  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    program(np.float32(1))
    first = seen.count("/jax/core/compile/backend_compile_duration")
    program(np.float32(2))
  finally:
    jax.monitoring.unregister_event_duration_listener(note)
  assert first == seen.count("/jax/core/compile/backend_compile_duration") == 1


def test_only_the_list_and_the_variable_hold_an_array():
  """`train/donation.py` (`_ALONE`): an array with one more reference is somebody's, and is not donated."""
  variables = [nnx.Param(jnp.ones(3))]
  (mine,) = [sys.getrefcount(array) for v in variables for array in [v.get_raw_value()]]
  held = variables[0].get_value()
  (shared,) = [sys.getrefcount(array) for v in variables for array in [v.get_raw_value()]]
  assert shared == mine + 1
  assert held is not None


def test_errors_of_explicit_axes_have_a_known_name():
  """`train/loss_call.py` restates them; the class is not public."""
  mesh = nxp.make_mesh(x=8, explicit=True)
  split = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x", None)))
  with pytest.raises(Exception, match="shard") as info:
    jax.jit(lambda a: a @ a.T + a @ a)(split)
  assert type(info.value).__name__ == "ShardingTypeError"


def test_a_splash_kernel_of_a_traced_mask_holds_a_flag_that_can_be_replaced():
  """In a trace the flag is an array, which the kernel reads as a bool."""
  from jax.experimental.pallas.ops.tpu import splash_attention

  def run(mask, x):
    kernel = splash_attention.make_splash_mqa_single_device(mask[None], interpret=True)
    assert isinstance(kernel.fwd_mask_info.is_dynamic_mask, jax.core.Tracer)
    kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
    return kernel(x[None], x, x)[0]

  x = jnp.ones((128, 128))
  np.testing.assert_allclose(jax.jit(run)(jnp.tri(128, dtype=bool), x), x)


def test_no_cluster_is_a_value_error_and_late_bring_up_a_runtime_error(monkeypatch):
  """`hosts/bringup.py` reads these texts: it has no other public way to tell them apart."""
  with pytest.raises(RuntimeError, match="must be called before"):
    jax.distributed.initialize()
  from jax._src import distributed

  for name in ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS"):
    monkeypatch.delenv(name, raising=False)
  with pytest.raises(ValueError, match="coordinator_address should be defined"):
    distributed.global_state.initialize()
