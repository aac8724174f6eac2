"""Hears when an attribute of a live module is assigned, so that a step need not look at all of them.

A look at every attribute (`Watch.looks_same` in `binding.py`, the plain reference) costs a tenth of a small
step. But each `module.name = value` first asks flax whether the module may be changed here, and flax asks the
module's `TraceState`. One that counts how often it is asked tells of every assignment in any watched module
at the price of comparing two integers; what the assignment changed is then for the look to find.

In the same way `del module.name` asks the module's table of attributes for its items, and a table that counts
tells of every deletion.

Not heard are lists and dicts, and what goes past the module's own `__setattr__` and `__delattr__`:
`vars(module)["name"] = value`, `object.__setattr__`. `Watch` looks for those.

Compilations are heard through `jax.monitoring`, in the same counter, from the first train step on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView
from typing import Any

import jax.monitoring
from flax import nnx

# flax does not document it: where it is gone, nothing can be heard, and every step looks.
TraceState: Any = getattr(getattr(nnx, "tracers", None), "TraceState", object)
Table: Any = type(getattr(nnx.List, "_pytree__nodes", object()))

heard = [0]
"""How many assignments to and deletions of attributes of heard modules this process made, or a few more.

Compilations count too, so that one comparison tells a step that there is nothing to look into. A list and not
a function, which would cost a tenth of what it saves.
"""


def _hear_compilation(event: str, duration_secs: float, **_: str | int) -> None:
  del duration_secs
  if event == "/jax/core/compile/backend_compile_duration":  # recorded for what the cache on disk gives, too
    heard[0] += 1


@functools.cache
def hear_compilations() -> None:
  """Counts compilations from now on, in `heard[0]`; once, however often it is called."""
  jax.monitoring.register_event_duration_secs_listener(_hear_compilation)


class _Counting(TraceState):
  """A trace state that answers like the one it replaces, and counts the questions."""

  __slots__ = ()

  def is_valid(self) -> bool:
    heard[0] += 1
    return super().is_valid()

  def __reduce__(self) -> Any:
    return TraceState, ()  # a pickled or copied module is nobody's to watch


class _CountingTable(Table):
  """A table of attributes (name -> whether it is data) that counts who asks for its items."""

  def items(self) -> ItemsView[str, bool]:
    heard[0] += 1
    return super().items()

  def __reduce__(self) -> Any:
    return Table, (dict(self),)


def hear(module: nnx.Pytree) -> bool:
  """Counts assignments to and deletions of attributes of this module from now on, in `heard[0]`.

  Args:
    module: a live module; it behaves as before.

  Returns:
    Whether it can be heard: not if its class assigns in a way of its own, or flax in another way than the
    supported versions.

  Example:
    >>> from flax import nnx
    >>> from nnx_parallel.train.edits import heard, hear
    >>> model = nnx.Dropout(0.1, deterministic=False)
    >>> hear(model), (before := heard[0]) >= 0
    (True, True)
    >>> model.eval()
    >>> heard[0] > before
    True
  """
  # In this order: a flax without the methods that `_plain` compares does not ask.
  return _flax_asks() and _plain(type(module)) and _install(module)


def _install(module: nnx.Pytree) -> bool:
  state: Any = vars(module).get("_pytree__state")
  trace: Any = getattr(state, "_trace_state", None)
  table: Any = vars(module).get("_pytree__nodes")
  if type(trace) not in (TraceState, _Counting) or type(table) not in (Table, _CountingTable):
    return False
  if not all(name in table for name in vars(module)):
    return False  # the deletion of a name that the table lacks asks nothing
  if type(trace) is TraceState:
    counting: Any = _Counting.__new__(_Counting)
    counting._jax_trace = trace.jax_trace  # the level at which it was made, perhaps not this one
    state._trace_state = counting
  if type(table) is Table:
    object.__setattr__(module, "_pytree__nodes", _CountingTable(table))
  return True


@functools.cache
def _plain(kind: type) -> bool:
  names = ("__setattr__", "__delattr__", "_setattr", "_check_valid_context")
  return all(getattr(kind, name, None) is getattr(nnx.Pytree, name) for name in names)


@functools.cache
def _flax_asks() -> bool:
  """Tries it on a module, because what is counted is flax's own business."""
  parts = (
    (nnx.Pytree, ("_setattr", "_check_valid_context")),
    (TraceState, ("_jax_trace", "jax_trace", "is_valid")),
    (Table, ("__contains__", "__iter__", "items", "update")),
  )
  if not all(hasattr(owner, name) for owner, names in parts for name in names):
    return False
  probe = nnx.List([0])
  if not _install(probe):
    return False
  tries: tuple[Callable[[], Any], ...] = (
    lambda: probe.__setitem__(0, 1),
    lambda: setattr(probe, "added", 1),
    lambda: probe.append(2),
    lambda: delattr(probe, "0"),
  )
  return all(_is_heard(edit, probe) for edit in tries)


def _is_heard(edit: Callable[[], Any], module: nnx.Pytree) -> bool:
  before = heard[0]
  edit()
  # What the edit replaced counts no more: a step looks after it has heard something, and installs anew.
  return heard[0] > before and _install(module)
