"""Random masks: attention by tiles equals the plain softmax, in values and gradients, or is refused."""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx_parallel as nxp
from nnx_parallel.attention import find, kernels
from nnx_parallel.attention.find import queries_over
from nnx_parallel.attention.kernels import cudnn_attention
from nnx_parallel.errors import TrainError

MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 60)]
HEADS, WIDTH = 4, 4
FILLS = (-math.inf, -math.inf, -1e30, -1e9, float(np.finfo(np.float32).min), -1e4)
PARTS = ["causal", "window", "both sides", "chunks", "prefix", "documents", "padding", "scaled", "thirds"]

pytestmark = pytest.mark.usefixtures("as_users_have_it")


@dataclasses.dataclass(frozen=True)
class Case:  # An attention with a mask
  way: str
  shards: int  # of the mesh axis; 1: no mesh
  rows: int
  columns: int
  block: int
  parts: tuple[tuple[str, int], ...]  # of the mask, all of which must hold, each with a number
  form: str  # how the mask is used: by a selection, by an addition, or by `jax.nn.softmax(where=)`
  fill: float
  cap: float | None
  has_bias: bool
  kv_heads: int
  full: bool  # whether positions are arrays of the size of the scores

  @classmethod
  def of(cls, seed):
    draw = np.random.default_rng(seed)
    shards = int(draw.choice([1, 1, 2, 4]))
    way = "blockwise" if shards == 1 else str(draw.choice(["blockwise", "ring", "ulysses"]))
    rows, columns = (int(draw.integers(2, 12)) * int(draw.choice([1, shards])) for _ in range(2))
    chosen = draw.choice(PARTS, size=draw.integers(0, 4), replace=False)
    return cls(
      way=way, shards=shards, rows=rows + 2, columns=rows + 2 if draw.integers(2) else columns + 2,
      block=int(draw.integers(2, 9)), parts=tuple((str(name), int(draw.integers(-3, 8))) for name in chosen),
      form=str(draw.choice(["selected", "selected", "added", "where"])), fill=float(draw.choice(FILLS)),
      cap=2.5 if draw.integers(3) == 0 else None, has_bias=bool(draw.integers(3) == 0),
      kv_heads=int(draw.choice([2, HEADS])), full=bool(draw.integers(2)),
    )  # fmt: skip

  def seen(self, segments, lengths):
    """The mask of queries and keys `[batch or 1, 1, rows or 1, columns]`."""
    shape = (1, 1, self.rows, self.columns)
    along = lambda d: jnp.arange(shape[d]).reshape([-1 if d == e else 1 for e in range(4)])
    i, j = (jax.lax.broadcasted_iota(jnp.int32, shape, d) if self.full else along(d) for d in (2, 3))
    rows, columns = segments[:, None, : self.rows, None], segments[:, None, None, : self.columns]
    rules = {
      "causal": lambda n: i + n >= j, "window": lambda n: i - j < abs(n) + 1,
      "both sides": lambda n: abs(i - j + n) < 6, "chunks": lambda n: i // (abs(n) + 1) == j // (abs(n) + 1),
      "prefix": lambda n: (i >= j) | (j < n), "documents": lambda n: rows == columns,
      "padding": lambda n: j < lengths[:, None, None, None],
      "scaled": lambda n: (i - j) * np.float32(0.1) <= 0.1 * n, "thirds": lambda n: (i - j) % 3 != n % 3,
    }  # fmt: skip
    seen = functools.reduce(jnp.logical_and, [rules[name](n) for name, n in self.parts])
    # Where the hidden are nothing at all, a row that sees nothing is NaN as it is written.
    return seen | (j == 0) if self.form == "where" or self.fill == -math.inf else seen

  def __call__(self, given, others):
    """The attention, weighted and summed."""
    (q, k, v, bias), (segments, lengths, direction) = given, others
    k, v = (jnp.repeat(x, HEADS // self.kv_heads, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5
    scores = scores if self.cap is None else self.cap * jnp.tanh(scores / self.cap)
    scores = scores + bias if self.has_bias else scores
    seen = self.seen(segments, lengths) if self.parts else None
    if seen is not None and self.form == "selected":
      scores = jnp.where(seen, scores, self.fill)
    elif seen is not None and self.form == "added":
      scores = scores + jnp.where(seen, 0.0, self.fill)
    weights = jax.nn.softmax(scores, where=seen if self.form == "where" else None, axis=-1)
    return (jnp.einsum("bhqk,bkhd->bqhd", weights, v) * direction).sum()

  @property
  def is_refused(self):
    """Whether devices cannot share it evenly."""
    return self.way == "ring" and any(length % self.shards for length in (self.rows, self.columns))


def arrays(case, seed):
  draw = np.random.default_rng(seed)
  heads = HEADS, case.kv_heads, case.kv_heads
  one = lambda length, own: draw.normal(size=(2, length, own, WIDTH)).astype(np.float32)
  q, k, v = map(one, (case.rows, case.columns, case.columns), heads)
  bias = draw.normal(size=(HEADS, case.rows, case.columns)).astype(np.float32)
  segments = np.sort(draw.integers(0, 3, (2, max(case.rows, case.columns)))).astype(np.int32)
  lengths = draw.integers(1, case.columns + 1, 2).astype(np.int32)
  direction = draw.normal(size=q.shape).astype(np.float32)
  return (q, k, v, bias), (segments, lengths, direction)


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", [*range(10), *MORE])
def test_a_mask_by_tiles_is_the_mask_of_the_plain_softmax(seed, monkeypatch):
  case = Case.of(seed)
  monkeypatch.setattr(find, "BLOCK", case.block)
  given = arrays(case, seed)
  wanted = jax.jit(jax.value_and_grad(case))(*given)
  with contextlib.ExitStack() as stack:
    if case.shards > 1:
      mesh = nxp.make_mesh(context=case.shards, devices=jax.devices()[: case.shards])
      stack.enter_context(jax.set_mesh(mesh))
      stack.enter_context(queries_over("context"))
    changed = jax.jit(jax.value_and_grad(nxp.with_layers(case, attention=case.way)))
    if case.is_refused:
      with pytest.raises(TrainError, match=f"{case.shards} devices cannot split"):
        changed(*given)
      return
    found = changed(*given)
  assert_equal(found, wanted, case)


def assert_equal(found, wanted, case):
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4, err_msg=str(case))


@pytest.mark.cases(6)
@pytest.mark.parametrize("seed", [*range(10), *MORE])
def test_a_mask_of_a_kernel_is_the_mask_of_the_plain_softmax(seed, monkeypatch):
  monkeypatch.setitem(kernels.KERNELS, "cpu", functools.partial(cudnn_attention, implementation="xla"))
  case = dataclasses.replace(Case.of(seed), shards=1, way="fused")
  given = arrays(case, seed)
  wanted = jax.jit(jax.value_and_grad(case))(*given)
  assert_equal(jax.jit(jax.value_and_grad(nxp.with_layers(case, attention="fused")))(*given), wanted, case)
