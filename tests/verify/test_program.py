"""What a partitioner makes of a program is compared with the program; see `verify/program.py`."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel as nxp
from benchmarks.plain import decoders
from nnx_parallel.core import hlo
from nnx_parallel.core.hlo_devices import group_labels, group_rows, read_tiling
from nnx_parallel.errors import ReportError
from nnx_parallel.report.compile_report import compile_report
from nnx_parallel.verify import evaluate, thin
from nnx_parallel.verify.program import compare

SPLIT = Path(__file__).parent / "split"
BATCH = ("data", "fsdp")


pytestmark = pytest.mark.usefixtures("as_users_have_it")


def mesh_of(**sizes):
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def array(mesh, spec, *shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def report(step, *arguments):
  return compile_report(jax.jit(step).lower(*arguments), verify=True)


def texts(backend):
  return [(SPLIT / f"{backend}13.{part}.hlo").read_text() for part in ("whole", "split")]


def compared(whole, split, names=None):
  return compare(hlo.parse(whole), hlo.parse(split), names)


# Faults are found -----------------------------------------------------------------------------


def scaled(parameters, x):
  scale, kernel = parameters
  h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
  return jnp.mean(((scale * h) @ kernel) ** 2)


def scale_over_tensor(spec):
  mesh = mesh_of(data=2, fsdp=2, tensor=2)
  parameters = {"scale": array(mesh, spec, 64), "kernel": array(mesh, P("fsdp", "tensor"), 64, 128)}
  step = jax.grad(lambda p, x: scaled((p["scale"], p["kernel"]), x))
  return report(step, parameters, array(mesh, P(BATCH), 32, 64))


@pytest.fixture(scope="module")
def wrong():
  with jax.numpy_rank_promotion("allow"):
    return scale_over_tensor(P("tensor"))


def test_examples_that_devices_have_exchanged_are_found(wrong):
  found = wrong
  (fault,) = found.faults
  assert fault.result == "result['scale']"
  assert found.results.right == ("result['kernel']",)
  assert fault.op == "jit(<lambda>)/transpose(jvp())/dot_general"
  assert fault.source.endswith(f"test_program.py:{scaled.__code__.co_firstlineno + 3}")
  assert re.fullmatch(r"dynamic-slice\.\d+", fault.instruction)


def test_a_fault_is_printed_and_in_json_and_on_the_page(wrong):
  found = wrong
  assert "Split over the devices, 2 results compared: 1 WRONG." in str(found)
  assert "WRONG NUMBERS: the devices do not compute what the program says" in str(found)
  (fault,) = json.loads(found.to_json())["results"]["faults"]
  assert fault["result"] == "result['scale']"
  assert "WRONG NUMBERS" in found.to_html()


def test_the_same_with_a_whole_scale_is_right():
  found = scale_over_tensor(P())
  assert (found.faults, found.results.unknown) == ((), {})
  assert "Split over the devices, 2 results compared: all right." in str(found)


def test_without_verify_nothing_is_compared_and_faults_say_so():
  x = array(mesh_of(data=8), P("data"), 8)
  lowered = jax.jit(jnp.sin).lower(x)
  found = compile_report(lowered)
  assert (found.results, json.loads(found.to_json())["results"]) == (None, None)
  assert "compared" not in str(found)
  with pytest.raises(ReportError, match=r"were not compared.\n  Fix: compile_report\(..., verify=True\)"):
    _ = found.faults
  with pytest.raises(ReportError, match="does not hold the program before it was split"):
    compile_report(lowered.compile(), verify=True)


def convolved(kernel, x):
  numbers = ("NWC", "WIO", "NWC")
  y = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=4)
  return jnp.square(y).sum()


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("mended", [False, True])
def test_a_kernel_gradient_that_is_summed_too_often_is_found(mended):
  mesh = mesh_of(data=2, model=4)
  step = jax.grad(convolved)
  step = nxp.verify.with_correct_convolutions(step, mesh) if mended else step
  found = report(step, array(mesh, P(), 3, 1, 4), array(mesh, P("data"), 8, 6, 4))
  if mended:
    assert (found.faults, found.results.unknown) == ((), {})
  else:
    (fault,) = found.faults
    assert fault.factor == pytest.approx(4)
    assert fault.what == "4 times the correct value"


@pytest.mark.parametrize("complete", [False, True])
def test_a_missing_psum_in_a_shard_map_is_found(complete):
  mesh = mesh_of(data=2, model=4)

  def local(kernel, x):
    grads = jax.grad(lambda kernel: jnp.square(x @ kernel).sum())(kernel)
    return jax.lax.psum(grads, "data") if complete else grads

  step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
  found = report(step, array(mesh, P(), 8, 8), array(mesh, P("data"), 16, 8))
  assert found.results.unknown == {}
  if complete:
    assert found.faults == ()
  else:
    (fault,) = found.faults
    assert "a psum is missing" in fault.what
    assert "test_program.py" in fault.source


@pytest.mark.parametrize("complete", [False, True])
def test_a_long_loop_is_followed_by_its_first_and_last_passes(complete):
  mesh = mesh_of(data=2, model=4)

  def local(kernel, x):
    def add(total, row):
      grads = jax.grad(lambda kernel: jnp.square(row @ kernel).sum())(kernel)
      return total + (jax.lax.psum(grads, "data") if complete else grads), (row @ kernel).sum(-1)

    return jax.lax.scan(add, jnp.zeros_like(kernel), x)

  specs = {"in_specs": (P(), P(None, "data")), "out_specs": (P(), P(None, "data"))}
  step = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)
  found = report(step, array(mesh, P(), 2, 2), array(mesh, P(None, "data"), 40_000, 8, 2))
  assert found.results.unknown == {}
  assert [fault.result for fault in found.faults] == ([] if complete else ["result[0]"])


def test_the_program_of_a_gpu_compiler_has_the_fault_and_that_of_a_tpu_compiler_has_not():
  gpu, tpu = compared(*texts("gpu"), {0: "scale"}), compared(*texts("tpu"))
  assert [fault.result for fault in gpu.faults] == ["scale"]
  assert (len(tpu.right), tpu.faults, tpu.unknown) == (2, (), {})


COLLECTIVE = re.compile(r"(?m)^(  (?:ROOT )?%\S+ = \S+) (?:all-reduce|collective-permute)\((%[\w.\-]+)\).*$")


def without(text, number):
  """The text with one collective replaced by a copy of its operand."""
  at = list(COLLECTIVE.finditer(text))[number]
  return f"{text[: at.start()]}{at[1]} copy({at[2]}){text[at.end() :]}"


def test_every_sum_that_is_left_out_is_found():
  whole, split = texts("tpu")
  count = len(COLLECTIVE.findall(split))
  assert count == 3
  for number in range(count):
    assert compared(whole, without(split, number)).faults, number


@pytest.mark.parametrize(
  ("right", "wrong"),
  [
    ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", "replica_groups=[4,2]<=[8]"),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, dimensions", "{{1,0},{3,2},{5,4},{7,6}}, dimensions"),
    ("constant({0, 128, 0, 128, 0, 128, 0, 128})", "constant({0, 128, 0, 128, 0, 128, 128, 0})"),
  ],
  ids=["axis", "order", "offset"],
)  # fmt: skip
def test_wrong_groups_and_offsets_are_found(right, wrong):
  whole, split = texts("tpu")
  assert right in split
  assert compared(whole, split.replace(right, wrong)).faults


# No false alarm -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
  ("config", "batch", "zero", "options", "shortened"),
  [
    ({"vocab": 16, "depth": 2}, (16, 9), 1, {"microbatches": 2, "remat": "full"}, False),
    pytest.param(
      {"vocab": 256, "depth": 12},
      (16, 129),
      0,
      {"remat": "full", "scan_layers": True, "attention": 16, "loss_chunks": 4},
      True,
      marks=pytest.mark.slow,
    ),
  ],
  ids=["microbatches", "scans and blocks"],
)
def test_decoders_are_right(config, batch, zero, options, shortened):
  """Also where only some passes of their loops are run; and what sends is at the lines of the model."""
  config, mesh = decoders.Config(**config), nxp.make_mesh(data=2, fsdp=2, tensor=2)
  plan = nxp.plan(
    lambda: decoders.Decoder(config, nnx.Rngs(0)),
    mesh,
    nxp.presets.fsdp_tensor(min_size=0),
    optimizer=optax.adamw(1e-3),
    zero=zero,
  )
  step = nxp.train_step(decoders.loss, **options)
  found = compile_report(step, plan, batch=jax.ShapeDtypeStruct(batch, jnp.int32), verify=True)
  assert (found.faults, found.results.unknown) == ((), {})
  assert any("opt_state.0.mu" in name for name in found.results.right)
  assert any(name.startswith("result") and "loss" in name for name in found.results.right)
  assert found.results.shortened == shortened
  assert ("Of its longest loops, the first and the last passes were run." in str(found)) == shortened
  forward = [c for c in found.collectives if "transpose(" not in c.op and c.source]
  assert not [c.source for c in forward if "/nnx_parallel/layers/" in c.source]


@pytest.mark.slow
def test_uneven_blocks_and_shifted_sequences_are_right():
  mesh = mesh_of(data=8)

  def step(table, tokens):
    def loss(table):
      logits = table[tokens[:, :-1]] @ table.T
      hit = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
      return -hit.mean()

    return jax.value_and_grad(loss)(table)

  table = array(mesh, P(), 10, 6)
  tokens = jax.ShapeDtypeStruct((8, 9), jnp.int32, sharding=NamedSharding(mesh, P("data")))

  def uneven(table, tokens):
    return step(jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P("data"))), tokens)

  for each in (step, uneven):
    found = report(each, table, tokens)
    assert (len(found.results.right), found.faults, found.results.unknown) == (2, (), {})


def test_microbatches_of_large_layers_are_followed():
  """The batch is read as (examples, microbatches): the inner dim stays whole, the outer one is thinned."""
  mesh = mesh_of(fsdp=8)

  def step(kernel, x):
    def add(total, part):
      return total + jax.grad(lambda kernel: jnp.square(part @ kernel).mean())(kernel), None

    parts = jnp.moveaxis(x.reshape(-1, 4, 2048), 1, 0)
    return jax.lax.scan(add, jnp.zeros_like(kernel), parts)[0]

  found = report(step, array(mesh, P("fsdp"), 2048, 4096), array(mesh, P("fsdp"), 2**22, 2048))
  assert (len(found.results.right), found.faults, found.results.unknown) == (1, (), {})


def test_long_sequences_that_lie_over_devices_are_followed_after_a_shift():
  """The devices pass single tokens on: what they cut and join is whole, and the rest is thinned."""
  mesh = mesh_of(fsdp=4, tensor=2)

  def step(table, tokens):
    split = NamedSharding(mesh, P("fsdp", "tensor"))
    x = table[jax.lax.with_sharding_constraint(tokens[:, :-1], split)]
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x))
    return jnp.square(weights @ x - table[tokens[:, 1:]]).mean()

  tokens = jax.ShapeDtypeStruct((8, 4097), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
  found = report(jax.grad(step), array(mesh, P(None, "fsdp"), 256, 64), tokens)
  assert (len(found.results.right), found.faults, found.results.unknown) == (1, (), {})


class Images(nnx.Module):
  """Convolutions (one grouped), a batch norm, pooling, dropout."""

  def __init__(self, rngs):
    self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.second = nnx.Conv(8, 16, (3, 3), strides=2, feature_group_count=4, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.head = nnx.Linear(16, 10, rngs=rngs)

  def __call__(self, x):
    x = nnx.max_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
    return self.head(self.dropout(nnx.relu(self.second(x)).mean((1, 2))))


@pytest.mark.nightly
@pytest.mark.slow
def test_convolutions_pooling_batch_statistics_and_dropout_are_right():
  plan = nxp.plan(
    lambda: Images(nnx.Rngs(0)),
    nxp.make_mesh(data=2, fsdp=4),
    nxp.fsdp(min_size=0),
    optimizer=optax.adam(1e-3),
  )
  step = nxp.train_step(lambda model, x: jnp.square(model(x)).mean())
  found = compile_report(step, plan, batch=jax.ShapeDtypeStruct((16, 12, 12, 3), jnp.float32), verify=True)
  assert (found.faults, found.results.unknown) == ((), {})
  assert {"norm.mean", "second.kernel"} < set(found.results.right)


def test_what_cannot_be_followed_is_listed_and_not_called_wrong():
  mesh = mesh_of(data=8)

  def step(x, y):
    return jax.pure_callback(lambda x: x, x, x), y + 1

  x = array(mesh, P(), 8)
  found = report(step, x, x)
  assert found.results.right == ("result[1]",)
  (why,) = found.results.unknown.values()
  assert "callback" in why
  assert "1 result compared, 1 not checked (result[0]) because of: " in str(found)


def test_a_kernel_keeps_no_dim_whole():
  """Its results are unknown, and arguments of the sizes of a real model would fill the memory."""
  program = hlo.parse("""HloModule jit_f, num_partitions=1

ENTRY %main (x: f32[8192,8192], y: f32[8192,8192]) -> f32[8192,8192] {
  %x = f32[8192,8192] parameter(0)
  %y = f32[8192,8192] parameter(1)
  ROOT %made = f32[8192,8192] custom-call(%x, %y), custom_call_target="tpu_custom_call"
}
""")
  thinned = thin.Thinning([program])
  shape = thinned.shape(program.entry.parameters[0])
  assert max(shape) < 16
  run = evaluate.Evaluator(program, thinned, 1)
  assert run.run({0: np.ones((1, *shape)), 1: np.ones((1, *shape))}) == (None,)
  assert [*run.lost] == ["tpu_custom_call"]


# The evaluator --------------------------------------------------------------------------------


def evaluated(function, *arguments):
  """What the evaluator makes of a program of one device, and what jax makes of it."""
  lowered = jax.jit(function).lower(*arguments)
  program = hlo.parse(lowered.compiler_ir("hlo").as_hlo_module().to_string())
  given = {n: np.asarray(x)[None] for n, x in enumerate(jax.tree.leaves(arguments))}
  run = evaluate.Evaluator(program, thin.Thinning([program]), 1)
  results = run.run({n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in given.items()})
  assert run.lost == set()
  return [x[0] for x in results], jax.tree.leaves(jax.jit(function)(*arguments))


def images(*shape):
  return jax.random.normal(jax.random.key(sum(shape)), shape)


def convolution(**options):
  dims = ("NHWC", "HWIO", "NHWC")
  return lambda x, k: jax.lax.conv_general_dilated(x, k, dimension_numbers=dims, **options)


def both(function):
  """The value and all gradients."""
  return lambda *xs: jax.value_and_grad(lambda *xs: jnp.sin(function(*xs)).sum(), tuple(range(len(xs))))(*xs)


PROGRAMS = {
  "convolution": (both(convolution(window_strides=(2, 1), padding="SAME")), (2, 7, 6, 4), (3, 2, 4, 6)),
  "dilated": (
    both(convolution(window_strides=(1, 1), padding=((1, 0), (0, 1)), lhs_dilation=(2, 1))),
    (2, 6, 6, 4),
    (3, 2, 4, 6),
  ),
  "grouped": (
    both(convolution(window_strides=(1, 1), padding="SAME", feature_group_count=2)),
    (4, 5, 5, 4),
    (3, 3, 2, 6),
  ),
  "gather": (both(lambda x: x[jnp.array([[2, 0], [3, 3]])][..., 1:3]), (4, 5)),
  "taken": (both(lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=-1)[:, :2], -1)), (4, 5)),
  "sorted": (lambda x: (jnp.sort(x, 0), jnp.argmax(x, 1), *jax.lax.top_k(x, 2)), (4, 5)),
  "cumulative": (lambda x: (jnp.cumsum(x, 1), jax.lax.cummax(x, 0)), (4, 5)),
  "padded": (both(lambda x: jax.lax.pad(x, 0.5, [(1, 2, 1), (-1, 0, 0)])[::2, ::-1]), (4, 5)),
  "pooled": (
    both(lambda x: nnx.avg_pool(x, (2, 2), (2, 2)) + nnx.max_pool(x, (3, 2), (2, 2), padding="SAME")),
    (2, 4, 4, 3),
  ),
  "softmax": (both(lambda x, y: jax.nn.softmax(jnp.einsum("bik,bjk->bij", x, y)) @ y), (2, 3, 4), (2, 5, 4)),
  "random": (lambda x: x * jax.random.uniform(jax.random.key(0), x.shape), (4, 5)),
  "loop": (lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x), (4, 5)),
  "update": (lambda x: x.at[1:3, 2].add(7).at[0].set(1), (4, 5)),
  "gelu": (both(lambda x: jax.nn.gelu(x, approximate=False) + jnp.round(3 * x) % 2), (4, 5)),
}  # fmt: skip


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_evaluator_computes_what_jax_computes(name):
  function, *shapes = PROGRAMS[name]
  found, expected = evaluated(function, *(images(*shape) for shape in shapes))
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


GROUPS = [[0, 2], [1, 3]]


@pytest.mark.parametrize(
  ("operation", "shape", "expected"),
  [
    ("all-reduce(%x), to_apply=%add,", "4,2", lambda parts, _: parts.sum(0)),
    ("all-gather(%x), dimensions={1},", "4,4", lambda parts, _: np.concatenate([*parts], 1)),
    ("reduce-scatter(%x), dimensions={0}, to_apply=%add,", "2,2",
     lambda parts, place: np.split(parts.sum(0), 2)[place]),
    ("all-to-all(%x), dimensions={0},", "4,2",
     lambda parts, place: np.concatenate([np.split(part, 2)[place] for part in parts])),
  ],
  ids=["all-reduce", "all-gather", "reduce-scatter", "all-to-all"],
)  # fmt: skip
def test_the_evaluator_exchanges_within_groups(operation, shape, expected):
  program = hlo.parse(f"""HloModule m, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[4,2]) -> f32[{shape}] {{
  %x = f32[4,2] parameter(0)
  ROOT %made = f32[{shape}] {operation} replica_groups={{{{0,2}},{{1,3}}}}
}}
""")
  x = np.random.default_rng(0).normal(size=(4, 4, 2))
  (found,) = evaluate.Evaluator(program, thin.Thinning([program]), 4).run({0: x})
  for row in GROUPS:
    for place, device in enumerate(row):
      np.testing.assert_allclose(found[device], expected(x[row], place))


@pytest.mark.parametrize(
  "text",
  [
    "{{0,2},{1,3},{4,6},{5,7}}",
    "[4,2]<=[2,2,2]T(0,2,1)",
    "mesh['a'=2,'b'=2,'c'=2] {'b'}",
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}",
    "mesh['a'=8] {'a':(2)2}",
  ],
)
def test_members_of_groups_agree_with_their_labels(text):
  rows, labels = group_rows(text, 8), group_labels(text, 8)
  assert labels.tolist() == [0, 1, 0, 1, 4, 5, 4, 5]
  assert sorted(n for row in rows for n in row) == list(range(8))
  assert all({int(labels[n]) for n in row} == {min(row)} for row in rows)


@pytest.mark.parametrize(
  ("text", "blocks"),
  [
    ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", [0, 0, 0, 0, 1, 1, 1, 1]),
    ("{devices=[4,2]<=[2,4]T(1,0)}", [0, 1, 2, 3, 0, 1, 2, 3]),
    ("{mesh['a'=2,'b'=4], [{'b'}, {}]}", [0, 1, 2, 3, 0, 1, 2, 3]),
    ("{mesh['a'=2,'b'=4], [{'b':(1)2, 'a'}, {}]}", [0, 0, 2, 2, 1, 1, 3, 3]),
    ("{mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)), [{'a'}, {}]}", [0, 1, 0, 1, 0, 1, 0, 1]),
  ],
)
def test_layouts_of_compiled_programs_are_read(text, blocks):
  tiling = read_tiling(text, 8)
  assert tiling is not None
  assert tiling.blocks[:, 0].tolist() == blocks
