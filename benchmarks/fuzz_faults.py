"""The classes of faults that the search has found, each as a program of a few lines of plain jax."""

from __future__ import annotations

import dataclasses
import textwrap

HEAD = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

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


@dataclasses.dataclass(frozen=True)
class Fault:
  """One class.

  Attributes:
    name: short, for tests.
    title: what is wrong, in one line.
    text: when, whose fault it is, and what mends it.
    code: calls `check(loss, mesh, params, specs, x, spec)`, which prints the relative differences from one
      device of the loss and of each gradient.
  """

  name: str
  title: str
  text: str
  code: str

  def body(self) -> str:
    """The program behind `HEAD`."""
    return textwrap.dedent(self.code)


FAULTS = (
  Fault(
    "norm scale",
    "The scale of a norm over tensor, below a kernel over (fsdp, tensor)",
    "XLA's partitioner. The loss is right; the gradient of the scale is off by half.",
    """
    def loss(p, x):
      y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
      return jnp.sin((p["scale"] * y) @ p["w"]).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    params = {"scale": draw(0, 8), "w": draw(1, 8, 16)}
    check(loss, (2, 2, 2), params, {"scale": P("c"), "w": P("b", "c")}, draw(2, 8, 8), P(("a", "b")))
    """,
  ),
  Fault(
    "grouped convolution",
    "The kernel gradient of a grouped convolution, where a mesh axis does not split the batch",
    "XLA's partitioner (a convolution with `batch_group_count`): the gradient times the size of the axis.",
    """
    def loss(p, x):
      options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": 8}
      return jnp.sin(jax.lax.conv_general_dilated(x, p["k"], (1,), "SAME", **options)).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    check(loss, (2, 4), {"k": draw(0, 3, 1, 8)}, {"k": P()}, draw(1, 8, 8, 8), P("a"))
    """,
  ),
  Fault(
    "split length",
    "The kernel gradient of any convolution whose spatial dim is split",
    "XLA's partitioner. The gradient is multiplied by the size of the mesh axes that split neither the batch"
    " nor the length. The length need not be split by the user: a table of positions over an axis is enough.",
    """
    def loss(p, x):
      dims = ("NWC", "WIO", "NWC")
      y = jax.lax.conv_general_dilated(x, p["k"], (1,), "SAME", dimension_numbers=dims)
      return jnp.sin(y).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    check(loss, (2, 2, 2), {"k": draw(0, 3, 8, 8)}, {"k": P()}, draw(1, 8, 16, 8), P("a", "b"))
    """,
  ),
  Fault(
    "residual",
    "A residual product, both kernels over (fsdp, tensor), the batch over (data, fsdp)",
    "XLA's partitioner, and the plainest of all: two products and a sum, laid out as FSDP x tensor"
    " parallelism lays them out. The loss is right; the gradient of the first kernel is off by 0.7. So it is"
    " at width 512 too, with 8 or 512 examples.",
    """
    def loss(p, x):
      return jnp.sin((x + jnp.tanh(x @ p["w"])) @ p["head"]).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    params, specs = {"w": draw(0, 16, 16), "head": draw(1, 16, 16)}, {"w": P("b", "c"), "head": P("b", "c")}
    check(loss, (2, 2, 2), params, specs, draw(2, 8, 16), P(("a", "b")))
    """,
  ),
  Fault(
    "slices",
    "Two slices of one product, multiplied, with a bias over another axis",
    "XLA's partitioner, after Shardy only. Queries and keys of a fused kernel, and a bias of the queries: the"
    " loss is right, the gradient of the kernel is off by its own size.",
    """
    def loss(p, x):
      z = x @ p["w"]
      q, k = z[..., :16].reshape(8, 4, 8, 2) + p["bias"], z[..., 16:20]
      return jnp.sin(q.reshape(8, 4, 2, 4, 2) * k.reshape(8, 4, 2, 1, 2)).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    params, specs = {"w": draw(0, 16, 24), "bias": draw(1, 8, 2)}, {"w": P("b", "c"), "bias": P(None, "a")}
    check(loss, (2, 2, 2), params, specs, draw(2, 8, 4, 16), P("b", None, "a"))
    """,
  ),
  Fault(
    "one product",
    "A single product: one dim of the kernel over two axes against the mesh's order, one over the batch's",
    "XLA's partitioner. At any size with as many examples as outputs, or more. With the two axes in the"
    " order of the mesh it is right.",
    """
    def loss(p, x):
      return jnp.sin(x @ p["w"]).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    check(loss, (2, 2, 2), {"w": draw(0, 32, 32)}, {"w": P(("c", "a"), "b")}, draw(1, 64, 32), P("b"))
    """,
  ),
  Fault(
    "two branches",
    "A low-rank adapter beside its kernel, the two over different axes: a wrong loss",
    "XLA's partitioner. The value of the forward pass is wrong, and so is every gradient; at width 64 with 64"
    " examples too.",
    """
    def loss(p, x):
      return jnp.sin(x @ p["w"] + x @ p["a"] @ p["b"]).sum()

    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    params = {"w": draw(0, 8, 8), "a": draw(1, 8, 8), "b": draw(2, 8, 8)}
    specs = {"w": P(None, "c"), "a": P(), "b": P("c", "b")}
    check(loss, (2, 2, 2), params, specs, draw(3, 8, 8), P(("a", "b")))
    """,
  ),
)
