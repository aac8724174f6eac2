"""Leaves as plain arrays that any array store can hold, and back.

Typed PRNG keys are stored as their key data, dtypes that array stores lack as integers of the same bits,
arrays without elements in the manifest alone; numbers, strings, booleans and None as JSON values.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from nnx_parallel.core.nodes import is_key, key_dtype, key_implementation
from nnx_parallel.errors import CheckpointError

Array: TypeAlias = "jax.Array | np.ndarray[Any, Any]"
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

PLAIN, EMPTY, BITS, SMALL = "plain", "empty", "bits", "small"
_FLOAT, _TUPLE = "__float__", "__tuple__"
_DEEPEST = 100

_STORED_AS_IS = frozenset(
  {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
  | {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
)


def is_array(leaf: object) -> bool:
  """Whether a leaf is stored as an array; everything else must be a JSON value."""
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def plain_array(leaf: Array | np.generic, *, path: str) -> Array:
  """A leaf as a plain array in native byte order; a `jax.Array` stays as it is."""
  if isinstance(leaf, jax.Array):
    return leaf
  if isinstance(leaf, np.ma.MaskedArray):
    fix = 'save two arrays: {"values": x.filled(0), "mask": np.ma.getmaskarray(x)}.'
    raise CheckpointError(f"cannot save {path}: it is a masked array, and its mask would be lost.", fix=fix)
  array = np.asarray(leaf)
  return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def dtype_name(dtype: DTypeLike) -> str:
  """`"float32"`, or `"key<fry>"` for typed PRNG keys."""
  return str(dtype) if is_key(dtype) else str(np.dtype(dtype))


def encoding_of(shape: tuple[int, ...], dtype: DTypeLike, *, path: str) -> str:
  """Names the encoding of an array: `plain`, `empty`, `bits`, `small` or `key:<implementation>`."""
  if is_key(dtype):
    return key_encoding(dtype) if 0 not in shape else EMPTY
  dtype = np.dtype(dtype)
  if dtype != np.bool_ and not jnp.issubdtype(dtype, jnp.number):
    fix = 'keep it out of the module, or pass it as JSON: extra={"notes": ...}.'
    raise CheckpointError(f"cannot save {path}: an array of dtype {dtype} is not numeric.", fix=fix)
  if 0 in shape:
    return EMPTY
  if dtype.name in _STORED_AS_IS:
    return PLAIN
  bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
  if bits not in (2, 4, 8):  # long doubles, and floats of 6 bits
    other = "complex128" if dtype.kind == "c" else "float64" if bits > 8 else "float32"
    raise CheckpointError(
      f"cannot save {path}: jax has no arrays of dtype {dtype} that could be restored.",
      fix=f"convert it first: array.astype(np.{other}).",
    )
  return SMALL if bits < 8 else BITS


def encode(leaf: Array, encoding: str) -> Array:
  """The array that is stored for a leaf with one or more elements; `decode` undoes it."""
  if encoding.startswith("key:"):
    return jax.random.key_data(leaf)
  if encoding == PLAIN:
    return leaf
  if encoding == SMALL and jnp.issubdtype(leaf.dtype, jnp.integer):
    return leaf.astype(_word(leaf.dtype))
  if isinstance(leaf, np.ndarray):
    return leaf.view(np.uint8)
  bits = jnp.uint8 if encoding == BITS else jnp.uint4
  return jax.lax.bitcast_convert_type(leaf, bits).astype(jnp.uint8)


def decode(stored: Array, encoding: str, dtype: str) -> Array:
  """Gives back the leaf from the array that was stored for it."""
  if encoding.startswith("key:"):
    return jax.random.wrap_key_data(jnp.asarray(stored), impl=encoding.removeprefix("key:"))
  if encoding == PLAIN:
    return stored
  wanted = jnp.dtype(dtype)
  if encoding == SMALL and jnp.issubdtype(wanted, jnp.integer):
    return stored.astype(wanted)
  if isinstance(stored, np.ndarray):
    return stored.view(wanted)
  return jax.lax.bitcast_convert_type(stored if encoding == BITS else stored.astype(jnp.uint4), wanted)


def stored_form(
  shape: tuple[int, ...], dtype: DTypeLike, encoding: str, sharding: Sharding | None
) -> jax.ShapeDtypeStruct:
  """The global shape, dtype and sharding under which a leaf is stored and read."""
  if not encoding.startswith("key:"):
    word = dtype if encoding == EMPTY else np.dtype(dtype if encoding == PLAIN else _word(dtype))
    return jax.ShapeDtypeStruct(shape, word, sharding=sharding)
  data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
  if isinstance(sharding, NamedSharding):
    # The words of a key are a trailing dim that is not split.
    spec = PartitionSpec(*sharding.spec)
    sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


@functools.lru_cache(maxsize=256)
def stored_words(dtype: str, encoding: str) -> tuple[tuple[int, ...], int]:
  """The dims of a stored array after the leaf's, and the bytes of its elements."""
  has_keys = dtype.startswith("key<")
  if has_keys and encoding == EMPTY:
    return (), 0
  kind = key_dtype(encoding.removeprefix("key:")) if has_keys else np.dtype(dtype)
  try:
    right = encoding_of((), kind, path=dtype)
  except CheckpointError as error:
    raise ValueError(error.what) from error
  if encoding == EMPTY:
    return (), 0
  if encoding != right or dtype_name(kind) != dtype:
    raise ValueError(f"{dtype} as {encoding}")
  form = stored_form((), kind, encoding, None)
  return form.shape, form.dtype.itemsize


def check_json(value: object, *, path: str, depth: int = 0) -> Json:
  """`value` as JSON for `read_json`; infinities, NaN and tuples become dicts with one reserved name."""
  if depth > _DEEPEST:
    raise CheckpointError(f"cannot save {path[:100]}...: it is nested too deeply.", fix="make it flatter.")
  if isinstance(value, np.generic):
    value = value.item()
  if value is None or isinstance(value, (bool, str, int)):
    return value
  if isinstance(value, float):
    return value if np.isfinite(value) else {_FLOAT: repr(value)}
  if isinstance(value, list) or type(value) is tuple:
    items = [check_json(inner, path=f"{path}[{index}]", depth=depth + 1) for index, inner in enumerate(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return items if isinstance(value, list) else {_TUPLE: items}
  if isinstance(value, dict) and all(isinstance(key, str) for key in value):  # pyright: ignore[reportUnknownVariableType]
    fields: dict[str, object] = value  # pyright: ignore[reportUnknownVariableType]
    if fields.keys() not in ({_FLOAT}, {_TUPLE}):
      return {key: check_json(inner, path=f"{path}.{key}", depth=depth + 1) for key, inner in fields.items()}
    what, fix = f"a dict with the single name {next(iter(fields))!r} is reserved", "rename it."
  else:
    what = f"a {type(value).__name__} is neither an array nor a JSON value"
    fix = "convert it to arrays, numbers, text, lists or dicts with text keys."
  raise CheckpointError(f"cannot save {path}: {what}.", details=f"value: {value!r}"[:200], fix=fix)


def read_json(value: Json, depth: int = 0) -> Any:
  """Undoes `check_json`."""
  if depth > 2 * _DEEPEST:  # a tuple takes two levels
    raise ValueError("values are nested too deeply")
  if isinstance(value, dict):
    if value.keys() == {_FLOAT}:
      return float(str(value[_FLOAT]))
    if value.keys() == {_TUPLE} and isinstance(items := value[_TUPLE], list):
      return tuple(read_json(inner, depth + 2) for inner in items)
    return {key: read_json(inner, depth + 1) for key, inner in value.items()}
  if isinstance(value, list):
    return [read_json(inner, depth + 1) for inner in value]
  return value


def key_encoding(dtype: DTypeLike) -> str:
  """`key:threefry2x32` and the like, for the dtype of typed PRNG keys."""
  return f"key:{key_implementation(dtype)}"


def _word(dtype: DTypeLike) -> Any:
  return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
