"""Meshes: sizes, device order, hybrid layouts, and what they say about themselves."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import nnx_parallel as nxp
from nnx_parallel.core.mesh import auto_mesh, axis_sizes, is_explicit


@dataclasses.dataclass(frozen=True)
class Chip:  # What `make_mesh` reads of a device, so that slices and hosts can be made up
  id: int
  process_index: int
  slice_index: int
  platform: str = "tpu"
  device_kind: str = "TPU v5 lite"
  core_on_chip: int = 0

  @property
  def coords(self) -> tuple[int, int, int]:
    return (self.id % 2, self.id // 2 % 2, 0)


def slices(count: int, size: int, hosts: int = 1) -> list[Chip]:
  per_host = size // hosts
  return [Chip(i, i // per_host, i // size) for i in range(count * size)]


def ids(mesh) -> list:
  return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "tensor": 4}, {"a": 2, "b": 2, "c": 2}])
def test_sizes_in_the_order_written(sizes):
  mesh = nxp.make_mesh(**sizes)
  assert axis_sizes(mesh) == sizes
  assert list(mesh.axis_names) == list(sizes)
  assert set(mesh.axis_types) == {AxisType.Auto}


def test_minus_one_takes_what_is_left():
  for sizes, left in (({"fsdp": -1}, 8), ({"a": 4, "fsdp": -1}, 2), ({"fsdp": -1, "a": 8}, 1)):
    assert nxp.make_mesh(**sizes).shape["fsdp"] == left


def test_cpu_devices_keep_their_order():
  assert ids(nxp.make_mesh(data=2, tensor=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_subset_of_devices_and_names_that_are_keywords():
  mesh = nxp.make_mesh({"lambda": 2}, rest=-1, devices=jax.devices()[4:])
  assert axis_sizes(mesh) == {"lambda": 2, "rest": 2}
  assert ids(mesh) == [[4, 5], [6, 7]]


def test_sizes_may_be_numpy_integers():
  sizes = axis_sizes(nxp.make_mesh(data=np.int64(2), fsdp=-1))
  assert sizes == {"data": 2, "fsdp": 4}
  assert {type(size) for size in sizes.values()} == {int}


@pytest.mark.parametrize(("arguments", "text"), [
  ({"axes": {"data": 2}, "data": 8}, r"'data' is given twice[\s\S]*give 'data' only once"),
  ({"data": 1, "devices": []}, r"needs at least one device[\s\S]*devices=jax.devices\(\)"),
  ({"data": 8, "dcn": "data"}, r"dcn='data' is not a mapping[\s\S]*dcn=dict\(data=2\)"),
  ({"data": 8, "dcn": {"data": 2.0}}, r"dcn splits axis 'data' 2.0 ways"),
])  # fmt: skip
def test_arguments_that_contradict(arguments, text):
  with pytest.raises(nxp.errors.MeshError, match=text):
    nxp.make_mesh(**arguments)


@pytest.mark.parametrize(("sizes", "texts"), [
  ({}, ["a mesh needs at least one axis", "make_mesh(data=-1)"]),
  ({"data": -1, "fsdp": -1}, ["only one mesh axis can be -1, but data, fsdp are", "give a size to 'data'"]),
  ({"data": 3, "fsdp": -1}, ["multiply to 3 devices, and there are 8", "sizes that divide 8"]),
  ({"data": -1, "tensor": 3}, ["multiply to 3 devices, and there are 8", 'jax_num_cpu_devices", 9)']),
  ({"data": 2, "fsdp": 2}, ["multiply to 4 devices", "devices=jax.devices()[:4]"]),
  ({"data": 16}, ["multiply to 16 devices", 'jax.config.update("jax_num_cpu_devices", 16)']),
  ({"data": 0}, ["mesh axis 'data' has size 0", "data=-1 takes all the devices"]),
  ({"data": 2.0}, ["mesh axis 'data' has size 2.0"]), ({"data": True}, ["mesh axis 'data' has size True"]),
  ({"data": -2}, ["mesh axis 'data' has size -2"]),
])  # fmt: skip
def test_sizes_that_do_not_fit(sizes, texts):
  with pytest.raises(nxp.errors.MeshError) as caught:
    nxp.make_mesh(**sizes)
  for text in texts:
    assert text in str(caught.value)


def test_explicit_axes_and_their_auto_twin():
  mesh = nxp.make_mesh(data=2, tensor=4, explicit=True)
  assert is_explicit(mesh)
  twin = auto_mesh(mesh)
  assert not is_explicit(twin)
  assert ids(twin) == ids(mesh)
  assert auto_mesh(twin) is twin


def test_one_explicit_axis_makes_a_mesh_explicit():
  devices = np.array(jax.devices()).reshape(2, 4)
  mixed = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit))
  assert is_explicit(mixed)
  assert auto_mesh(mixed) == nxp.make_mesh(data=2, tensor=4)
  assert auto_mesh(mixed.abstract_mesh) == auto_mesh(mixed).abstract_mesh
  assert "= 8 devices (cpu, Explicit tensor and Auto data axes)" in nxp.describe_mesh(mixed)


def test_some_axes_are_explicit():
  mesh = nxp.make_mesh(data=2, tensor=4, explicit=("tensor",))
  assert mesh.axis_types == (AxisType.Auto, AxisType.Explicit)
  assert nxp.abstract_mesh(data=2, tensor=4, explicit=["tensor"]).axis_types == mesh.axis_types
  assert nxp.make_mesh(data=2, tensor=4, explicit="tensor").axis_types == mesh.axis_types
  with pytest.raises(nxp.errors.MeshError, match=r"'mlp', which is no axis(.|\n)*explicit=True"):
    nxp.make_mesh(data=2, tensor=4, explicit=("mlp",))


def test_manual_axes_are_refused():
  mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Manual,))
  with pytest.raises(nxp.errors.MeshError, match=r"Manual axes[\s\S]*'data': 'Manual'[\s\S]*make_mesh"):
    is_explicit(mesh)


def test_abstract_meshes_of_any_size():
  mesh = nxp.abstract_mesh(data=64, fsdp=64, explicit=True)
  assert isinstance(mesh, AbstractMesh)
  assert (mesh.size, is_explicit(mesh)) == (4096, True)
  assert nxp.describe_mesh(mesh) == "mesh data=64 x fsdp=64 = 4096 devices (abstract, Explicit axes)"


@pytest.mark.parametrize(("sizes", "text"), [
  ({"data": -1}, "no devices to count"), ({}, "at least one axis"), ({"data": 0}, "has size 0"),
])  # fmt: skip
def test_abstract_meshes_that_cannot_be(sizes, text):
  with pytest.raises(nxp.errors.MeshError, match=text) as caught:
    nxp.abstract_mesh(**sizes)
  assert "abstract_mesh(data=16, fsdp=256)" in str(caught.value)
  assert "-1 takes" not in str(caught.value)


def test_the_form_of_jax_is_answered_with_names():
  text = r"given \(2, 4\), \('data', 'fsdp'\)\n  Fix: nxp\.make_mesh\(data=2, fsdp=4\)"
  with pytest.raises(nxp.errors.MeshError, match=text):
    nxp.make_mesh((2, 4), ("data", "fsdp"))
  with pytest.raises(nxp.errors.MeshError, match=r"given 8\n  Fix: nxp.abstract_mesh\(data=16, fsdp=256\)"):
    nxp.abstract_mesh(8)


def test_simulated_slices_are_runs_of_devices():
  mesh = nxp.make_mesh(data=4, fsdp=2, dcn={"data": 2})
  # data = 2 slices x 2 inside; devices 0-3 stand for the first slice.
  assert ids(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
  split_minor = nxp.make_mesh(data=2, fsdp=4, dcn={"fsdp": 2})
  assert ids(split_minor) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_real_slices_go_to_the_axis_that_dcn_names():
  mesh = nxp.make_mesh(data=4, fsdp=2, devices=slices(2, 4), dcn={"data": 2})
  slice_of = np.vectorize(lambda device: device.slice_index)(mesh.devices)
  assert slice_of.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
  text = "= 8 devices (TPU v5 lite, Auto axes)\n  inside one host: fsdp\n  across slices: data"
  assert nxp.describe_mesh(mesh) == f"mesh data=4 x fsdp=2 {text}"


def test_an_axis_across_hosts_is_said():
  mesh = Mesh(np.array(slices(1, 8, hosts=2), dtype=object).reshape(2, 4), ("data", "tensor"))
  text = nxp.describe_mesh(mesh)
  assert "inside one host: tensor" in text
  assert "across hosts: data" in text


@pytest.mark.parametrize(("dcn", "texts"), [
  ({"slice": 2}, ["dcn names the axis 'slice'", "use one of data, fsdp"]),
  ({"data": 3}, ["splits axis 'data' 3 ways, which does not divide its size 4", "a multiple of 3"]),
  ({"data": 0}, ["splits axis 'data' 0 ways"]),
  ({"data": 4}, ["into 4 parts, and the devices form 2 slices", "multiply to 2"]),
])  # fmt: skip
def test_dcn_factors_that_do_not_fit(dcn, texts):
  with pytest.raises(nxp.errors.MeshError) as caught:
    nxp.make_mesh(data=4, fsdp=2, devices=slices(2, 4), dcn=dcn)
  for text in texts:
    assert text in str(caught.value)


def test_slices_without_dcn_are_refused_with_the_call_that_works():
  with pytest.raises(nxp.errors.MeshError, match=r"form 2 slices[\s\S]*dcn=\{'data': 2\}"):
    nxp.make_mesh(data=4, fsdp=2, devices=slices(2, 4))


def test_what_is_not_a_mesh():
  with pytest.raises(nxp.errors.MeshError, match=r"\{'data': 8\} is not a mesh"):
    is_explicit({"data": 8})
