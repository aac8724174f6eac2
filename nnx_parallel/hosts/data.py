"""Places host batches as global arrays in the plan's batch layout."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from nnx_parallel.core.checked import check_arguments, shorten_traceback
from nnx_parallel.core.mesh import axis_sizes, no_mesh
from nnx_parallel.core.text import with_article
from nnx_parallel.core.types import AnyArray, Leaf, PyTree
from nnx_parallel.errors import ShardingError, TrainError
from nnx_parallel.hosts.samples import Last, Sampler, Samples
from nnx_parallel.layout.batch import check_fits, check_split
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.layout.resolve import count_shards_by_dim


@shorten_traceback
@no_mesh()  # another order of its devices would be refused (jax 0.10)
def shard_batch(batch: PyTree, plan: Plan, *, global_batch: bool = False) -> PyTree:
  """Places one batch on the devices. The `batch` rule shards dim 0 of each array.

  In a job of several processes, each process passes its own share of the batch: the examples for its own
  devices. The global batch consists of all shares, in the order of the mesh. If a mesh axis that does not
  shard the batch runs across several processes, their devices hold the same examples, and these processes
  must pass the same share. The call sends and compares nothing, so you must ensure that all shares have the
  same shapes.

  Args:
    batch: a pytree of host or device arrays with the examples on dim 0; scalars are replicated. A global
      `jax.Array` is only moved to the layout of the plan.
    plan: the plan that gives the mesh and the `batch` rule.
    global_batch: whether each process passes the same complete global batch, of which it then places its own
      share.

  Returns:
    The same pytree of global `jax.Array`s.

  Raises:
    ShardingError: there are no examples, the mesh axes do not divide the batch (the message shows the next
      size that works), a leaf is not an array of numbers or has integers that do not fit in 32 bits, or
      the call is inside a compiled program.

  Example:
    >>> import numpy as np, nnx_parallel as nxp
    >>> from flax import nnx
    >>> plan = nxp.plan(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
    >>> nxp.shard_batch({"x": np.zeros((16, 4))}, plan)["x"].sharding.spec
    P('data', None)
  """
  check_plan(plan, "nxp.shard_batch(batch, plan)")
  _check_devices(plan)
  if not isinstance(global_batch, bool | np.bool_):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise ShardingError(f"global_batch={global_batch!r:.60} is no flag.", fix="global_batch=True")

  def place(path: Any, leaf: Leaf) -> jax.Array:
    name = f"batch{jax.tree_util.keystr(path)}"
    check_concrete(name, leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      return jax.device_put(leaf, NamedSharding(plan.mesh, plan.batch_spec(leaf.ndim)))
    array = leaf if isinstance(leaf, jax.Array) else _host_array(name, leaf)
    return _place(name, array, plan, global_batch=global_batch)

  return jax.tree_util.tree_map_with_path(place, batch)


def check_concrete(name: str, value: Leaf) -> None:
  """Raises for a traced value, which has no place on devices."""
  if isinstance(value, Tracer):
    raise ShardingError(
      f"{name} is a value inside a compiled program, and cannot be placed there.",
      fix="place it before the call of the program; inside of it, nxp.constrain(x, 'batch', ...) shards it.",
    )


def _check_devices(plan: Plan) -> None:
  if isinstance(plan.mesh, AbstractMesh):
    raise ShardingError(
      "a batch cannot be placed on an abstract mesh.", fix="plan on real devices with nxp.make_mesh(...)."
    )


def _host_array(name: str, leaf: Leaf) -> np.ndarray:
  """A leaf as an array of numbers in this machine's byte order; HDF5 and FITS files may have another."""
  array = np.asarray(leaf)
  if array.dtype != np.bool_ and not jnp.issubdtype(array.dtype, jnp.number):
    raise ShardingError(
      f"{name} is not an array of numbers.",
      details=f"a {type(leaf).__name__} of dtype {array.dtype}: {leaf!r:.60}",
      fix="leave it out of the batch, or encode it as numbers.",
    )
  array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
  check_fits(name, array)
  return array


def _place(name: str, array: AnyArray, plan: Plan, *, global_batch: bool) -> jax.Array:
  shape = tuple(array.shape)
  sizes = axis_sizes(plan.mesh)
  spec = plan.batch_spec(len(shape))
  sharding = NamedSharding(plan.mesh, spec)
  counts = count_shards_by_dim(spec, len(shape), sizes)
  mine = counts if global_batch else _own_counts(sharding, counts)
  check_split(name, shape, spec, sizes, mine, counts)
  if jax.process_count() == 1:
    return jax.device_put(array, sharding)
  host = np.asarray(array)
  if global_batch:
    return jax.make_array_from_callback(shape, sharding, lambda index: host[index])
  rows = zip(shape, mine, counts, strict=True)
  return jax.make_array_from_process_local_data(
    sharding, host, tuple(length // own * count for length, own, count in rows)
  )


def _own_counts(sharding: NamedSharding, counts: tuple[int, ...]) -> tuple[int, ...]:
  """The number of shards along each dim that are on this process."""
  if sharding.is_fully_addressable:
    return counts
  found = sharding.addressable_devices_indices_map(counts).values()
  starts = [{index[dim].indices(counts[dim]) for index in found if index} for dim in range(len(counts))]
  return tuple(len(own) if count > 1 else 1 for own, count in zip(starts, counts, strict=True))


def _own_rows(length: int, ranks: set[int], plan: Plan) -> np.ndarray:
  """The rows of a global batch that devices of this process hold, of arrays of these ranks."""
  sizes, own = axis_sizes(plan.mesh), set[int]()
  for rank in ranks:
    sharding = NamedSharding(plan.mesh, plan.batch_spec(rank))
    count = count_shards_by_dim(sharding.spec, rank, sizes)[:1]
    check_split("batch", (length,), sharding.spec, sizes, count, count)
    shape = (length, *count_shards_by_dim(sharding.spec, rank, sizes)[1:])
    for index in sharding.addressable_devices_indices_map(shape).values():
      own.update(range(length)[index[0]] if index else ())
  return np.array(sorted(own))


def _from_rows(name: str, host: np.ndarray, length: int, rows: np.ndarray, plan: Plan) -> jax.Array:
  """A global array of `length` rows, of which `host` has these."""
  shape, sizes = (length, *host.shape[1:]), axis_sizes(plan.mesh)
  sharding = NamedSharding(plan.mesh, plan.batch_spec(host.ndim))
  counts = count_shards_by_dim(sharding.spec, host.ndim, sizes)
  check_split(name, shape, sharding.spec, sizes, counts, counts)

  def part(index: Any) -> np.ndarray:
    first, end, _ = index[0].indices(length)
    at = int(np.searchsorted(rows, first))
    return host[at : at + end - first][(slice(None), *index[1:])]

  return jax.make_array_from_callback(shape, sharding, part)


@check_arguments(TrainError, batch=1, start=0, threads=1, prefetch=0)
def batches(
  source: Iterable[PyTree] | Samples,
  plan: Plan,
  *,
  batch: int | None = None,
  start: int = 0,
  last: Last = "drop",
  threads: int = 8,
  prefetch: int = 2,
  global_batch: bool = False,
) -> Iterator[PyTree]:
  """Places each batch of `source` on the devices, a few batches ahead of the step.

  If you pass `batch`, the source holds samples by their global index: it is a `grain.MapDataset`, a Grain
  `RandomAccessDataSource`, or a list. Batch `k` then contains the samples from `start + k * batch` to
  `start + (k + 1) * batch`, on any number of devices and processes. Background threads read and stack the
  samples; each process reads only the samples for its own devices (and the first sample, to learn the
  shapes). To continue a run on other devices, pass the number of used samples as `start`.

  If the source raises an exception, the iterator first yields the batches before it.

  Args:
    source: samples by index, as described above. Without `batch`: an iterable of host batches as for
      `shard_batch`; in a job of several processes, of the shares of this process. It must not be a dataset
      with an index, whose items could be samples: pass `iter(dataset)` if they are batches.
    plan: the plan that gives the mesh and the `batch` rule.
    batch: the number of samples in a global batch.
    start: the global index of the first sample.
    last: what to do with a last batch that has fewer samples. `"drop"` drops it. `"pad"` fills it with copies
      of the last sample; samples must then be dicts, and each batch gets a `"mask"`, bool of shape (batch,),
      which is false for the copies. `"keep"` yields it as it is; the mesh axes must divide its size.
    threads: the number of threads that read samples; pass 1 for a source that is not thread-safe.
    prefetch: the number of batches that are placed on the devices ahead of the step. With `batch`, the same
      number of further batches (at least one) is read ahead.
    global_batch: whether the source of each process yields complete global batches, as for `shard_batch`. Do
      not combine it with `batch`.

  Returns:
    An iterator of placed batches, in order.

  Raises:
    ShardingError: the rules cannot place a batch; see `shard_batch`.
    TrainError: an option has an invalid value, the samples cannot be stacked, or items by index come without
      `batch`. An exception of the source
      keeps its type, and gets a note with the index of the sample.

  Example:
    >>> import numpy as np
    >>> import nnx_parallel as nxp
    >>> from flax import nnx
    >>> mesh, rules = nxp.make_mesh(data=8), nxp.presets.data_parallel()
    >>> plan = nxp.plan(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), mesh, rules)
    >>> host = [np.full((16, 4), number, np.float32) for number in range(3)]
    >>> [(batch.sharding.spec, float(batch.sum())) for batch in nxp.batches(host, plan)]
    [(P('data', None), 0.0), (P('data', None), 64.0), (P('data', None), 128.0)]
    >>> [batch.tolist() for batch in nxp.batches(list(range(100, 120)), plan, batch=8, start=4)]
    [[104, 105, 106, 107, 108, 109, 110, 111], [112, 113, 114, 115, 116, 117, 118, 119]]
  """
  check_plan(plan, "nxp.batches(source, plan)")
  if batch is None:
    if start or last != "drop":
      raise TrainError(
        f"start={start}, last={last!r} need the size of a batch: without it the source makes the batches.",
        fix="batch=..., with samples by index; or start the source there.",
      )
    if hasattr(source, "__getitem__") and not isinstance(source, (list, tuple)):
      raise TrainError(
        "the source has items by index: without batch= each item would be taken for a batch.",
        details=f"a {type(source).__module__}.{type(source).__qualname__}",
        fix="nxp.batches(source, plan, batch=...) if its items are samples;\n"
        "nxp.batches(iter(source), plan) if they are batches.",
      )
    if not isinstance(source, Iterable) or isinstance(source, io.IOBase):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise TrainError(
        f"batches needs an iterable of batches, and got {with_article(type(source).__name__)}.",
        fix="nxp.batches(iterator, plan), or nxp.batches(samples, plan, batch=...).",
      )
    host = cast("Iterable[Any]", source)
    return _ahead(iter(host), lambda one: shard_batch(one, plan, global_batch=global_batch), prefetch)
  if global_batch:
    raise TrainError(
      "batches(global_batch=True, batch=...) has no meaning: with batch=, every process has all samples.",
      fix="leave global_batch=True out.",
    )
  _check_devices(plan)
  sampler = Sampler(cast("Samples", source), batch, start, last)
  lengths = {batch, sampler.remainder or batch} if last == "keep" else {batch}
  if next(sampler.lengths(), None) is None:
    return iter(())
  shapes = jax.tree.map(np.ndim, sampler.sample(start))
  ranks = {rank + 1 for rank in jax.tree.leaves(shapes)}
  rows = {length: _own_rows(length, ranks, plan) for length in lengths}

  def place(share: tuple[int, Any]) -> PyTree:
    length, tree = share

    def leaf(path: Any, value: PyTree) -> jax.Array:
      name = f"batch{jax.tree_util.keystr(path)}"
      return _from_rows(name, _host_array(name, value), length, rows[length], plan)

    return jax.tree_util.tree_map_with_path(leaf, tree)

  return _ahead(sampler.read(rows, threads=threads, ahead=max(prefetch, 1)), place, prefetch)


def _ahead(host: Iterator[PyTree], place: Callable[[PyTree], PyTree], prefetch: int) -> Iterator[PyTree]:
  queue: deque[PyTree] = deque()
  while True:
    try:
      queue.append(place(next(host)))
    except StopIteration:
      yield from queue
      return
    except Exception:
      yield from queue
      raise
    if len(queue) > prefetch:
      yield queue.popleft()
