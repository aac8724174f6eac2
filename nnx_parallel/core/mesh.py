"""Device meshes: built by name, checked, and described."""

from __future__ import annotations

import contextlib
import copyreg
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from nnx_parallel.core.checked import are_texts, is_one_of, shorten_traceback
from nnx_parallel.core.text import few
from nnx_parallel.errors import MeshError

AnyMesh = Mesh | AbstractMesh
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # a C++ class, untyped
Grid: TypeAlias = np.ndarray[Any, Any]
Explicit = bool | Collection[str]
"""Which axes are Explicit: all, none, or the axes with these names (a string is one name)."""
M = TypeVar("M", bound=AnyMesh)


def _mesh_again(platform: str, ids: Grid, names: tuple[str, ...], kinds: tuple[AxisType, ...]) -> Mesh:
  """A mesh in the process that reads its pickle, on the devices with the same ids."""
  try:
    here = {device.id: device for device in jax.devices(platform)}
  except RuntimeError:  # this process has no devices of this kind
    here = {}
  if not set(ids.flat) <= here.keys():
    raise MeshError(
      f"what was pickled is on a mesh that this process lacks: {dict(zip(names, ids.shape, strict=True))}.",
      details=f"it needs the {platform} devices {few(sorted(map(str, ids.flat)))};"
      f" this process has {few(sorted(map(str, here))) or 'none'}",
      fix="start this process with the same devices; or send numbers, nnx.to_pure_dict(nnx.state(model)), and"
      " create the model here: nxp.from_arrays(arrays, plan).",
    )
  return Mesh(np.vectorize(here.get, otypes=[object])(ids), names, axis_types=kinds)


def _reduce(mesh: Mesh) -> tuple[Any, ...]:
  devices: Any = mesh.devices
  ids = np.vectorize(lambda device: device.id, otypes=[int])(devices)
  return _mesh_again, (devices.flat[0].platform, ids, mesh.axis_names, mesh.axis_types)


# jax pickles arrays, but no mesh, and Variables, states and plans hold their mesh.
copyreg.pickle(Mesh, _reduce)


@shorten_traceback
def make_mesh(
  axes: Mapping[str, int] | None = None,
  *names: object,
  devices: Sequence[Device] | None = None,
  explicit: Explicit = False,
  dcn: Mapping[str, int] | None = None,
  **sizes: int,
) -> Mesh:
  """Builds a mesh from named axis sizes, in the order in which they are written (major to minor).

  On TPU and GPU the device order follows the topology, so that the minor axes use the fastest links;
  on CPU it is the plain order of `devices`.

  Args:
    axes: the sizes of mesh axes as a mapping, for names that cannot be keywords; merged with `sizes`.
    *names: do not pass them. `jax.make_mesh` takes the names of the axes here; this function raises an error
      that shows the same call with keywords.
    devices: the devices to use; by default all of `jax.devices()`.
    explicit: use `AxisType.Explicit` (sharding in types) instead of `AxisType.Auto`, for every axis, or for
      the axes with these names. Steps still compute on Auto axes, unless the model states shardings.
    dcn: by mesh axis, the factor of its size that lies *between* slices (on GPUs, between hosts). With
      `dict(data=2)`, 2 slices share the axis `data`: this factor crosses the data-center network, and the
      rest of the axis stays inside a slice.
    **sizes: axis name -> size in devices. One size may be `-1`: the axis then gets the remaining devices.

  Returns:
    A `jax.sharding.Mesh` over exactly `devices`.

  Raises:
    MeshError: the product of the sizes is not the number of devices, more than one size is `-1`, a `dcn`
      factor does not divide its axis, or there are several TPU slices but no `dcn`.

  Example:
    >>> import nnx_parallel as nxp
    >>> dict(nxp.make_mesh(data=2, fsdp=-1, tensor=2).shape)
    {'data': 2, 'fsdp': 2, 'tensor': 2}
  """
  if isinstance(devices, int):
    raise MeshError(f"devices={devices} is not a list of devices.", fix=f"devices=jax.devices()[:{devices}]")
  devices = [*np.asarray(jax.devices() if devices is None else devices, dtype=object).flat]
  if not devices:
    raise MeshError("a mesh needs at least one device, and `devices` is empty.", fix="devices=jax.devices()")
  shape = _complete(_merge_sizes(axes, names, sizes, counted=True), len(devices))
  dcn_shape = _dcn_shape(shape, {} if dcn is None else dcn)
  types = _axis_types(shape, explicit)
  return Mesh(_arrange(shape, dcn_shape, devices), tuple(shape), axis_types=types)


@shorten_traceback
def abstract_mesh(
  axes: Mapping[str, int] | None = None, *names: object, explicit: Explicit = False, **sizes: int
) -> AbstractMesh:
  """A mesh of any size with no devices behind it, for planning.

  Args:
    axes: the sizes of mesh axes as a mapping, for names that cannot be keywords; merged with `sizes`.
    *names: do not pass them; they raise an error that shows the call with keywords.
    explicit: the Explicit axes, as in `make_mesh`.
    **sizes: axis name -> size in devices; `-1` is an error, since the number of devices is unknown.

  Returns:
    A `jax.sharding.AbstractMesh`.

  Raises:
    MeshError: there is no axis, or a size is less than 1.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.abstract_mesh(data=16, fsdp=256).size
    4096
  """
  shape = _merge_sizes(axes, names, sizes, counted=False)
  return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=_axis_types(shape, explicit))


def _axis_types(shape: Mapping[str, int], explicit: Explicit) -> tuple[AxisType, ...]:
  if not is_one_of(explicit, (True, False, None)) and type(explicit) is not str and not are_texts(explicit):
    raise MeshError(f"explicit={explicit!r:.60} names no axes.", fix='explicit=True, or a tuple: ("data",).')
  chosen = (
    set(shape) if explicit is True else {explicit} if isinstance(explicit, str) else set(explicit or ())
  )
  if not chosen <= set(shape):
    raise MeshError(
      f"explicit names {sorted(chosen - set(shape))[0]!r}, which is no axis.",
      details=f"axes {dict(shape)}",
      fix="explicit=True for all axes, or a tuple of their names.",
    )
  return tuple(AxisType.Explicit if name in chosen else AxisType.Auto for name in shape)


def is_explicit(mesh: AnyMesh) -> bool:
  """Whether some axes are Explicit; all remaining axes must be Auto. A `MeshError` for Manual axes."""
  if not isinstance(mesh, (Mesh, AbstractMesh)):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise MeshError(
      f"{mesh!r:.80} is not a mesh.",
      fix="nxp.make_mesh(data=-1) for these devices, nxp.abstract_mesh(data=64) for devices elsewhere.",
    )
  if AxisType.Manual in mesh.axis_types:
    kinds = dict(zip(mesh.axis_names, (kind.name for kind in mesh.axis_types), strict=True))
    raise MeshError(
      "this mesh has Manual axes, which exist inside jax.shard_map only.",
      details=f"axis types {kinds}",
      fix="build it with nxp.make_mesh(...) or jax.make_mesh(...).",
    )
  return AxisType.Explicit in mesh.axis_types


def auto_mesh(mesh: M) -> M:
  """The same mesh with Auto axes: the compiler chooses the shardings instead of the types."""
  if not is_explicit(mesh):
    return mesh
  kinds = (AxisType.Auto,) * len(mesh.axis_names)
  if isinstance(mesh, AbstractMesh):
    return cast(M, mesh.update_axis_types(dict(zip(mesh.axis_names, kinds, strict=True))))
  return cast(M, Mesh(mesh.devices, mesh.axis_names, axis_types=kinds))


@contextlib.contextmanager
def use_mesh(mesh: AnyMesh | None) -> Generator[None]:
  """Makes a mesh active in a block, or none: `jax.set_mesh` acts where it is called, not entered."""
  # In a trace, where there are no devices to set, a mesh is used by its axes alone.
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(ValueError):  # in a trace
      stack.enter_context(jax.set_mesh(mesh if isinstance(mesh, Mesh) else None))
    if mesh is not None:
      stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
    yield


@contextlib.contextmanager
def no_mesh() -> Generator[None]:
  """Hides the active mesh from programs that run on the meshes of their arrays; does nothing in a trace."""
  with use_mesh(None):
    yield


def own_mesh(mesh: AnyMesh | None) -> contextlib.AbstractContextManager[None]:
  """Makes the mesh of a program's arrays active in a block, if another mesh is active; nothing in a trace."""
  if mesh is None or jax.sharding.get_abstract_mesh().empty or is_tracing() or _is_active(mesh):
    return contextlib.nullcontext()
  return use_mesh(mesh)


def _is_active(mesh: AnyMesh) -> bool:
  if jax.sharding.get_abstract_mesh() != mesh.abstract_mesh:
    return False
  # A program, and a machine that is only compiled for, have a mesh without devices.
  if isinstance(mesh, AbstractMesh) or is_tracing() or jax.sharding.get_mesh().empty:
    return True
  return jax.sharding.get_mesh() == mesh


def check_active(mesh: AnyMesh | None, which: str) -> None:
  """Raises a `MeshError` if another mesh is active; `which` says what has this mesh."""
  active = jax.sharding.get_abstract_mesh()
  if mesh is not None and not active.empty and axis_sizes(mesh) != axis_sizes(active):
    raise MeshError(
      f"there are two meshes: the mesh {which} is not the active mesh.",
      details=f"{which} {axis_sizes(mesh)}, active {axis_sizes(active)}",
      fix="jax.set_mesh(None) clears the active mesh; nxp.use_rules(rules) without a mesh uses it.",
    )


def is_tracing() -> bool:
  """Whether jax traces a program, which has an active mesh, but no devices."""
  try:
    jax.sharding.get_mesh()
  except ValueError:
    return True
  return False


def mesh_inside(mesh: M) -> M:
  """The mesh as a traced program sees it: with Auto axes if the program computes on them, else unchanged."""
  auto = auto_mesh(mesh)
  return auto if _is_active(auto) else mesh


def explicit_axes(mesh: AnyMesh) -> bool | list[str]:
  """What `make_mesh` takes as `explicit` for axes of these types."""
  found = [*map(str, mesh.explicit_axes)]
  return found if 0 < len(found) < len(mesh.axis_names) else is_explicit(mesh)


def axis_sizes(mesh: AnyMesh | None) -> dict[str, int]:
  """Mesh axis name -> size in devices, in mesh order: a plain dict, which is empty without a mesh."""
  return {} if mesh is None else {str(name): int(size) for name, size in mesh.shape.items()}


@shorten_traceback
def describe_mesh(mesh: AnyMesh) -> str:
  """Describes a mesh, and says which axes stay within one host or slice.

  Args:
    mesh: a real or an abstract mesh.

  Returns:
    Text: a line with the axis sizes and the kind of device, then lines that list the axes by the links that
    they cross.

  Example:
    >>> import nnx_parallel as nxp
    >>> print(nxp.describe_mesh(nxp.make_mesh(data=4, tensor=2)))
    mesh data=4 x tensor=2 = 8 devices (cpu, Auto axes)
      inside one host: data, tensor
  """
  is_explicit(mesh)  # refuses what is no mesh
  sizes = " x ".join(f"{k}={v}" for k, v in axis_sizes(mesh).items())
  explicit = explicit_axes(mesh)
  types = "Explicit" if explicit is True else "Auto"
  if isinstance(explicit, list):
    rest = [str(name) for name in mesh.axis_names if name not in explicit]
    types = f"Explicit {', '.join(explicit)} and Auto {', '.join(rest)}"
  if isinstance(mesh, AbstractMesh):
    return f"mesh {sizes} = {mesh.size} devices (abstract, {types} axes)"
  kind = mesh.devices.flat[0].device_kind
  lines = [f"mesh {sizes} = {mesh.size} devices ({kind}, {types} axes)"]
  lines += [f"  {link}: {', '.join(names)}" for link, names in _axes_by_link(mesh).items() if names]
  return "\n".join(lines)


def _axes_by_link(mesh: Mesh) -> dict[str, list[str]]:
  found: dict[str, list[str]] = {"inside one host": [], "across hosts": [], "across slices": []}
  for dim, name in enumerate(mesh.axis_names):
    lines = np.moveaxis(mesh.devices, dim, -1).reshape(-1, mesh.devices.shape[dim])
    slices = any(len({getattr(device, "slice_index", 0) for device in line}) > 1 for line in lines)
    hosts = any(len({device.process_index for device in line}) > 1 for line in lines)
    link = "across slices" if slices else "across hosts" if hosts else "inside one host"
    found[link].append(str(name))
  return found


def _merge_sizes(
  axes: Mapping[str, int] | None, names: tuple[object, ...], sizes: Mapping[str, int], *, counted: bool
) -> dict[str, int]:
  """Merges the sizes of both forms into plain ints and checks them; -1 is a size if devices are `counted`."""
  call = "nxp.make_mesh(data=-1)" if counted else "nxp.abstract_mesh(data=16, fsdp=256)"
  if names or not isinstance(axes, (Mapping, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise MeshError(
      "the axes of a mesh are written as name=size, not as sizes and names.",
      details=f"given {', '.join(map(repr, (axes, *names)))}",
      fix=_by_name(call, axes, names[0] if names else ()),
    )
  twice = sorted(set(axes or {}) & set(sizes))
  if twice:
    raise MeshError(
      f"mesh axis {twice[0]!r} is given twice.",
      details=f"axes={dict(axes or {})}, and {dict(sizes)}",
      fix=f"give {twice[0]!r} only once.",
    )
  shape: dict[str, Any] = {**(axes or {}), **sizes}
  if not shape:
    raise MeshError("a mesh needs at least one axis.", fix=call)
  for name, size in shape.items():
    if (
      isinstance(size, bool) or not isinstance(size, Integral) or (size < 1 and not (counted and size == -1))
    ):
      rest = f"{name}=-1 takes all the devices that the other axes leave."
      raise MeshError(
        f"mesh axis {name!r} has size {size!r}; sizes are positive integers"
        + (", or one -1." if counted else ": an abstract mesh has no devices to count."),
        details=f"axes {shape}",
        fix=rest if counted else f"give every axis its size, e.g. {call}.",
      )
  return {name: int(size) for name, size in shape.items()}


def _by_name(call: str, sizes: Any, names: Any) -> str:
  """The call with the arguments of `jax.make_mesh` by name; `call` if they do not pair up."""
  function, _, _ = call.partition("(")
  try:
    pairs = dict(zip(names, sizes, strict=True) if names else sizes)
    return f"{function}({', '.join(f'{name}={size}' for name, size in pairs.items())})"
  except (TypeError, ValueError):
    return call


def _complete(shape: dict[str, int], count: int) -> dict[str, int]:
  unknown = [name for name, size in shape.items() if size == -1]
  if len(unknown) > 1:
    raise MeshError(
      f"only one mesh axis can be -1, but {', '.join(unknown)} are.",
      details=f"axes {shape}",
      fix=f"give a size to {unknown[0]!r} or {unknown[1]!r}.",
    )
  fixed = math.prod(size for size in shape.values() if size != -1)
  if unknown and count % fixed == 0:
    return {name: count // fixed if size == -1 else size for name, size in shape.items()}
  if not unknown and fixed == count:
    return shape
  if not unknown and fixed < count:
    fix = f"set one axis to -1, or use fewer devices: devices=jax.devices()[:{fixed}]."
  else:
    fix = (
      f"choose sizes that divide {count}; on a CPU, simulate more devices before jax is used:"
      f' jax.config.update("jax_num_cpu_devices", {-(-count // fixed) * fixed}).'
    )
  raise MeshError(
    f"mesh axes multiply to {fixed} devices, and there are {count}.",
    details=f"axes {shape}, {count} devices",
    fix=fix,
  )


def _dcn_shape(shape: dict[str, int], dcn: Mapping[str, int]) -> dict[str, int]:
  if not isinstance(dcn, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
    raise MeshError(
      f"dcn={dcn!r} is not a mapping from axis to number of slices.",
      details=f"axes {shape}",
      fix="a mapping of axis to slices, for example dcn=dict(data=2).",
    )
  for name, factor in dcn.items():
    if name not in shape:
      raise MeshError(
        f"dcn names the axis {name!r}, which the mesh does not have.",
        details=f"axes {shape}, dcn {dict(dcn)}",
        fix=f"use one of {', '.join(shape)}.",
      )
    if not isinstance(factor, Integral) or factor < 1 or shape[name] % factor:
      raise MeshError(
        f"dcn splits axis {name!r} {factor} ways, which does not divide its size {shape[name]}.",
        details=f"axes {shape}, dcn {dict(dcn)}",
        fix=f"give {name!r} a size that is a multiple of {factor}: it counts all slices together.",
      )
  return {name: dcn.get(name, 1) for name in shape}


def _arrange(shape: dict[str, int], dcn: dict[str, int], devices: list[Device]) -> Grid:
  sizes = list(shape.values())
  if math.prod(dcn.values()) > 1:
    return _arrange_hybrid(shape, dcn, devices)
  if devices[0].platform == "cpu":
    return np.array(devices, dtype=object).reshape(sizes)
  slices = len({getattr(d, "slice_index", 0) for d in devices})
  if slices > 1 and devices[0].platform == "tpu":
    name = next((name for name, size in shape.items() if size % slices == 0), next(iter(shape)))
    raise MeshError(
      f"the devices form {slices} slices, and no dcn names the axis that crosses them.",
      details=f"axes {shape}, {len(devices)} devices",
      fix=f"nxp.make_mesh(..., dcn={{{name!r}: {slices}}}): that factor of {name!r} goes over the slow"
      " network.",
    )
  # `jax.make_mesh` splits physical axes on one kind of chip only, and rejects several slices.
  return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _arrange_hybrid(shape: dict[str, int], dcn: dict[str, int], devices: list[Device]) -> Grid:
  inner = [size // dcn[name] for name, size in shape.items()]
  outer = list(dcn.values())
  slices = {getattr(d, "slice_index", d.process_index) for d in devices}
  if len(slices) > 1 and math.prod(outer) != len(slices):
    raise MeshError(
      f"dcn splits the mesh into {math.prod(outer)} parts, and the devices form {len(slices)} slices.",
      details=f"axes {shape}, dcn {dcn}",
      fix=f"make the dcn factors multiply to {len(slices)}.",
    )
  if len(slices) > 1 and devices[0].platform != "cpu":
    by_process = getattr(devices[0], "slice_index", None) is None
    return mesh_utils.create_hybrid_device_mesh(
      inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )
  # One granule (or simulated devices): contiguous runs of devices are used as slices, so that a
  # program planned here has the same device order as on the real thing.
  blocks = np.array(devices, dtype=object).reshape([*outer, *inner])
  order = [d for pair in zip(range(len(outer)), range(len(outer), 2 * len(outer)), strict=True) for d in pair]
  return blocks.transpose(order).reshape(list(shape.values()))
