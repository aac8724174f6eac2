"""The program of a generator for one model: its caches, their layout, and one call of the model."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh
from jax.typing import DTypeLike

from nnx_parallel.core.axes import Entry, axes_of, count_shards, entry_of, without
from nnx_parallel.core.interpret import find_forwarded
from nnx_parallel.core.mesh import axis_sizes, is_explicit, own_mesh
from nnx_parallel.core.nodes import Path
from nnx_parallel.core.shards import pin
from nnx_parallel.core.text import few
from nnx_parallel.core.types import AnyArray, Model, PyTree
from nnx_parallel.decode.loops import Asked, Generated, Loop, Steps, Written, by_batch, by_slots, sizes_of
from nnx_parallel.decode.options import Args, Options, Used
from nnx_parallel.decode.prefill import read_several
from nnx_parallel.decode.rows import dims_of_rows
from nnx_parallel.errors import DecodeError
from nnx_parallel.layers.gather import Gather, gather_reads
from nnx_parallel.layout.batch import input_spec
from nnx_parallel.layout.constrain import default_scope, mapped_axes
from nnx_parallel.train.axes import shardings_inside, shardings_outside, with_types
from nnx_parallel.train.binding import Binding, deleted, is_deleted

Arrays: TypeAlias = list[jax.Array]
State = tuple[list[Any], Any]
"""The arrays of the model's `nnx.Cache` Variables, and the cache that is an argument."""


class Rows(NamedTuple):
  """How many rows have caches of their own, and their dim in each cache; None: ahead of its dims."""

  number: int
  dims: list[int | None]


class Bound:
  """The program for the current structure of a model.

  Over slots the model is called for one row, under `jax.vmap`: each row has a separate cache and position.
  The model's caches are then caches of one row, and only their shapes are used.
  """

  def __init__(self, options: Options, used: Used, model: Model):
    self.options, self._used = options, used
    self.binding = Binding({"model": model})
    self.outside = shardings_outside(self.binding)
    self.places = self.outside.on_auto_axes()
    # The arrays of the program: first the arrays of Variables, then raw arrays.
    places = [*self.binding.template.variables, *self.binding.template.raw]
    self.labels = [self.binding.labels[i] for i in places]
    self.shardings = [self.outside.shardings[i] for i in places]
    self.caches = [i for i, leaf in enumerate(self.binding.variables) if isinstance(leaf, nnx.Cache)]
    self.others = [i for i in range(len(places)) if i not in self.caches]
    if not self.caches and options.cache is None:
      raise DecodeError(
        f"{type(model).__name__} has no nnx.Cache, so no token would see earlier tokens.",
        fix="call init_cache((batch, length, features)) of each attention in the constructor,\n"
        "or give nxp.generator(cache=make, call=call) for a model that takes its cache as an argument.",
      )
    # Whether only the shapes of the model's caches are used; else the program empties and returns them.
    self.in_slots = options.slots is not None
    mesh, scope = self.binding.mesh, self.outside.scope
    self.axes: tuple[str, ...] = ()  # the mesh axes that split the batch
    if mesh is not None and scope is not None:
      self.axes = axes_of(input_spec(scope.ruleset, 2, axis_sizes(mesh))[0])
    self.capacity = _capacity(model)
    self._defaults: dict[tuple[int, ...], Args] = {}
    self._of_caches, self._weights = self._divide(self.shardings)
    self.jitted: Any = jax.jit(
      self._typed,
      donate_argnums=() if self.in_slots else 0,
      keep_unused=True,  # the old caches' memory is reused for the new caches
      out_shardings=([] if self.in_slots else self._of_caches, None) if mesh is not None else None,
    )

    self._begins: Any = jax.jit(self._begin)
    self._blocks: dict[PyTree, Any] = {}

  @property
  def explicit(self) -> bool:
    """Whether the program has types: the model states shardings."""
    return self.places.mesh is not None and is_explicit(self.places.mesh)

  def place(self, x: AnyArray, *, by_row: bool = True) -> PyTree:
    """Numbers of the host in the layout of the arguments; replicated, if their dim 0 is not the rows."""
    where = self._of_argument(np.ndim(x) if by_row else 0)
    return jnp.asarray(x) if where is None else jax.device_put(x, where)

  def defaults(self, prompts: tuple[int, ...]) -> Args:
    """The default values of missing arguments; placed once, since placing takes longer than a token."""
    batch, width = prompts
    if prompts not in self._defaults:
      lengths, numbers = np.full((batch,), width, np.int32), np.arange(batch, dtype=np.int32)
      # Prompts of equal length have a program of their own; token by token they need none.
      given = (None if self.options.prefill > 1 else lengths), numbers, jax.random.key(0)
      self._defaults[prompts] = Args(None, *(None if x is None else self.place(x) for x in given))
    return self._defaults[prompts]

  def abstract_args(self, prompts: tuple[int, ...], *, padded: bool) -> Args:
    """Arguments for prompts of a shape, without values; with or without lengths."""

    def struct(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(shape, dtype, sharding=self._of_argument(len(shape)))

    rows, key = struct(prompts[:1], jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    lengths = rows if padded or self.options.prefill == 1 else None
    return Args(struct(prompts, jnp.int32), lengths, rows, struct((), key.dtype))

  def argument_names(self) -> dict[str, str]:
    """Names an array of the program, as JAX does -> the label of the Variable."""
    groups = {"caches": self.caches, "others": self.others}
    places = {f"{group}[{n}]": i for group, found in groups.items() for n, i in enumerate(found)}
    return {name: self.labels[i].removeprefix("model.") for name, i in places.items()}

  def arrays(self) -> tuple[list[AnyArray], list[AnyArray]]:
    """The caches, and all else that the model holds."""
    return self._divide([*self.binding.read(), *self.binding.raw])

  def _divide(self, arrays: list[AnyArray]) -> tuple[list[AnyArray], list[AnyArray]]:
    """The caches among all arrays of the program, and the remaining arrays."""
    return [arrays[i] for i in self.caches], [arrays[i] for i in self.others]

  def __call__(self, args: Args) -> Generated:
    """Runs the program, and puts the caches it returns into the model."""
    variables = self.binding.variables
    caches, others = self.arrays()
    try:
      after, found = self.jitted(caches, others, args)
    except BaseException as error:
      labels = [self.labels[i] for i in self.caches]
      gone = [label for label, x in zip(labels, caches, strict=True) if is_deleted(x)]
      if gone and isinstance(error, (RuntimeError, ValueError)):
        raise deleted(gone, len(variables)) from error
      raise
    if not self.in_slots:
      for i, array in zip(self.caches, after, strict=True):
        variables[i].set_raw_value(array)
    return found

  def of_arrays(
    self, raw: Arrays, arrays: Arrays, *args: PyTree
  ) -> tuple[dict[str, jax.Array], dict[int, jax.Array]]:
    """The program for the arrays of the model: its results, and the caches by number."""
    typed = any(is_explicit(jax.typeof(x).sharding.mesh) for x in arrays)
    self.places = self.outside if typed else self.outside.on_auto_axes()
    after, found = self._program(*self._divide([*arrays, *raw]), Args(*args))
    fields = {name: x for name, x in found._asdict().items() if x is not None}
    return fields, dict(zip(self.caches, after, strict=False))

  def check(self, prompts: tuple[int, ...], ahead: int = 0) -> None:
    """Raises a `DecodeError` for prompts that the layout or flax's caches do not fit, after a prefix."""
    slots, parts = self.options.slots, self._shards
    rows = slots or prompts[0]
    if rows % parts:
      fitting = -(-rows // parts) * parts
      more = f"add prompts, of length 1 and to be thrown away, up to {fitting}."
      raise DecodeError(
        f"{rows} {'slots' if slots else 'prompts'} cannot be split over {parts} shards.",
        details=f"mesh {dict(self.binding.mesh.shape)}, batch over {self.axes}",
        fix=f"slots={fitting}" if slots else more,
      )
    if self.capacity is not None:
      rows_and_width = (prompts[0], ahead + prompts[1])
      _check_capacity(self.capacity, rows_and_width, self.options.max_new_tokens, self.in_slots)

  def _split_like_the_batch(self) -> list[tuple[str, Any, list[str]]]:
    """The weights that mesh axes of the batch split: their label, sharding, and these axes."""
    found: list[tuple[str, Any, list[str]]] = []
    for i, sharding in zip(self.others, self._weights, strict=True):
      shared = {*self.axes} & {axis for entry in getattr(sharding, "spec", ()) for axis in axes_of(entry)}
      if shared:
        found.append((self.labels[i], sharding, sorted(shared)))
    return found

  def _check_weights(self, what: str) -> None:
    """A weight that is split like the batch would have to be gathered before the rows are told apart."""
    for label, sharding, shared in self._split_like_the_batch():
      raise DecodeError(
        f"{what} cannot use {label}, which is sharded over {few(shared)} like the batch.",
        details=f"spec {sharding.spec}, batch over {self.axes}",
        fix="nxp.reshard(model, plan) to a plan that shards weights over other axes than the batch,\n"
        "or use a mesh with Auto axes.",
      )

  @property
  def _shards(self) -> int:
    """The number of parts into which the axes of the batch split it."""
    return count_shards(self.axes, axis_sizes(self.binding.mesh))

  def _length(self, args: Args) -> int:
    """The number of positions of a row, and one."""
    return args.ahead + args.prompts.shape[1] + self.options.max_new_tokens

  def _of_argument(self, ndim: int) -> NamedSharding | None:
    """Split as the batch of the plan; over slots, replicated."""
    mesh, by_batch = self.binding.mesh, ndim and self.options.slots is None
    spec = PartitionSpec(entry_of(self.axes)) if by_batch else PartitionSpec()
    return None if mesh is None else NamedSharding(mesh, spec)

  def _pin(self, x: jax.Array, *entries: object) -> jax.Array:
    """An array in a layout; without entries it is replicated."""
    mesh = self.places.mesh
    return x if mesh is None else pin(x, NamedSharding(mesh, PartitionSpec(*entries)))

  def _split_rows(self, x: jax.Array) -> jax.Array:
    """An array whose dim 0 is the batch."""
    return self._pin(x, entry_of(self.axes))

  def _logits(self, x: jax.Array) -> jax.Array:
    """Logits `(rows, vocabulary)` as the head shards them: XLA would gather its kernel to replicate them."""
    if self.explicit:
      return self._split_rows(x)
    split = self._pin(x, entry_of(self.axes), PartitionSpec.UNCONSTRAINED)
    # Sums over the vocabulary would depend on its sharding, and so would the drawn tokens.
    return self._split_rows(split) if self.options.sampling.temperature else split

  def _pin_caches(self, caches: Arrays, rows: Rows | None) -> Arrays:
    if rows is None:
      return [pin(x, where) for x, where in zip(caches, self._of_caches, strict=True)]
    return [
      self._of_rows(x, getattr(where, "spec", ()), None) if d is None else pin(x, where)
      for x, where, d in zip(caches, self._of_caches, rows.dims, strict=True)
    ]

  def _of_rows(self, x: jax.Array, row: Iterable[Entry], rest: object) -> jax.Array:
    """Caches with rows as the batch, and each as `row` says, without batch axes; `rest` for later dims."""
    entries = [entry_of(without(axes_of(entry), frozenset(self.axes))) for entry in row]
    entries += [rest] * (x.ndim - 1 - len(entries))
    return self._pin(x, entry_of(self.axes), *entries)

  def _call(
    self, others: Arrays, tokens: jax.Array, position: jax.Array, caches: Arrays, cache: PyTree
  ) -> PyTree:
    """Calls the model with tokens `(batch, n)`: the last logits, and all arrays and caches after it."""
    template, count = self.binding.template, len(self.binding.variables)
    found = dict(zip([*self.caches, *self.others], [*caches, *others], strict=True))
    arrays = [found[i] for i in sorted(found)]
    (model,) = template.build(template.join(arrays[:count], arrays[count:]))
    given = () if cache is None else (cache,)
    with read_several(model) if tokens.shape[1] > 1 else contextlib.nullcontext():
      result = self.options.call(model, tokens, position, *given)
    logits, cache = (result, None) if not given else result
    _check_logits(logits, tokens)
    found = template.arrays((model,))
    after, others = self._divide([found[i] for i in (*template.variables, *template.raw)])
    return logits[:, -1], others, after, cache

  def _one_call(
    self, others: Arrays, tokens: jax.Array, position: jax.Array, caches: Arrays, cache: PyTree
  ) -> PyTree:
    """The logits and all caches after a call that changes nothing else."""
    given = others, tokens, position, caches, cache
    logits, after, caches, cache = self._call(*given)
    changed = [n for n, (old, new) in enumerate(zip(others, after, strict=True)) if old is not new]
    if changed:  # or returned: `nnx.remat` and `nnx.jit` return every Variable that they get
      sources = find_forwarded(jax.make_jaxpr(self._call)(*given))[1:]
      leaves = [n for n, x in enumerate(others) for _ in jax.tree.leaves(x)]
      changed = [n for i, n in enumerate(leaves) if sources[i] != i]
    if changed:
      labels = [self.labels[self.others[n]] for n in changed]
      raise DecodeError(
        f"the call changed {few(labels)}, which no nnx.Cache holds: the next token would not see it.",
        fix="make it an nnx.Cache, or call model.eval() where it belongs to training.",
      )
    return logits, caches, cache

  def _rows_of_a_batch(self, others: Arrays, caches: Arrays, batch: int, length: int) -> Rows | str:
    """How the rows of a batch lie in the model's caches; or why the rows cannot have separate positions."""
    shared = self._split_like_the_batch()
    if self.explicit and shared:
      return f"on Explicit axes a row cannot use {shared[0][0]}, which is sharded like the batch"
    tokens, position = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((), jnp.int32)

    def after(tokens: jax.Array, caches: Arrays) -> Arrays:
      cache = None if self.options.cache is None else self.options.cache(batch, length)
      return self._call(others, self._split_rows(tokens), position, caches, cache)[2]

    rows = Rows(batch, dims_of_rows(after, tokens, caches) if caches else [])
    before = jax.eval_shape(lambda: self._empty(caches, batch, length, rows))

    def call(state: State) -> PyTree:
      given = self._split_rows(tokens), self._split_rows(tokens[:, 0])
      return self._over_rows(self._one_call, rows)(others, *given, *state)

    try:
      _, *state = jax.eval_shape(call, before)
    except (TypeError, ValueError, DecodeError) as error:
      return f"one row is not computed alone ({str(error).splitlines()[0]})"
    same = jax.tree.map(lambda x: (x.shape, x.dtype), (before, tuple(state)))
    return rows if same[0] == same[1] else "the caches of one row change their shape"

  def _over_rows(self, call: Callable[..., PyTree], rows: Rows | None) -> Callable[..., PyTree]:
    """`call` for each row separately, if rows have separate caches."""
    if rows is None:
      return call

    def one(others: Arrays, tokens: jax.Array, position: jax.Array, caches: Arrays, cache: PyTree) -> PyTree:
      places = [*zip(caches, rows.dims, strict=True)]
      whole = [x if d is None else jnp.expand_dims(x, d) for x, d in places]
      logits, caches, cache = call(others, tokens[None], position, whole, cache)
      pairs = zip(caches, rows.dims, strict=True)
      return logits[0], [x if d is None else jnp.squeeze(x, d) for x, d in pairs], cache

    dims = [d or 0 for d in rows.dims]
    axes = None if self.explicit or not self.axes else self.axes
    mapped = jax.vmap(one, (None, 0, 0, dims, 0), (0, dims, 0), spmd_axis_name=axes)

    def all_rows(*args: PyTree) -> PyTree:
      with mapped_axes(self.axes):
        return mapped(*args)

    return all_rows

  def _fresh(self, loop: Loop, rows: Rows | None, caches: Arrays, args: Args) -> State:
    """The state before the prompts: empty, or after the prefix, which one row on each shard reads for all."""
    batch, length = args.prompts.shape[0], self._length(args)
    if rows is None or args.prefix is None:
      return self._empty(caches, batch, length, rows)
    empty = self._empty(caches, batch, length, Rows(self._shards, rows.dims))
    whole = loop.read_prefix(args.prefix, self.options.prefill, self._shards, empty)

    def for_all(x: jax.Array, dim: int) -> jax.Array:
      return jnp.repeat(x, rows.number // self._shards, dim)

    caches, made = jax.tree.map(for_all, whole, jax.tree.broadcast(loop.dims, whole))
    return self._pin_caches(caches, rows), made

  def _empty(self, caches: Arrays, batch: int, length: int, rows: Rows | None) -> State:
    """The state before the first token."""
    make = self.options.cache
    if rows is None:
      return self._pin_caches([jnp.zeros_like(x) for x in caches], None), make and make(batch, length)
    shapes = [
      (rows.number, *x.shape) if d is None else (*x.shape[:d], rows.number, *x.shape[d + 1 :])
      for x, d in zip(caches, rows.dims, strict=True)
    ]
    zeros = [jnp.zeros(shape, x.dtype) for shape, x in zip(shapes, caches, strict=True)]
    if make is None:
      return self._pin_caches(zeros, rows), None
    with mapped_axes(self.axes):
      one = make(1, length)

    def repeated(x: jax.Array) -> jax.Array:
      row, rest = (jax.typeof(x).sharding.spec, None) if self.explicit else ((), PartitionSpec.UNCONSTRAINED)
      return self._of_rows(jnp.broadcast_to(x, (rows.number, *x.shape)), row, rest)

    return self._pin_caches(zeros, rows), jax.tree.map(repeated, one)

  def _typed(self, caches: PyTree, others: PyTree, args: Args) -> PyTree:
    """The program on Auto axes, or with types if the model states shardings; its results have types."""

    def specs(results: PyTree) -> PyTree:
      by_row = PartitionSpec(None if self.options.slots else entry_of(self.axes))
      return [
        PartitionSpec() if where is None else where.spec for where in layouts[: len(results[0])]
      ], by_row

    layouts, self.places = self._of_caches, self.outside.on_auto_axes()
    self.places = shardings_inside(self.outside, self._program, caches, others, args)
    self._used.axes = self.places.note
    if self.explicit and self.in_slots:
      self._check_weights("on Explicit axes a row")
    return with_types(self._program, self.outside, self.places, specs)(caches, others, args)

  def _program(self, caches: Arrays, others: Arrays, args: Args) -> PyTree:
    with default_scope(self.places.scope):
      loop, asked, rows = self._loop(caches, others, args)
      (after, _), found = self._steps(loop, asked, rows, caches, args).all()
      if rows is None or self.in_slots:
        return after if rows is None else [], found
      # What all rows of the model's cache share, such as an index, is that of the row that has read the most.
      most = jnp.argmax(asked.lengths + found.lengths)
      places = zip(after, rows.dims, self._of_caches, strict=True)
      after = [x if d is not None else pin(x[most], where) for x, d, where in places]
      return after, Generated(*map(self._split_rows, found[:2]))

  def _loop(self, caches: Arrays, others: Arrays, args: Args) -> tuple[Loop, Asked, Rows | None]:
    """What all loops need, the prompts, and how rows with separate positions lie in the state."""
    options, split = self.options, self._split_rows
    equal = args.lengths is None and args.prefix is None and options.slots is None
    sizes = sizes_of(options.prefill, args.prompts.shape[1], equal=equal)
    rows = self._separate_rows(caches, others, args, sizes)
    called = self._gathering(self._over_rows(self._one_call, rows))

    def forward(tokens: jax.Array, position: jax.Array, state: State) -> PyTree:
      if rows is not None:
        position = split(jnp.broadcast_to(position, tokens.shape[:-1]))
      logits, caches, made = called(others, tokens, position + args.ahead, *state)
      return logits, (self._pin_caches(caches, rows), made)

    dims = None if rows is None else ([d or 0 for d in rows.dims], 0)
    stops, kept = tuple(map(int, options.stop)), split if rows is None else self._pin
    loop = Loop(options.max_new_tokens, stops, sizes, forward, split, self._pin, kept, self._logits, dims)
    return loop, self._asked(args), rows

  def _gathering(self, call: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A call with the weights gathered where it reads them."""
    gather = Gather.of({(n,): x for n, x in enumerate(self._weights)}, self.axes, self.places.mesh)

    def paths(others: Arrays, *rest: PyTree) -> list[Path | None]:
      named: list[Path | None] = [(n,) for n, x in enumerate(others) for _ in jax.tree.leaves(x)]
      return [*named, *(None for _ in jax.tree.leaves(rest))]

    return gather_reads(gather, call, paths)

  def _steps(self, loop: Loop, asked: Asked, rows: Rows | None, caches: Arrays, args: Args) -> Steps:
    """The loop over a batch, or over rows with separate positions."""
    sampling, state = self.options.sampling, self._fresh(loop, rows, caches, args)
    if rows is None:
      return by_batch(loop, sampling, asked, state)
    # With types, a split dim of the slots cannot become two dims.
    shards = self._shards if self.in_slots and not self.explicit else None
    return by_slots(loop, sampling, asked, state, rows.number, shards)

  def stream(self, args: Args, every: int) -> Iterator[tuple[int, np.ndarray]]:
    """Runs the program in blocks of steps; the host reads the tokens of one while the next is computed."""
    arrays, on_mesh = self.arrays(), functools.partial(own_mesh, self.binding.mesh)
    with on_mesh():
      self.places = shardings_inside(self.outside, self._program, *arrays, args)
      self._used.axes = self.places.note
      arrays, args = self.places.place((arrays, args))
      carry = self._begins(*arrays, args)
      advance = self._advances(every, carry)
      block = advance(carry, *arrays, args)
    more = True
    while more:
      carry, written, goes_on = block
      with on_mesh():  # not around `yield`, where code of the caller runs
        block = advance(carry, *arrays, args)
      rows, tokens = map(np.asarray, written)
      for row in dict.fromkeys(rows[tokens >= 0].tolist()):
        yield row, tokens[(rows == row) & (tokens >= 0)]
      more = bool(goes_on)

  def _advances(self, every: int, carry: PyTree) -> Any:
    """The compiled `_advance`, which keeps the layout of the carry: another one would be another program."""
    layout = jax.tree.map(lambda x: x.sharding, carry)
    key = every, *jax.tree.leaves(layout)
    if key not in self._blocks:
      run = functools.partial(self._advance, every)
      self._blocks[key] = jax.jit(run, donate_argnums=0, out_shardings=(layout, None, None))
    return self._blocks[key]

  def _begin(self, caches: Arrays, others: Arrays, args: Args) -> PyTree:
    """The carry of the loop before its first step."""
    with self._inside():
      return self._steps(*self._loop(caches, others, args), caches, args).begin()

  def _advance(
    self, every: int, carry: PyTree, caches: Arrays, others: Arrays, args: Args
  ) -> tuple[PyTree, Written, jax.Array]:
    """The carry after so many steps, what each row has written in them, and whether a step is left."""
    with self._inside():
      steps = self._steps(*self._loop(caches, others, args), caches, args)

      def one(number: jax.Array, carry: PyTree, written: Written) -> PyTree:
        carry, new = steps.one(carry)
        return number + 1, carry, Written(*(x.at[number].set(y) for x, y in zip(written, new, strict=True)))

      shapes = jax.eval_shape(steps.one, carry)[1]
      none = Written(*(self._pin(jnp.full((every, *x.shape), -1, x.dtype)) for x in shapes))
      _, carry, written = jax.lax.while_loop(
        lambda all_: (all_[0] < every) & steps.more(all_[1]),
        lambda all_: one(*all_),
        (jnp.zeros((), jnp.int32), carry, none),
      )
      return carry, Written(*map(self._pin, written)), self._pin(steps.more(carry))

  @contextlib.contextmanager
  def _inside(self) -> Generator[None]:
    """The scope of a program, on the axes that it computes on, which its arguments have already."""
    mesh = None if self.places.mesh is self.outside.mesh else self.places.mesh
    on_axes = contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh)
    with on_axes, default_scope(self.places.scope):
      yield

  def _separate_rows(self, caches: Arrays, others: Arrays, args: Args, sizes: tuple[int, ...]) -> Rows | None:
    """How rows with separate positions lie in the state; None if all rows have the same position."""
    batch = args.prompts.shape[0]
    # Over slots, and where prompts of different lengths are read several tokens at once.
    how = f"{', '.join(map(str, sizes))} tokens at once"
    found: Rows | str | None = None
    if self.options.slots is not None:
      found = Rows(self.options.slots, [None] * len(caches))
    elif args.prefix is not None or (args.lengths is not None and sizes and batch > 1):
      found = self._rows_of_a_batch(others, caches, batch, self._length(args))
    if args.prefix is not None and isinstance(found, str):
      raise DecodeError(
        f"the cache of a prefix is read for one row and given to all, but {found}.",
        fix="put the prefix before each prompt.",
      )
    if isinstance(found, str):
      how += f", up to the shortest prompt, and then token by token: {found}"
    elif found is not None:
      how += ", each row at its own position"
    self._used.prompts = how if sizes else ""
    return None if isinstance(found, str) else found

  def _asked(self, args: Args) -> Asked:
    """The prompts, padded on the right, and a key for each row."""
    batch, width = args.prompts.shape
    laid = (lambda x: x) if self.options.slots else self._split_rows
    prompts, lengths = laid(args.prompts), args.lengths
    if lengths is None:
      lengths = jnp.full((batch,), width, jnp.int32)
    elif self.options.padding == "left":
      moved = (jnp.arange(width)[None] + width - lengths[:, None]) % width
      prompts = laid(jnp.take_along_axis(prompts, moved, axis=1))
    return Asked(prompts, lengths, jax.vmap(jax.random.fold_in, (None, 0))(args.key, args.requests))


def _check_logits(logits: jax.Array, tokens: jax.Array) -> None:
  if getattr(logits, "ndim", 0) != 3 or logits.shape[:2] != tokens.shape:
    raise DecodeError(
      f"the call returned {getattr(logits, 'shape', type(logits).__name__)} for tokens {tokens.shape}.",
      fix=f"return logits of shape {(*tokens.shape, 'vocabulary')}.",
    )


def _capacity(model: Model) -> tuple[int, int] | None:
  """Batch and length of the caches of flax's attentions: a full cache silently overwrites its last entry."""
  attentions = [node for _, node in nnx.iter_modules(model) if isinstance(node, nnx.MultiHeadAttention)]
  # Stacked attentions have extra leading dims: the kernel of a single attention has 3 dims.
  shapes = [
    node.cached_key.shape[node.query.kernel.ndim - 3 :] for node in attentions if node.cached_key is not None
  ]
  return (math.prod(shapes[0][:-3]), min(shape[-3] for shape in shapes)) if shapes else None


def _check_capacity(capacity: tuple[int, int], prompts: tuple[int, ...], limit: int, in_slots: bool) -> None:
  (batch, length), (rows, width) = capacity, prompts
  wanted, why = (1, "each slot has a cache for one row") if in_slots else (rows, f"there are {rows} prompts")
  if batch != wanted:
    raise DecodeError(
      f"{why}, and the model's cache is for {batch}.",
      fix=f"init_cache(({wanted}, length, features)) of each attention.",
    )
  # The last new token is not read.
  needed = width + limit - 1
  if needed > length:
    fix = f"init_cache((batch, {needed}, features)) of each attention"
    raise DecodeError(
      f"prompts of {width} tokens and {limit} new ones need a cache of length {needed}; it has {length}.",
      fix=fix + (f", or max_new_tokens={length - width + 1}." if length >= width else "."),
    )
