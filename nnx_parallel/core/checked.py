"""The edge of public functions: what their arguments may be, and what of a traceback a user sees."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import io
import numbers
import os
import re
import reprlib
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.core.nodes import is_key
from nnx_parallel.core.text import with_article
from nnx_parallel.errors import NnxParallelError, NnxParallelWarning

F = TypeVar("F", bound=Callable[..., Any])


def check_arguments(error: type[NnxParallelError], /, *own: str, **limits: int | range) -> Callable[[F], F]:
  """Makes a function, or the constructor of a class, raise `error` for arguments of other types."""

  # `own` are arguments of which the function itself says more, as `check_plan` does of a plan. `limits` has
  # the smallest numbers that arguments may be, or their range. Numbers of NumPy become Python's. What no
  # annotation says, such as shapes and keys of dicts, the function still has to look at.
  def decorate(function: Any) -> Any:
    if inspect.isclass(function):
      made: Any = function
      made.__init__ = _wrap(made.__init__, error, own, limits)
      return made
    return _wrap(function, error, own, limits)

  return decorate


def _wrap(
  function: Any, error: type[NnxParallelError], own: Collection[str], limits: Mapping[str, int | range]
) -> Any:
  parameters = functools.cache(lambda: _parameters(function, own))

  @functools.wraps(function)
  def wrapper(*args: Any, **keywords: Any) -> Any:
    signature, kinds = parameters()
    try:
      bound = signature.bind(*args, **keywords)
    except TypeError:  # Python says it best
      return function(*args, **keywords)
    for name, kind in kinds.items():
      if name not in bound.arguments:
        continue
      value, parameter = bound.arguments[name], signature.parameters[name]
      for x in _values(value, parameter):
        if not fits(x, kind) or not _is_within(x, limits.get(name)):
          documented: Any = type(args[0]) if function.__name__ == "__init__" else function
          raise _refusal(documented, error, parameter, x, limits.get(name))
      if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        bound.arguments[name] = _as_python(value, kind if isinstance(kind, tuple) else (kind,))
    return function(*bound.args, **bound.kwargs)

  return shorten_traceback(wrapper)


def shorten_traceback(function: F) -> F:
  """Makes our errors end at the call of a function, or of a class: of the frames below, the user's stay."""
  # A message says what failed and where; ten frames of this package and of jax above it say nothing to a
  # user. `JAX_TRACEBACK_FILTERING=off` shows them all, as for errors of jax.
  if inspect.isclass(function):
    made: Any = function
    made.__init__ = shorten_traceback(made.__init__)
    return made

  @functools.wraps(function)
  def call(*args: Any, **keywords: Any) -> Any:
    try:
      return function(*args, **keywords)
    except NnxParallelError as error:
      if jax.config.jax_traceback_filtering != "off":
        error.__traceback__ = _frames_of_user(error.__traceback__)
      raise

  return call  # pyright: ignore[reportReturnType]


def _frames_of_user(trace: types.TracebackType | None) -> types.TracebackType | None:
  frames: list[types.TracebackType] = []  # not by recursion: the user's code may be as deep as Python allows
  while trace is not None:
    frames += [] if _is_hidden(trace.tb_frame) else [trace]
    trace = trace.tb_next
  kept: types.TracebackType | None = None
  for at in reversed(frames):
    kept = types.TracebackType(kept, at.tb_frame, at.tb_lasti, at.tb_lineno)
  return kept


def warn(message: str) -> None:
  """Warns (`NnxParallelWarning`) at the user's line: the last frame that a traceback of ours would show."""
  frame, level = inspect.currentframe(), 0
  while frame is not None and _is_hidden(frame):
    frame, level = frame.f_back, level + 1
  warnings.warn(message, NnxParallelWarning, stacklevel=level + 1)


def _is_hidden(frame: types.FrameType) -> bool:
  return str(frame.f_globals.get("__name__")).split(".")[0] in _HIDDEN


_HIDDEN = frozenset(("concurrent", "contextlib", "flax", "functools", "jax", "nnx_parallel", "threading"))


def _values(value: Any, parameter: inspect.Parameter) -> Iterable[Any]:
  if parameter.kind is parameter.VAR_KEYWORD:
    return value.values()
  return value if parameter.kind is parameter.VAR_POSITIONAL else (value,)


def _as_python(value: Any, kinds: tuple[Any, ...]) -> Any:
  """A number as an argument of these kinds: of NumPy as Python's, and a float where no int is meant."""
  if isinstance(value, np.generic) and any(kind in _NUMBERS for kind in kinds):
    value = value.item()
  return float(value) if type(value) is int and float in kinds and int not in kinds else value


def _is_within(x: object, limit: int | range | None) -> bool:
  if limit is None or not isinstance(x, int | float | np.number):
    return True
  return int(x) in limit if isinstance(limit, range) else bool(x >= limit)


def _parameters(function: Any, own: Collection[str]) -> tuple[inspect.Signature, dict[str, Any]]:
  """The signature of a function, and the types of its parameters, of those that can be looked up."""
  inner, signature = inspect.unwrap(function), inspect.signature(function)
  kinds: dict[str, Any] = {}
  for name, parameter in signature.parameters.items():
    if parameter.annotation is parameter.empty or name in own:
      continue
    kind = _evaluate(parameter.annotation, inner.__globals__)
    if parameter.kind is not parameter.VAR_KEYWORD or kind in _NUMBERS:
      kinds[name] = kind
  return signature, kinds


class _Named(NamedTuple):
  """A type whose annotation says less than it means."""

  fits: Callable[[Any], bool]


def is_dtype(value: Any) -> bool:
  """Whether a value names a dtype."""
  if value is None or (not isinstance(value, str | type | np.dtype) and not hasattr(value, "dtype")):
    return False
  try:
    return not isinstance(value, jax.Array | np.ndarray | np.generic) and jnp.dtype(value).kind not in "OSUMm"
  except TypeError:
    return False


def _is_filter(value: Any) -> bool:
  try:
    return bool(nnx.filterlib.to_predicate(value))
  except (TypeError, ValueError):
    return False


def _is_model(value: Any) -> bool:
  several = [*value.values()] if isinstance(value, dict) else value
  items = several if isinstance(several, tuple | list) else [value]
  return bool(items) and all(isinstance(x, nnx.Pytree) for x in items)


def is_array(value: Any) -> bool:
  """Whether a value has a shape and a dtype of numbers."""
  dtype = getattr(value, "dtype", None)
  return hasattr(value, "shape") and dtype is not None and getattr(dtype, "kind", "V") not in "OSUMm"


_NAMED = {
  "AnyArray": _Named(lambda x: isinstance(x, numbers.Number) or is_array(x)),
  "DTypeLike": _Named(is_dtype),
  "Model": _Named(_is_model),
  "Only": _Named(lambda x: fits(x, set[str] | frozenset[str]) or _is_filter(x)),
  "Optimizers": _Named(_is_model),
  "nnx.filterlib.Filter": _Named(_is_filter),
  "os.PathLike[str]": _Named(lambda x: isinstance(x, str | os.PathLike) and bool(os.fspath(x))),
}


def _evaluate(annotation: Any, names: dict[str, Any]) -> Any:
  """The type that an annotation means: of several, a tuple; `Any` if only a type checker knows it."""
  if not isinstance(annotation, str):
    return annotation
  kinds: list[Any] = []
  for text in re.split(r" \| (?![^\[]*\])", annotation):
    if re.match(r"(nxp\.)?Plan\b", text):
      return Any
    try:
      kind = _NAMED.get(text) or eval(text, names)
    except (NameError, TypeError, AttributeError):
      kind = Any
    kinds.append(Any if isinstance(kind, str) else kind)
  if _NAMED["os.PathLike[str]"] in kinds:
    kinds = [kind for kind in kinds if kind is not str]
  return kinds[0] if len(kinds) == 1 else tuple(kinds)


def is_one_of(value: object, options: Sequence[object]) -> bool:
  """Whether a value is one of some words or numbers; an array, whose comparisons are arrays, is none."""
  return any(value is option or (type(value) is type(option) and value == option) for option in options)


def are_texts(value: object) -> bool:
  """Whether a value is a tuple, list or set of texts."""
  return isinstance(value, (tuple, list, set, frozenset)) and all(type(text) is str for text in value)  # pyright: ignore[reportUnknownVariableType]


def fits(value: object, kind: Any) -> bool:
  """Whether a value is what an annotation says, as far as that can be told; of a tuple, one of them."""
  if isinstance(kind, _Named):
    return kind.fits(value)
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if kind is None or kind is types.NoneType:
    return value is None
  if isinstance(kind, tuple) or origin in (typing.Union, types.UnionType):
    return any(fits(value, one) for one in (kind if isinstance(kind, tuple) else args))
  if origin is Literal:
    return is_one_of(value, args)
  own = origin if inspect.isclass(origin) else kind
  if own in (Any, object) or not inspect.isclass(own):
    return True
  if getattr(own, "_is_protocol", False):
    return all(hasattr(value, name) for name in vars(own) if not name.startswith("_"))
  if own in _NUMBERS:
    if own is float and isinstance(value, jax.Array):
      return not value.ndim
    return isinstance(value, _NUMBERS[own]) and (own is bool or not isinstance(value, bool | np.bool_))
  if own in (jax.Array, np.ndarray):
    return is_array(value)
  if own is nnx.Module:
    return isinstance(value, nnx.Pytree)
  if not isinstance(value, own):
    return False
  several = issubclass(own, _SEVERAL) and own not in (str, bytes)
  if several and isinstance(value, str | bytes | io.IOBase):
    return False
  return _items_fit(value, own, args)


_SEVERAL = collections.abc.Iterable, collections.abc.Container
_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, bool: bool | np.bool_}


def _items_fit(value: Any, own: Any, args: tuple[Any, ...]) -> bool:
  """Whether the items of a container fit; an iterator is not consumed."""
  if issubclass(own, Mapping) and len(args) == 2:
    return all(fits(key, args[0]) and fits(x, args[1]) for key, x in value.items())
  if own is tuple:
    same = len(args) == 2 and args[1] is ...
    kinds = args[:1] * len(value) if same else args
    return not args or (len(kinds) == len(value) and all(map(fits, value, kinds)))
  listed = isinstance(value, list | tuple | set | frozenset | dict | np.ndarray | jax.Array)
  if listed and len(args) == 1 and issubclass(own, _SEVERAL) and args[0] is not Any:
    return all(fits(x, args[0]) for x in value)
  return True


def is_random_key(x: Any) -> bool:
  """Whether an array is a typed or a raw PRNG key."""
  return is_key(x.dtype) or (x.dtype == jnp.uint32 and x.shape in ((2,), (4,)))


def find_no_array(error: type[NnxParallelError], name: str, tree: Any) -> NnxParallelError | None:
  """The error for the first leaf of a tree that no program can take: a text, an object, a large number."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    dtype = getattr(leaf, "dtype", None)
    if isinstance(leaf, int) and not jax.config.jax_enable_x64 and not -(2**31) <= leaf < 2**31:
      kind = "a number beyond int32"
    elif isinstance(leaf, bool | int | float | complex) or hasattr(leaf, "__jax_array__") or is_array(leaf):
      continue
    else:
      kind = with_article(type(leaf).__name__) + ("" if dtype is None else f" of {dtype}")
    return error(
      f"{name}{jax.tree_util.keystr(path)} is {kind}, which no program can take.",
      details=f"value {reprlib.repr(leaf)}",
      fix="arrays of numbers only; keep names and texts outside of them.",
    )
  return None


def check_arrays(error: type[NnxParallelError], name: str, tree: Any) -> None:
  """Raises the error of `find_no_array`, if there is one."""
  if (found := find_no_array(error, name, tree)) is not None:
    raise found


def _refusal(
  function: Any,
  error: type[NnxParallelError],
  parameter: inspect.Parameter,
  value: object,
  limit: int | range | None,
) -> NnxParallelError:
  name, annotation = parameter.name, parameter.annotation
  said = f"{annotation if isinstance(annotation, str) else getattr(annotation, '__name__', annotation)}"
  names = vars(sys.modules[function.__module__])
  for part in said.split(" | "):
    if typing.get_origin(names.get(part)) is Literal:  # a name for some texts: these
      said = said.replace(part, " or ".join(map(repr, typing.get_args(names[part]))))
  said = re.sub(r"Literal\[([^]]*)\]", lambda texts: texts[1].replace(", ", " or "), said)
  bounds = f"{limit[0]} to {limit[-1]}" if isinstance(limit, range) else f"at least {limit}"
  said += "" if limit is None else f", {bounds}"
  plain = value is None or isinstance(value, bool | int | float)
  kind = "" if plain else f" ({with_article(type(value).__name__)})"
  # The first clause of its text under `Args:` or `Attributes:`, "count: how often; ...", says what it means.
  end = r"(?:\.\s|;|:|\n\n|\n +\*{0,2}\w+: )"
  told = re.search(rf"^ +\*?{name}: (.+?){end}", f"{inspect.getdoc(function)}\n\n", re.MULTILINE | re.DOTALL)
  fix = " ".join(told[1].split()).rstrip(".") + "." if told else f"see help({function.__qualname__})."
  return error(
    f"{function.__qualname__} got {name}={reprlib.repr(value)}{kind}.",
    details=f"{name}: {said}",
    fix=f"{name}: {fix}",
  )
