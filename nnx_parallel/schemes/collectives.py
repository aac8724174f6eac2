"""For code written with `shard_map`: modules in it, parameter gathers, and kernels.

`jax.shard_map` takes arrays and a spec for each. `map_shards` takes modules, optimizers and batches, and
reads their specs from the plan. `map_kernel` takes a kernel and derives its specs from logical names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from nnx_parallel.core.axes import Entry, axes_by_dim
from nnx_parallel.core.checked import check_arguments
from nnx_parallel.core.mesh import check_active, own_mesh
from nnx_parallel.core.nodes import path_str, variables
from nnx_parallel.core.shards import on_shards
from nnx_parallel.core.text import few
from nnx_parallel.core.types import PyTree
from nnx_parallel.errors import SchemeError
from nnx_parallel.layout.constrain import active_mesh
from nnx_parallel.layout.plan import Plan, check_plan

_EQUAL = PartitionSpec()


@check_arguments(SchemeError)
def map_shards(
  f: Callable[..., PyTree],
  plan: Plan,
  *,
  out_specs: PyTree = _EQUAL,
  in_specs: Sequence[PyTree] | None = None,
  check_vma: bool = True,
) -> Callable[..., PyTree]:
  """`nnx.shard_map` with the specs of a plan: `f` runs on each device, on its shards, and calls collectives.

  Variables that `f` changes are written back to the modules and optimizers, in the layout of the plan. Call
  the result under `nnx.jit`.

  Args:
    f: a function of modules and optimizers that `plan` created, and of pytrees of arrays. All mesh axes are
      Manual inside of it, so its arguments are the shards of one device.
    plan: the plan of the modules, the optimizers and the batches.
    out_specs: the specs of the results of `f`, as in `jax.shard_map`; `P()` means that they are equal on all
      devices.
    in_specs: one spec for each argument, as in `jax.shard_map`. If the spec of an argument is None, the plan
      decides: a module or an optimizer has its planned layout, and an array has `plan.batch_spec`. None
      instead of a tuple lets the plan decide for all arguments.
    check_vma: as in `jax.shard_map`.

  Returns:
    A function of the same arguments, which takes global arrays.

  Raises:
    PlanError: `plan` is not a plan.
    SchemeError: at the call, a module or an optimizer does not belong to the plan.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8)
    >>> plan = nxp.plan(init, mesh, nxp.fsdp("data", min_size=8))
    >>> model = nxp.create_sharded_model(plan)
    >>> def mean(model, x):
    ...   full = nxp.parallel.gather_parameters(model, plan, "data")
    ...   return jax.lax.pmean(full(x).mean(), "data"), jax.lax.pmean(model.kernel.size + 0 * x.sum(), "data")
    >>> result, elements = nnx.jit(nxp.parallel.map_shards(mean, plan))(model, jnp.ones((32, 16)))
    >>> bool(jnp.allclose(result, model(jnp.ones((32, 16))).mean())), int(elements)
    (True, 8)
  """
  check_plan(plan, "nxp.parallel.map_shards(f, plan)")
  if inspect.isclass(f):
    raise SchemeError(
      f"map_shards got the class {f.__name__}.", fix="nxp.parallel.map_shards(lambda model, x: ..., plan)"
    )
  _check_specs("out_specs", out_specs)
  _check_specs("in_specs", in_specs)

  @functools.wraps(f)
  def mapped(*args: PyTree) -> PyTree:
    given = tuple(in_specs) if in_specs is not None else (None,) * len(args)
    if len(given) != len(args):
      raise SchemeError(
        f"map_shards has {len(given)} in_specs for {len(args)} arguments.",
        fix="one spec for each argument, None to take the plan's; or leave in_specs out.",
      )
    specs = tuple(_specs(plan, x) if spec is None else spec for x, spec in zip(args, given, strict=True))
    run: PyTree = nnx.shard_map(f, mesh=plan.mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    with own_mesh(plan.mesh):
      check_active(plan.mesh, "of the plan")
      return run(*args)

  return mapped


def _check_specs(name: str, specs: PyTree) -> None:
  leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec | nnx.StateSharding))
  wrong = any(not isinstance(x, PartitionSpec | nnx.StateSharding) for x in leaves)
  if wrong or (not leaves and name == "out_specs"):
    raise SchemeError(
      f"{name}={specs!r:.60} are no specs.", fix=f'{name}=jax.P("data"), a PartitionSpec, or a tree of them.'
    )


def _specs(plan: Plan, x: PyTree) -> PyTree:
  """The specs of an argument."""
  if not isinstance(x, nnx.Module | nnx.Optimizer):
    return jax.tree.map(lambda leaf: plan.batch_spec(jnp.ndim(leaf)), x)
  planned = plan.of("optimizer" if isinstance(x, nnx.Optimizer) else "model")
  if other := variables(x).keys() ^ planned.keys():
    raise SchemeError(
      f"the plan is not for this {type(x).__name__}.",
      details=f"not in both: {few([path_str(path) for path in other])}",
      fix="pass what nxp.create_sharded_model(plan) returned; or in_specs for this argument.",
    )
  specs: PyTree = {path: leaf.spec for path, leaf in planned.items()}
  state: PyTree = nnx.from_flat_state(specs)
  return nnx.StateSharding(state)


@check_arguments(SchemeError)
def gather_parameters(module: nnx.Module, plan: Plan, axis: str | Sequence[str]) -> Any:
  """Returns a view of a module with gathered parameters, whose gradients are means; for `map_shards`.

  A parameter that the plan shards over the axis is gathered. The backward pass of the gather is a
  reduce-scatter, divided by the size of the axis, so each device gets its shard of the mean gradient. The
  gradient of a parameter that is replicated over the axis is the mean over the devices. So each device
  differentiates its own loss, and the result is the gradient of the mean loss in the layout of the plan.

  Args:
    module: the module inside of the `shard_map`, whose arrays are the shards of one device.
    plan: the plan of the module.
    axis: the mesh axis that shards the batch, or several axes, such as `("data", "fsdp")`.

  Returns:
    A module with the same Variables, except that its `nnx.Param`s are gathered.

  Raises:
    SchemeError: the call is not inside a `shard_map` over this axis, the plan does not have a parameter, or a
      dim of a parameter is sharded over `axis` and then over another axis.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init, mesh = lambda: nnx.Linear(16, 3, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8)
    >>> plan = nxp.plan(init, mesh, nxp.fsdp("data", min_size=8))
    >>> model, x = nxp.create_sharded_model(plan), jnp.ones((32, 16))
    >>> own_loss = lambda model, x: (nxp.parallel.gather_parameters(model, plan, "data")(x) ** 2).mean()
    >>> def norm(model, x):
    ...   grads = nnx.grad(own_loss)(model, x)
    ...   return jax.lax.psum((grads.kernel[...] ** 2).sum(), "data")
    >>> wanted = (nnx.grad(lambda model: (model(x) ** 2).mean())(model).kernel[...] ** 2).sum()
    >>> bool(jnp.allclose(nnx.jit(nxp.parallel.map_shards(norm, plan))(model, x), wanted))
    True

  Source: the UvA deep-learning notebooks on training at scale, `gather_params`.
  """
  check_plan(plan, "nxp.parallel.gather_parameters(module, plan, axis)")
  axes = (axis,) if isinstance(axis, str) else tuple(axis)
  for name in axes:
    _check_manual(name)
  graphdef, parameters, rest = nnx.split(module, nnx.Param, ...)
  planned, whole = plan.of("model"), []
  for path, parameter in nnx.to_flat_state(parameters):
    if path not in planned:
      raise SchemeError(
        f"the plan has no parameter {path_str(path)}.", fix="pass the complete module that the plan is for."
      )
    value: jax.Array = parameter.get_raw_value()
    dims = [*axes_by_dim(planned[path].spec, value.ndim)]
    for name in reversed(axes):
      dim = next((dim for dim, entry in enumerate(dims) if name in entry), None)
      if dim is None:
        value = _average(value, name)
        continue
      if dims[dim][-1] != name:
        raise SchemeError(
          f"{path_str(path)} cannot be gathered over {name!r}: dim {dim} is split over {dims[dim]}.",
          fix=f"write {name!r} last in its rule, or gather the axes behind it too, in this order.",
        )
      dims[dim] = dims[dim][:-1]
      value = _gather(value, name, dim)
    whole.append((path, parameter.replace(value)))
  return nnx.merge(graphdef, nnx.from_flat_state(whole), rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
  return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def _scatter(axis: str, dim: int, _: None, g: jax.Array) -> tuple[jax.Array]:
  return (jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True) / jax.lax.axis_size(axis),)


_gather.defvjp(lambda x, axis, dim: (_gather(x, axis, dim), None), _scatter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _average(x: jax.Array, axis: str) -> jax.Array:
  return jax.lax.pcast(x, axis, to="varying")


_average.defvjp(lambda x, axis: (_average(x, axis), None), lambda axis, _, g: (jax.lax.pmean(g, axis),))


def _check_manual(axis: str) -> None:
  try:
    jax.lax.axis_size(axis)
  except NameError as error:
    raise SchemeError(
      f"the code that runs here is not split along {axis!r} by hand.",
      fix="call it in the body of nxp.parallel.map_shards, or of jax.shard_map over that axis.",
    ) from error


@check_arguments(SchemeError)
def map_kernel(
  kernel: Callable[..., PyTree], in_names: Sequence[tuple[Entry, ...]], out_names: Any
) -> Callable[..., PyTree]:
  """Runs a custom kernel on each device's shards; the specs follow from logical names.

  The compiler cannot partition a kernel, such as a Pallas kernel, and would gather its operands. Each dim is
  sharded by its name as in `constrain`, with the rules and the mesh of `use_rules`, of `plan.scope()`, or of
  the step. Without a mesh, the kernel runs as it is. Use None as the name of a dim that the kernel needs in
  full.

  Args:
    kernel: a function of arrays. From the shards of its arguments, it must compute the shards of its global
      result. For gradients, a Pallas kernel needs a `jax.custom_vjp`.
    in_names: one tuple for each argument, with a logical name, a mesh axis or None for each dim.
    out_names: a tuple for the result, with names that `in_names` contains; or a list of tuples for several
      results.

  Returns:
    A function of the same arguments, which takes arrays of global shapes.

  Raises:
    ShardingError: at the call, a name has no rule, or the names do not fit an array.
    SchemeError: `out_names` has a name that no argument has, or a name gets different mesh axes in two
      arguments.

  Example:
    >>> import jax, jax.numpy as jnp, nnx_parallel as nxp
    >>> kernel = lambda x: x / x.sum(-1, keepdims=True)   # of Pallas, usually
    >>> f = nxp.parallel.map_kernel(kernel, [("batch", None)], ("batch", None))
    >>> with nxp.use_rules(nxp.LogicalRules(batch="data"), nxp.make_mesh(data=8)):
    ...   y = f(jnp.ones((16, 4)))
    >>> y.sharding.spec, float(y[0, 0])
    (P('data', None), 0.25)
  """

  @functools.wraps(kernel)
  def mapped(*arrays: PyTree) -> PyTree:
    around = active_mesh(*arrays)
    if around.mesh is None:
      return kernel(*arrays)
    ins = [around.spec(names, x.shape) for names, x in zip(in_names, arrays, strict=True)]
    entries: dict[Entry, object] = {None: None}
    for names, spec in zip(in_names, ins, strict=True):
      for name, entry in zip(names, spec, strict=True):
        if entries.setdefault(name, entry) != entry:
          raise SchemeError(
            f"{name!r} of a kernel is split over {entries[name]} in one argument, over {entry} in another.",
            details=f"shapes {[x.shape for x in arrays]}, names {[*in_names]}",
            fix="give the dims different names, or sizes that the same mesh axes divide.",
          )
    several = isinstance(out_names, list)
    wanted = out_names if several else [out_names]
    if unknown := [name for names in wanted for name in names if name not in entries]:
      raise SchemeError(
        f"the result of a kernel has a dim {unknown[0]!r}, and no argument has.",
        details=f"names {[*in_names]} -> {out_names}",
        fix="name it as the dim of an argument that it is split like; or None if it is replicated.",
      )
    outs = [PartitionSpec(*(entries[name] for name in names)) for names in wanted]
    return on_shards(kernel, around.mesh, ins, tuple(outs) if several else outs[0])(*arrays)

  return mapped
