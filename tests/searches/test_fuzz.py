"""Programs that the search found wrong, through the step that users get; and the search itself."""

import json
import pathlib
import textwrap

import jax
import numpy as np
import pytest

import nnx_parallel as nxp
from searches import driver, fuzz, programs
from searches.fuzz import Numbers, differences

GIVEN = driver.arguments(fuzz, [])
FOUND = fuzz.found_in(pathlib.Path(__file__).with_name("fuzz_found.jsonl"))

# The classes of faults that the search has found, each a program of a few lines of plain jax.
HEAD = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)

def check(loss, mesh, params, specs, x, spec):
  names = ("a", "b", "c")[: len(mesh)]
  mesh = jax.make_mesh(mesh, names, axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
  where = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
  right, grads = jax.value_and_grad(loss)(params, x)
  step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, where))
  found, split = step(jax.device_put(params, where), jax.device_put(x, NamedSharding(mesh, spec)))
  off = {"loss": abs(found - right) / abs(right)}
  off |= {name: jnp.linalg.norm(split[name] - g) / jnp.linalg.norm(g) for name, g in grads.items()}
  print(", ".join(f"{name} {float(value):.1e}" for name, value in off.items()))
"""
FAULTS = {
  # The scale of a norm over tensor, below a kernel over (fsdp, tensor).
  "norm scale": """
    def loss(p, x):
      y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
      return jnp.sin((p["scale"] * y) @ p["w"]).sum()

    params = {"scale": draw(0, 8), "w": draw(1, 8, 16)}
    check(loss, (2, 2, 2), params, {"scale": P("c"), "w": P("b", "c")}, draw(2, 8, 8), P(("a", "b")))
    """,
  # The kernel gradient of a grouped convolution, where a mesh axis does not split the batch.
  "grouped convolution": """
    def loss(p, x):
      options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": 8}
      return jnp.sin(jax.lax.conv_general_dilated(x, p["k"], (1,), "SAME", **options)).sum()

    check(loss, (2, 4), {"k": draw(0, 3, 1, 8)}, {"k": P()}, draw(1, 8, 8, 8), P("a"))
    """,
  # The kernel gradient of any convolution whose spatial dim is split.
  "split length": """
    def loss(p, x):
      dims = ("NWC", "WIO", "NWC")
      y = jax.lax.conv_general_dilated(x, p["k"], (1,), "SAME", dimension_numbers=dims)
      return jnp.sin(y).sum()

    check(loss, (2, 2, 2), {"k": draw(0, 3, 8, 8)}, {"k": P()}, draw(1, 8, 16, 8), P("a", "b"))
    """,
  # A residual product, both kernels over (fsdp, tensor), the batch over (data, fsdp).
  "residual": """
    def loss(p, x):
      return jnp.sin((x + jnp.tanh(x @ p["w"])) @ p["head"]).sum()

    params, specs = {"w": draw(0, 16, 16), "head": draw(1, 16, 16)}, {"w": P("b", "c"), "head": P("b", "c")}
    check(loss, (2, 2, 2), params, specs, draw(2, 8, 16), P(("a", "b")))
    """,
  # Two slices of one product, multiplied, with a bias over another axis.
  "slices": """
    def loss(p, x):
      z = x @ p["w"]
      q, k = z[..., :16].reshape(8, 4, 8, 2) + p["bias"], z[..., 16:20]
      return jnp.sin(q.reshape(8, 4, 2, 4, 2) * k.reshape(8, 4, 2, 1, 2)).sum()

    params, specs = {"w": draw(0, 16, 24), "bias": draw(1, 8, 2)}, {"w": P("b", "c"), "bias": P(None, "a")}
    check(loss, (2, 2, 2), params, specs, draw(2, 8, 4, 16), P("b", None, "a"))
    """,
  # A single product: one dim of the kernel over two axes against the mesh's order, one over the batch's.
  "one product": """
    def loss(p, x):
      return jnp.sin(x @ p["w"]).sum()

    check(loss, (2, 2, 2), {"w": draw(0, 32, 32)}, {"w": P(("c", "a"), "b")}, draw(1, 64, 32), P("b"))
    """,
  # A low-rank adapter beside its kernel, the two over different axes: a wrong loss.
  "two branches": """
    def loss(p, x):
      return jnp.sin(x @ p["w"] + x @ p["a"] @ p["b"]).sum()

    params = {"w": draw(0, 8, 8), "a": draw(1, 8, 8), "b": draw(2, 8, 8)}
    specs = {"w": P(None, "c"), "a": P(), "b": P("c", "b")}
    check(loss, (2, 2, 2), params, specs, draw(3, 8, 8), P(("a", "b")))
    """,
}


pytestmark = pytest.mark.usefixtures("as_users_have_it")


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", FOUND, ids=lambda case: "-".join(case.ops).replace(" ", "_"))
def test_a_step_trains_right_where_the_compiler_alone_does_not(case: fuzz.Case):
  found = fuzz.check(case, GIVEN)
  assert found == {"verdict": "right"}


@pytest.mark.cases(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_xla_still_computes_what_was_found_wrong(fault: str, capsys: pytest.CaptureFixture[str]):
  exec(HEAD + textwrap.dedent(FAULTS[fault]), {})
  off = [float(part.split()[-1]) for part in capsys.readouterr().out.split(",")]
  assert max(off) > 0.1, f"{fault} is mended in jax {jax.__version__}: the record can say so"


def test_an_error_of_the_toolkit_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
  def refuse(*_: object, **__: object):
    raise nxp.errors.ShardingError("no such layout.")

  monkeypatch.setattr(nxp, "plan", refuse)
  found = fuzz.check(FOUND[0], GIVEN)
  assert found == {"verdict": "refused", "message": "ShardingError: no such layout."}


def test_a_wrong_gradient_is_told_from_rounding():
  grads = {"w": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
  right = Numbers((1.0, 1.0), (grads, grads))
  near = {"w": grads["w"] * (1 + 1e-6), "zero": grads["zero"] + 1e-8}
  assert max(differences(right, Numbers((1.0, 1.0), (near, near))).values()) < fuzz.SUSPICIOUS
  half = {"w": grads["w"] / 2, "zero": grads["zero"]}
  found = differences(right, Numbers((1.0, 1.5), (grads, half)))
  assert {name for name, off in found.items() if off > fuzz.WRONG} == {"second loss", "second grad w"}
  nothing = {"w": grads["w"] * np.nan, "zero": grads["zero"]}
  assert differences(right, Numbers((1.0, 1.0), (nothing, grads)))["grad w"] == float("inf")


def test_seeds_give_the_same_programs_and_valid_layouts():
  given = driver.arguments(fuzz, ["--layouts", "4"])
  for seed in range(12):
    cases = fuzz.cases(seed, given)
    assert cases == fuzz.cases(seed, given)
    assert {case.seed for case in cases} == {seed, seed + programs.SMALL}
    for case in cases:
      assert case.program == json.loads(json.dumps(case.program))
      sizes, weights = case.layout["mesh"], programs.weights_of(case.program)
      for name, spec in case.layout["specs"].items():
        used = [axis for axes in spec for axis in axes]
        assert len(used) == len(set(used)), (seed, name)
        for length, axes in zip(weights[name].shape, spec, strict=True):
          assert length % np.prod([sizes[axis] for axis in axes], dtype=int) == 0, (seed, name)


def test_a_smaller_program_has_a_layout_that_fits():
  case = fuzz.cases(3, GIVEN)[0]
  made = list(fuzz.smaller(case))
  assert len(made) > 5
  assert min(len(one.program["blocks"]) for one in made) < len(case.program["blocks"])
  for one in made:
    assert one.layout["specs"].keys() == programs.weights_of(one.program).keys()
