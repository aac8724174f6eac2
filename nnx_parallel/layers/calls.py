"""Functions around the calls of chosen modules, whose class stays the user's: a model may dispatch on it.

The modules are copies that belong to one trace, as `nnx.merge` makes them. A static attribute of a copy
holds its function, so that each transform of flax (`nnx.scan`, `nnx.vmap`, `nnx.split`) keeps it. While the
body is traced, the `__call__` of the class is one that looks for the attribute:

  def double(call, module, args, kwargs):
    return 2 * call(module, *args, **kwargs)

  with around_calls([(layer, double)]):
    model(x)   # every `layer(h)` in it is `double(type(layer).__call__, layer, (h,), {})`

For a module without the attribute, the call is the original.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

Around = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the original `__call__`, the module and its arguments. It is a static attribute."""

_ATTRIBUTE = "_nxp_call"
_LOCK = threading.Lock()
_DISPATCHED: dict[type, tuple[object, int]] = {}
"""Class -> the `__call__` that it has by itself, and the number of traces that look for the attribute."""


@contextlib.contextmanager
def around_calls(modules: Iterable[tuple[Any, Around]]) -> Generator[None]:
  """Calls these functions in place of the modules, in its body. Other threads may do the same."""
  pairs = [*modules]
  for module, around in pairs:
    vars(module)[_ATTRIBUTE] = around
  try:
    with _dispatch({type(module) for module, _ in pairs}):
      yield
  finally:
    for module, _ in pairs:
      vars(module).pop(_ATTRIBUTE, None)


@contextlib.contextmanager
def _dispatch(kinds: Iterable[type]) -> Generator[None]:
  # The classes that have the `__call__`, not those that inherit it: a model may ask which of them does.
  owners = {owner for kind in kinds for owner in kind.__mro__ if "__call__" in vars(owner)}
  with _LOCK:
    for owner in owners:
      own, count = _DISPATCHED.get(owner, (vars(owner)["__call__"], 0))
      _DISPATCHED[owner] = own, count + 1
      if not count:
        type.__setattr__(owner, "__call__", _dispatcher(own))
  try:
    yield
  finally:
    with _LOCK:
      for owner in owners:
        own, count = _DISPATCHED.pop(owner)
        if count > 1:
          _DISPATCHED[owner] = own, count - 1
        else:
          type.__setattr__(owner, "__call__", own)


def _dispatcher(own: Any) -> Callable[..., object]:
  @functools.wraps(own)
  def __call__(self: object, *args: object, **kwargs: object) -> object:
    def call(module: object, *args: object, **kwargs: object) -> object:
      return (own.__get__(module, type(module)) if hasattr(own, "__get__") else own)(*args, **kwargs)

    around: Around | None = getattr(self, "__dict__", {}).get(_ATTRIBUTE)
    return call(self, *args, **kwargs) if around is None else around(call, self, args, kwargs)

  return __call__
