"""Refuses arguments of public functions that are not what their annotations say, before anything else runs."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import io
import numbers
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.core.given import is_one_of
from nnx_parallel.core.text import with_article
from nnx_parallel.errors import NnxParallelError

F = TypeVar("F", bound=Callable[..., Any])


def checked(error: type[NnxParallelError], /, **least: int) -> Callable[[F], F]:
  """Makes a function, or the constructor of a class, raise `error` for arguments of other types.

  `least` has the smallest numbers that arguments may be. What an annotation does not say, and types of
  other libraries that only behave like a class, the function still has to look at.

  Example:
    >>> from nnx_parallel.errors import TrainError
    >>> @checked(TrainError, count=1)
    ... def repeat(text: str, count: int = 1) -> str:
    ...   '''Repeats.
    ...
    ...   Args:
    ...     count: how often.
    ...   '''
    ...   return text * count
    >>> repeat("a", count=0)
    Traceback (most recent call last):
    nnx_parallel.errors.TrainError: repeat got count=0.
      count: int, at least 1
      Fix: count: how often.
  """

  def decorate(function: Any) -> Any:
    if inspect.isclass(function):
      made: Any = function
      made.__init__ = _wrapped(made.__init__, function, error, least)
      return made
    return _wrapped(function, function, error, least)

  return decorate


def _wrapped(function: Any, documented: Any, error: type[NnxParallelError], least: Mapping[str, int]) -> Any:
  parameters = functools.cache(lambda: _parameters(function))

  @functools.wraps(function)
  def wrapper(*args: Any, **keywords: Any) -> Any:
    signature, kinds = parameters()
    try:
      given = signature.bind(*args, **keywords).arguments
    except TypeError:  # Python says it best
      return function(*args, **keywords)
    for name, value in given.items():
      kind = kinds.get(name, Any)
      several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
      for x in value if several else (value,):
        if not fits(x, kind) or (name in least and isinstance(x, numbers.Real) and not x >= least[name]):
          raise _refusal(documented, error, signature.parameters[name], x, least.get(name))
    return function(*args, **keywords)

  return wrapper


def _parameters(function: Any) -> tuple[inspect.Signature, dict[str, Any]]:
  """The signature of a function, and the types of its parameters, of those that can be looked up."""
  inner, signature = inspect.unwrap(function), inspect.signature(function)
  kinds: dict[str, Any] = {}
  for name, parameter in signature.parameters.items():
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
      kinds[name] = _evaluated(parameter.annotation, inner.__globals__)
  return signature, kinds


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
  text = annotation if isinstance(annotation, str) else ""
  if "DTypeLike" in text:
    return DTYPE if "None" not in text else DTYPE | None
  try:
    return eval(text, names) if text else annotation
  except (NameError, TypeError):  # only a type checker imports it
    return Any


class DTYPE:
  """Stands for what names a dtype."""


def fits(value: object, kind: Any) -> bool:
  """Whether a value is what an annotation says, as far as that can be told.

  Example:
    >>> from collections.abc import Sequence
    >>> fits(3, int | None), fits(True, int), fits("ab", Sequence[str]), fits(["ab"], Sequence[str])
    (True, False, False, True)
  """
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if kind is None or kind is types.NoneType:
    return value is None
  if origin in (typing.Union, types.UnionType):
    return any(fits(value, one) for one in args)
  if origin is Literal:
    return is_one_of(value, args)
  if kind is DTYPE:
    return _is_dtype(value)
  own = origin if inspect.isclass(origin) else kind
  if not inspect.isclass(own) or own is object or getattr(own, "_is_protocol", False):
    return True
  if own in _NUMBERS:
    return isinstance(value, _NUMBERS[own]) and (own is bool or not isinstance(value, bool | np.bool_))
  if own in (jax.Array, np.ndarray):
    return hasattr(value, "shape") and getattr(getattr(value, "dtype", None), "kind", "V") not in "OSUMm"
  if own is nnx.Module:
    return isinstance(value, nnx.Pytree)
  if not isinstance(value, own):
    return False
  if own is not str and isinstance(value, str | bytes | io.IOBase) and issubclass(own, collections.abc.Iterable):
    return False
  return _items_fit(value, own, args)


_NUMBERS: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, bool: bool | np.bool_}


def _items_fit(value: Any, own: Any, args: tuple[Any, ...]) -> bool:
  """Whether the items of a container fit; an iterator is not consumed."""
  if issubclass(own, Mapping) and len(args) == 2:
    return all(fits(key, args[0]) and fits(x, args[1]) for key, x in value.items())
  if own is tuple:
    same = len(args) == 2 and args[1] is ...
    kinds = args[:1] * len(value) if same else args
    return not args or (len(kinds) == len(value) and all(map(fits, value, kinds)))
  listed = isinstance(value, list | tuple | set | frozenset | np.ndarray)
  if listed and len(args) == 1 and issubclass(own, collections.abc.Iterable) and args[0] is not Any:
    return all(fits(x, args[0]) for x in value)
  return True


def _is_dtype(value: Any) -> bool:
  try:
    return value is not None and not isinstance(value, jax.Array | np.ndarray) and jnp.dtype(value) is not None
  except TypeError:
    return False


def _refusal(
  function: Any, error: type[NnxParallelError], parameter: inspect.Parameter, value: object, least: int | None
) -> NnxParallelError:
  name, annotation = parameter.name, parameter.annotation
  said = f"{annotation if isinstance(annotation, str) else getattr(annotation, '__name__', annotation)}"
  limit = "" if least is None else f", at least {least}"
  kind = "" if value is None or isinstance(value, (bool, int, float)) else f" ({with_article(type(value).__name__)})"
  told = re.search(rf"^ +\*?{name}: (.+?)(?:\.\s|;|:|\n\n|\n +\*{{0,2}}\w+: )", f"{inspect.getdoc(function)}\n\n", re.M | re.S)
  fix = " ".join(told[1].split()).rstrip(".") + "." if told else f"see help({function.__qualname__})."
  return error(
    f"{function.__qualname__} got {name}={reprlib.repr(value)}{kind}.",
    details=f"{name}: {said}{limit}",
    fix=f"{name}: {fix}",
  )
