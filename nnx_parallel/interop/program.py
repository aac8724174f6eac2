"""A program with its layout in one file, for a process that lacks the source of its model.

`jax.export` does the work. The file is a zip of its serialized program and of `layout.json`, which has the
mesh axes and the paths of the Variables. The weights come from a checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from nnx_parallel.checkpoint.damage import friendly_errors
from nnx_parallel.core.checked import check_arguments, check_arrays
from nnx_parallel.core.mesh import axis_sizes, explicit_axes, make_mesh, own_mesh
from nnx_parallel.core.nodes import value_of
from nnx_parallel.core.text import few, format_array
from nnx_parallel.core.types import AnyArray, PyTree
from nnx_parallel.decode.generate import Generator
from nnx_parallel.errors import CheckpointError
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.train.axes import Shardings, shardings_inside, shardings_outside
from nnx_parallel.train.binding import Binding


@check_arguments(CheckpointError)
def export_program(
  file: str | os.PathLike[str],
  function: Callable[..., PyTree],
  model: nnx.Module,
  *args: PyTree,
  platforms: Sequence[str] | None = None,
) -> None:
  """Writes a compiled function of a model to a file, with the layout of the model but without its weights.

  Args:
    file: the file to write; an existing file is replaced.
    function: a function `function(model, *args)` that returns arrays in tuples, lists and dicts, and that may
      change Variables, such as a cache; or a result of `nxp.generator`.
    model: a live module, on any mesh.
    *args: the other arguments of the function, as global arrays or `ShapeDtypeStruct`s. An argument is
      sharded if it has a sharding. For a generator: the prompts.
    platforms: the platforms to compile for, such as `("tpu",)`; by default the platform of the model's
      devices.

  Raises:
    CheckpointError: the module `flatbuffers`, which `jax.export` writes with, is not installed.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> from nnx_parallel.interop.program import export_program, load_program
    >>> mesh, init = nxp.make_mesh(fsdp=8), lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> model = nxp.create_sharded_model(init, mesh, nxp.fsdp(min_size=0))
    >>> x = jax.device_put(jnp.ones((16, 8)), jax.NamedSharding(mesh, jax.P("fsdp")))
    >>> export_program("forward.zip", lambda model, x: model(x), model, x)
    >>> served = load_program("forward.zip").load(nnx.state(model))
    >>> bool((served(x) == nnx.jit(lambda model, x: model(x))(model, x)).all())
    True
  """
  check_arrays(CheckpointError, "args", args)
  binding = Binding({"model": model})
  if isinstance(function, Generator):
    program, args = function.as_function(model, *args)
  else:
    program = _of_module(binding, function)

  def run_in(places: Shardings) -> Callable[..., PyTree]:
    return functools.partial(program, places.place(binding.raw))

  outside, args = shardings_outside(binding), tuple(map(_abstract, args))
  leaves = [_abstract(x) for x in binding.read()]
  with own_mesh(binding.mesh):
    places = shardings_inside(outside, run_in(outside.on_auto_axes()), leaves, *args)
  run = run_in(places)
  leaves, args = places.place(leaves), places.place(args)
  changes: list[int] = []

  def outputs(changing: list[AnyArray], fixed: list[AnyArray], *args: PyTree) -> PyTree:
    found, after = run(_joined(changing, fixed, changes), *args)
    return found, [after[i] for i in changes]

  with places.active(), default_scope(places.scope):
    jax.eval_shape(lambda leaves, *args: changes.extend(run(leaves, *args)[1]), leaves, *args)
    wheres = None if binding.mesh is None else [leaves[i].sharding for i in changes]
    # An input that the program does not read, such as a cache that it empties, would lose its sharding.
    jitted = jax.jit(outputs, out_shardings=(None, wheres), keep_unused=True)
    exported = export.export(jitted, platforms=platforms)(*_split(leaves, changes), *args)
  _require_flatbuffers()
  mesh = places.mesh
  layout = {
    "axes": axis_sizes(mesh),
    "explicit": mesh is not None and explicit_axes(mesh),
    "paths": [list(binding.template.paths[i][1:]) for i in binding.template.variables],
    "changes": changes,
  }
  temporary = Path(f"{os.fspath(file)}.{os.getpid()}")
  with friendly_errors(f"export {os.fspath(file)}", Path(file).parent):
    with zipfile.ZipFile(temporary, "w") as packed:
      packed.writestr("program", bytes(exported.serialize()))
      packed.writestr("layout.json", json.dumps(layout))
    temporary.replace(file)


@check_arguments(CheckpointError)
def load_program(file: str | os.PathLike[str], *, devices: Sequence[Any] | None = None) -> Served:
  """Reads a file that `export_program` wrote; the source code of the model is not needed.

  Args:
    file: the file to read.
    devices: JAX devices, as many as the program was exported for; by default the first devices of this
      process.

  Returns:
    The program, without weights.

  Raises:
    CheckpointError: there are fewer devices, or `flatbuffers` is not installed.

  Example:
    >>> served = load_program("forward.zip").load(weights)  # doctest: +SKIP
    >>> served(x)  # doctest: +SKIP
  """
  try:
    with zipfile.ZipFile(file) as packed:
      layout = json.loads(packed.read("layout.json"))
      program = packed.read("program")
  except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
    raise CheckpointError(
      f"cannot read a program from {os.fspath(file)}: {error}.", fix="a file that export_program wrote."
    ) from error
  _require_flatbuffers()
  exported = export.deserialize(bytearray(program))
  devices = list(jax.devices() if devices is None else devices)
  if len(devices) < exported.nr_devices:
    raise CheckpointError(
      f"{os.fspath(file)} is a program for {exported.nr_devices} devices, and there are {len(devices)}.",
      details=f"mesh axes {layout['axes']}",
      fix="export it from a model on a mesh of as many devices as will run it.",
    )
  axes: dict[str, int] = layout["axes"]
  chosen = devices[: exported.nr_devices]
  mesh = make_mesh(axes, devices=chosen, explicit=layout["explicit"]) if axes else None
  return Served(exported, mesh, devices[0], layout)


class Served:
  """A program of a model without its source; made by `load_program`. `args` are the arguments of a call."""

  def __init__(self, exported: export.Exported, mesh: Mesh | None, device: Any, layout: dict[str, Any]):
    self.mesh, self._changes = mesh, layout["changes"]
    self._paths = [tuple(path) for path in layout["paths"]]

    whole = SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, PartitionSpec())
    given = [None] * len(exported.in_avals) if mesh is None else exported.in_shardings_jax(mesh)
    structs = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where or whole)
      for x, where in zip(exported.in_avals, given, strict=True)
    ]
    (changing, fixed, *args), _ = jax.tree.unflatten(exported.in_tree, structs)
    self.args: tuple[PyTree, ...] = tuple(args)
    self._leaves = _joined(changing, fixed, self._changes)
    self._jitted: Any = jax.jit(exported.call, donate_argnums=0)

  @property
  def weights(self) -> dict[str, PyTree]:
    """The Variables as `nnx.to_pure_dict(nnx.state(model))` has them; `ShapeDtypeStruct`s before `load`."""
    return nnx.traversals.unflatten_mapping(dict(zip(self._paths, self._leaves, strict=True)))

  def load(self, weights: PyTree) -> Served:
    """Gives the program arrays of the paths and shapes of `weights`, as a nested dict or an `nnx.State`.

    Arrays with another layout are moved. Returns the program itself.
    """
    given = nnx.to_pure_dict(weights) if isinstance(weights, nnx.State) else weights
    flat = {path: value_of(x) for path, x in nnx.traversals.flatten_mapping(given).items()}
    wanted = dict(zip(self._paths, self._leaves, strict=True))
    wrong = [
      f"{'.'.join(map(str, path))} ({format_array(x.dtype, x.shape)})"
      for path, x in wanted.items()
      if path not in flat or (flat[path].shape, flat[path].dtype) != (x.shape, x.dtype)
    ]
    if wrong:
      raise CheckpointError(
        f"the weights lack {few(wrong)}, or have another shape or dtype there.",
        fix='served.load(nxp.Checkpointer("run").restore(served.weights))',
      )
    self._leaves = [_placed(flat[path], x.sharding) for path, x in wanted.items()]
    return self

  def __call__(self, *args: PyTree) -> PyTree:
    """Runs the program on arguments such as `args`, which are moved; it keeps the Variables that it changes.

    A generator takes prompts, lengths, numbers of requests and a key, and returns the fields of `Generated`.
    """
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in self._leaves):
      raise CheckpointError("the program has no weights yet.", fix="served.load(weights)")
    placed = jax.tree.map(lambda x, where: _placed(x, where.sharding), args, self.args)
    with own_mesh(self.mesh):
      found, after = self._jitted(*_split(self._leaves, self._changes), *placed)
    for i, array in zip(self._changes, after, strict=True):
      self._leaves[i] = array
    return found


def _of_module(binding: Binding, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
  """`function` of raw arrays and Variables; returns its result and the changed arrays, by number."""

  def run(raw: list[jax.Array], leaves: list[Any], *args: PyTree) -> PyTree:
    arrays = binding.template.join(leaves, raw)
    (module,) = binding.template.build(arrays)
    found = function(module, *args)
    changed = binding.template.arrays((module,))
    after = [changed[i] for i in binding.template.variables]
    return found, {i: new for i, (old, new) in enumerate(zip(leaves, after, strict=True)) if old is not new}

  return run


def _split(leaves: Sequence[AnyArray], changes: Sequence[int]) -> tuple[list[AnyArray], list[AnyArray]]:
  """The leaves that a program changes, whose memory it may take, and the other leaves."""
  return [leaves[i] for i in changes], [x for i, x in enumerate(leaves) if i not in {*changes}]


def _joined(
  changing: Sequence[AnyArray], fixed: Sequence[AnyArray], changes: Sequence[int]
) -> list[AnyArray]:
  found, others = dict(zip(changes, changing, strict=True)), iter(fixed)
  count = len(changing) + len(fixed)
  return [found[i] if i in found else next(others) for i in range(count)]


def _abstract(x: PyTree) -> PyTree:
  def struct(x: AnyArray) -> jax.ShapeDtypeStruct:
    own = getattr(x, "sharding", None)
    kept = own if isinstance(own, NamedSharding) else None
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.dtypes.result_type(x), sharding=kept)

  return jax.tree.map(struct, x)


def _placed(x: AnyArray, where: Sharding | None) -> AnyArray:
  return x if getattr(x, "sharding", None) == where else jax.device_put(x, where)


def _require_flatbuffers() -> None:
  try:
    import flatbuffers  # noqa: F401  # pyright: ignore
  except ImportError as error:
    raise CheckpointError(
      "jax.export needs the package flatbuffers.", fix="pip install flatbuffers"
    ) from error
