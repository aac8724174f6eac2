"""Train and eval steps: one compiled program, donated state, pinned layouts, and a module that stays live."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Never, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from nnx_parallel.core.nodes import named_leaves
from nnx_parallel.core.text import few
from nnx_parallel.core.types import AnyArray, Model, Optimizers, PyTree
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.attention import Attention
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, Policy, ScanLayers
from nnx_parallel.layers.pipeline import Pipeline
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.train.binding import check_outside
from nnx_parallel.train.bound import Bound, News
from nnx_parallel.train.loss_call import check_several
from nnx_parallel.train.losses import Metrics
from nnx_parallel.train.options import Gradients, LossFn, StepOptions
from nnx_parallel.train.program import Compile, Structure, is_placed, logger
from nnx_parallel.train.update import keyed, of_loss
from nnx_parallel.train.watch import Watch, objects_in
from nnx_parallel.verify.check_gradients import checked
from nnx_parallel.verify.gradient_check import GradientCheck, merged

_ABSENT: Any = object()
"""Stands for an argument that was not given."""


class _Step:
  """Common to train and eval steps: the bindings to live objects, and the record of compilations."""

  def __init__(self, options: StepOptions):
    self.options = options
    self.layers = LayersUsed()
    self.calls, self._takes_several = 0, False
    self.compiles: list[Compile] = []
    self._bounds: dict[Hashable, Bound] = {}
    self._structures: dict[Hashable, Structure] = {}
    # Two threads may train two models. A signal handler may run a step inside another's.
    self._lock = threading.RLock()

  def _bind(self, model: Model, optimizer: Optimizers = _ABSENT) -> Bound:
    """The step for these objects; made again where an attribute changed since the last call."""
    key = (_identity(model), _identity(optimizer))
    bound = self._bounds.get(key)
    if bound is None or not bound.binding.watch.same():
      roots = {"model": model} if optimizer is _ABSENT else {"model": model, "optimizer": optimizer}
      with self._lock:
        bound = self._bind_again(key, roots, bound)
    return bound

  def _bind_again(self, key: Hashable, roots: dict[str, Model], before: Bound | None) -> Bound:
    reasons = ["other objects than before" if self.compiles else "first call"]
    if before is not None:
      now = Watch(roots)
      reasons = before.binding.watch.changes(now)
      if not reasons:  # other objects of equal value
        before.binding.watch = now
        return before
    _check_objects(roots)
    if "optimizer" in roots:
      check_outside(roots.values())
    bounds = self._bounds
    # A weak reference calls this while the identity of its object, which the key has, is still its own.
    made = Bound(self.options, roots, tuple(reasons), self._structures, lambda _: bounds.pop(key, None))
    bounds[key] = made
    return made

  def rebind(self) -> None:
    """Forgets modules and programs; the next call traverses the module and compiles.

    For the edits that a step does not notice: metadata of a Variable, and changes inside an object that is
    neither a module nor a list or dict.
    """
    self._bounds, self._structures = {}, {}

  def _joined(self, batch: PyTree, more: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """One batch of the arrays that a call gave separately."""
    if not self._takes_several:  # once: a signature takes 10 us to read
      losses = self.options.loss_fn
      check_several(losses.values() if isinstance(losses, Mapping) else [losses], 1 + len(more))
      self._takes_several = True
    return (batch, *more)

  def _done(self, bound: Bound, news: News, batch: PyTree) -> None:
    """After a call: counts it, and adds a compilation to `compiles`, if there was one."""
    if news is not None:
      self._record(bound, Compile(self.calls, news))
      _warn_unplaced(bound.binding.read(), batch)
    self.calls += 1

  def _record(self, bound: Bound, compiled: Compile) -> None:
    self.layers = bound.structure.layers
    self.compiles.append(compiled)
    if len(self.compiles) > 1:
      logger.info("the step was compiled again: %s", compiled)


class TrainStep(_Step):
  """A compiled train step; made by `train_step`.

  Threads may share a step if each has its own models.

  Attributes:
    options: the loss function and the options it was made with.
    calls: the number of steps so far.
    compiles: one entry for each compilation, with its reasons. More than one entry deserves a look.
      Compilations started by `compiled()` are not listed.
    reduction: how the last compiled program reduces gradients between replicas.
    layers: the layers found when the step was last compiled or lowered, which of them are recomputed or
      scanned, and why others are not; print it.
  """

  def __init__(self, options: StepOptions):
    super().__init__(options)
    self.reduction = ""

  def __call__(
    self, model: Model, optimizer: Optimizers = _ABSENT, batch: PyTree = _ABSENT, *more: object
  ) -> Metrics:
    """Updates `model` and `optimizer` in place with the gradients of a batch.

    Args:
      model: a live module; or a tuple or dict of modules, which is passed to the loss function as it is.
      optimizer: its `nnx.Optimizer`; for several models, a tuple or dict with the same keys. A model whose
        key has no optimizer is not trained.
      batch: a pytree of global arrays with the examples on dim 0. In a single-process job, host arrays are
        laid out by the plan of the models, as `shard_batch` does.
      *more: the rest of a batch of several arrays, for a loss function that takes each as an argument:
        `step(model, optimizer, x, y)` is `step(model, optimizer, (x, y))`.

    Returns:
      Metrics on device, without waiting: `loss`, and the metrics of the loss function, as means over the
        batch.

    Raises:
      TrainError: a loss, batch or module that a step cannot use; the message has the Variable's path.
      ShardingError: an array of the host that the plan's batch axes cannot split evenly.
    """
    if batch is _ABSENT:
      raise TrainError(
        "a train step needs the model, its optimizer and a batch.",
        fix="metrics = step(model, optimizer, batch)",
      )
    if more:
      batch = self._joined(batch, more)
    bound = self._bind(model, optimizer)
    batch = bound.placed(batch)
    metrics, news = bound.update(batch)
    self._done(bound, news, batch)
    return metrics

  def _record(self, bound: Bound, compiled: Compile) -> None:
    super()._record(bound, compiled)
    self.reduction = bound.structure.reduction
    _warn_unplanned(bound.unplanned())

  def lower(self, model: Model, optimizer: Optimizers = None, batch: PyTree = None) -> jax.stages.Lowered:
    """Lowers the step for these arguments, which may be abstract, without running it.

    Args:
      model: live modules; or a plan with an optimizer, which may be on an abstract mesh. Its rules are in
        scope for `constrain`, unless the caller has other rules in scope.
      optimizer: the live optimizer; None with a plan.
      batch: a pytree of arrays, or of `ShapeDtypeStruct`s with shardings.

    Returns:
      A `jax.stages.Lowered`; `.compile()` gives memory and cost.

    Raises:
      TrainError: a plan without an optimizer.
    """
    scope = contextlib.nullcontext()
    if isinstance(model, Plan):
      scope = default_scope(model.activation_rules)
      model, optimizer = _abstract(model)
    roots = {"model": model, "optimizer": optimizer}
    bound = Bound(self.options, roots, (), {})
    with scope:
      traced = bound.traced(batch)
    self.layers = bound.structure.layers
    if isinstance(bound.binding.mesh, AbstractMesh):
      return traced.lower(lowering_platforms=(jax.default_backend(),))
    return traced.lower()

  def compiled(self, model: Model, optimizer: Optimizers, batch: PyTree) -> jax.stages.Compiled:
    """The program that runs for these arguments; after a call with them, it is not compiled again.

    Args:
      model: as in a call.
      optimizer: as in a call.
      batch: as in a call.

    Returns:
      A `jax.stages.Compiled`: its text, memory and cost.
    """
    bound = self._bind(model, optimizer)
    traced = bound.traced(bound.placed(batch))
    self.layers = bound.structure.layers
    return traced.lower().compile()

  def check_gradients(
    self,
    model: Model,
    optimizer: Optimizers,
    batch: PyTree,
    *,
    seed: int = 0,
    directions: int | None = None,
    by_group: bool = False,
    tries: int = 8,
  ) -> GradientCheck:
    """Checks that the gradients of this step are the derivatives of its loss; see `nxp.check_gradients`.

    They are computed as in the step, with its microbatches, recomputation, reductions and loss scale, and
    with its corrections of XLA errors. Nothing is trained.

    Args:
      model: as in a call.
      optimizer: as in a call; its `wrt` selects the Variables.
      batch: as in a call.
      seed: the seed of the directions.
      directions: the number of directions; see `nxp.check_gradients`.
      by_group: also compare each group of equal layers.
      tries: the number of other layouts to try for wrong leaves.

    Returns:
      The result: true if nothing is wrong.

    Raises:
      TrainError: as in a call.
    """
    bound = self._bind(model, optimizer)
    filters = {key: item.wrt for key, item in keyed(model, optimizer).items()}
    losses = self.options.loss_fn
    several: dict[Any, Any] = dict(losses) if isinstance(losses, Mapping) else {None: losses}
    found: dict[Hashable, GradientCheck] = {}
    for key, loss_fn in several.items():
      wrt = filters if key is None else {key: of_loss(key, filters)}
      found[key] = checked(
        bound.subject(loss_fn, wrt, bound.placed(batch)), seed, directions, by_group=by_group, tries=tries
      )
    return merged(found)


class EvalStep(_Step):
  """A compiled evaluation; made by `eval_step`.

  Attributes:
    options: the loss function and the options it was made with.
    calls: the number of evaluated batches.
    compiles: one entry for each compilation, with its reasons.
    layers: as for a train step.
  """

  def __call__(self, model: Model, batch: PyTree, *more: PyTree) -> Metrics:
    """Evaluates one batch; the module stays unchanged, even if the loss function edits it.

    Args:
      model: a live module, or a tuple or dict of modules.
      batch: a pytree of global arrays with the examples on dim 0.
      *more: as for a train step: `evaluate(model, x, y)` is `evaluate(model, (x, y))`.

    Returns:
      Metrics on device: means, or `(sum, count)` pairs when made with `pairs=True`.
    """
    if more:
      batch = self._joined(batch, more)
    bound = self._bind(model)
    batch = bound.placed(batch)
    metrics, news = bound.evaluate(batch)
    self._done(bound, news, batch)
    return metrics


def train_step(
  loss_fn: LossFn | Mapping[Any, LossFn],
  *,
  microbatches: int = 1,
  remat: Policy = None,
  scan_layers: ScanLayers = "auto",
  layers: str | None = None,
  attention: Attention = None,
  loss_chunks: int | None = None,
  pipeline: str | Pipeline | None = None,
  outputs: Sequence[str] = (),
  gradients: Gradients | None = None,
  reduction: DTypeLike | None = None,
  pairs: bool = False,
  diagnostics: bool = False,
  **unknown: Never,
) -> TrainStep:
  """Makes a compiled train step from a loss function.

  The step reads the live Variables, runs one compiled and donated program, and writes them back. The next
  step sees an edit of the module; an edit that changes the structure compiles again, with the reason in
  `step.compiles`. Changes of a Variable's metadata, and changes inside an object that is neither a module nor
  a list or dict, are not noticed: call `step.rebind()` after them. If the optimizer was made from a plan, a
  replaced layer is laid out by the plan; new parameters are an error that shows the right call.

  An array with another holder (a clone, a value read before) is copied, not donated. A held shard is not
  noticed: the next step deletes `x.addressable_shards[0].data` with `x`.

  A step returns, or leaves the model and the optimizer as they were: an exception such as Ctrl-C comes before
  or after a step, never during a step. If the program itself fails, the arrays that were donated to it are
  lost: the error has a note, and each later step raises a `TrainError`. Restore a checkpoint then.

  Args:
    loss_fn: `loss_fn(model, batch)` returns `loss`, or `(loss, metrics)` with a dict. One that requires
      several arguments after the model, such as `loss_fn(model, x, y)`, gets the elements of a batch that is
      a tuple or list; so does `loss_fn(model, *batch)`. The loss and each
      metric are a scalar, or `nxp.weighted(sum, count)`: sums and counts are added over microbatches before
      they are divided, so that uneven parts (padding, masks) have the right weight. A count has no gradient,
      even if it is computed from parameters. For several models trained in turn (a GAN), a dict key -> loss
      function; later losses see the models that earlier losses updated.
    microbatches: split the batch into this many parts and accumulate their gradients inside the compiled
      step.
    remat: the activations that each layer saves for the backward pass. `"none"` saves everything. `"full"`
      recomputes each layer from its input (parts under `jax.checkpoint` one by one). `"dots"` saves the
      results of matrix products with weights. `"offload"` is `"full"`, with the inputs of consecutive equal
      layers in host memory. `"as written"` or None changes nothing. A policy of `jax.checkpoint_policies`
      applies within each layer. `Remat("full", every=2)` recomputes every second layer, `Remat("full",
      group=2)` two layers at a time.
    scan_layers: make one scan of consecutive equal layers, so that program size and compile time do not grow
      with depth. True: wherever two equal layers are found. `"auto"`: only where 4 or more layers are
      recomputed. Elsewhere a scan does not pay: it copies the weights of its layers into one stack in each
      step, and without remat it also stacks all saved activations.
    layers: dotted paths of the layers, with `*` for any part, such as `"decoder.blocks.*"`. None: adjacent
      modules of one class and structure, in a list or as attributes that end in numbers.
    attention: `"blockwise"` computes every attention of the model in blocks of queries and keys (of 512, or
      of the given number), so that the full scores never exist; `"fused"`: with the fused kernel of the chip,
      if JAX has a suitable kernel (TPUs; a mask may not differ between examples or heads), else blockwise;
      `step.layers` reports the choice and the reason. If a rule splits `seq` over an axis that splits no
      weight, devices compute their own queries, and keys and values are gathered in each layer. `"ring"`:
      keys and values travel around the devices of that axis instead, and no device has all of them;
      `"ulysses"`: each device computes all positions of some heads (the number of key heads must be a
      multiple of the axis size). An attention that the devices cannot share is then an error that names it.
      None: as written.
    loss_chunks: compute the head and the loss of each token in this many chunks of the vocabulary (the head's
      columns), so that the full logits never exist. Sums over the vocabulary add the logits as they are: with
      logits of several hundreds, an entropy loses digits. None: as written.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`: each stage computes some of the layers, while
      other stages compute other microbatches. The numbers equal `microbatches` without a pipeline.
      `step.layers` describes the stages and their waiting time.
    outputs: names of metrics that are arrays with the examples on dim 0, returned as they are.
    gradients: `"like_parameters"` keeps gradients in the layout of their parameters; `"scattered"` (ZeRO-2)
      keeps them in the layout of their optimizer state, which saves memory, and reduces them in each
      microbatch. None: as the optimizer's plan says, scattered with `zero=2`.
    reduction: dtype in which replicas sum their gradients, if each replica holds the full model and sums its
      own part first (see `microbatches`); otherwise an error when the step is traced. None: XLA reduces a
      gradient in the dtype in which its layer computes, and sums of microbatches in float32.
    pairs: return `(sum, count)` pairs instead of means, for exact means over many steps (`MetricSums`). The
      count of a plain scalar is the number of examples of the batch.
    diagnostics: add `grad_norm` to the metrics, the norm of all gradients before the optimizer changes them,
      and the `learning_rate` of `optax.inject_hyperparams`, if the optimizer's state holds it.
    **unknown: names of other libraries, for an error that shows the name here.

  Returns:
    A callable `(model, optimizer, batch) -> metrics`.

  Raises:
    TrainError: a number of microbatches, a remat policy, a layout of gradients or an option that does not
      exist; or a reduction in a dtype that is not floating.

  Example:
    >>> import jax.numpy as jnp, optax, nnx_parallel as nxp
    >>> from flax import nnx
    >>> init = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    >>> plan = nxp.plan(init, nxp.make_mesh(data=8), nxp.replicate(), optimizer=optax.sgd(0.1))
    >>> model, optimizer = nxp.create_sharded_model(plan)
    >>> step = nxp.train_step(lambda model, batch: (model(batch["x"]) ** 2).mean())
    >>> batch = nxp.shard_batch({"x": jnp.ones((16, 4))}, plan)
    >>> losses = [float(step(model, optimizer, batch)["loss"]) for _ in range(3)]
    >>> losses[0] > losses[1] > losses[2], len(step.compiles)
    (True, 1)
  """
  if unknown:
    raise _unknown_option(next(iter(unknown)))
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  options = StepOptions(
    loss_fn,
    microbatches,
    LayerOptions(remat, scan_layers, layers, attention, loss_chunks, stages),
    tuple(outputs),
    gradients,
    reduction,
    pairs,
    diagnostics,
  )
  return TrainStep(options)


def eval_step(
  loss_fn: LossFn,
  *,
  microbatches: int = 1,
  scan_layers: ScanLayers = "auto",
  layers: str | None = None,
  attention: Attention = None,
  loss_chunks: int | None = None,
  pipeline: str | Pipeline | None = None,
  outputs: Sequence[str] = (),
  pairs: bool = False,
) -> EvalStep:
  """Makes a compiled evaluation step: the loss and metrics of a batch, with the module unchanged.

  Args:
    loss_fn: as in `train_step`.
    microbatches: the number of microbatches for a pipeline.
    scan_layers: make one scan of consecutive equal layers, so that program size and compile time do not grow
      with depth. `"auto"`: no scan, since an evaluation recomputes nothing.
    layers: as in `train_step`.
    attention: as in `train_step`.
    loss_chunks: as in `train_step`.
    pipeline: as in `train_step`. Each microbatch starts with the module as it is: a loss that draws random
      numbers draws the same numbers for all microbatches, and batch statistics are computed for each
      microbatch.
    outputs: names of metrics that are arrays with the examples on dim 0, returned as they are.
    pairs: return `(sum, count)` pairs instead of means, to be added up over batches (`MetricSums`). The count
      of a plain scalar is the number of examples of the batch.

  Returns:
    A callable `(model, batch) -> metrics`.

  Raises:
    TrainError: microbatches without a pipeline.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> model = nxp.create_sharded_model(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
    >>> evaluate = nxp.eval_step(lambda m, x: nxp.weighted(m(x).sum(), x.size), pairs=True)
    >>> evaluate(model, jnp.zeros((16, 4)))["loss"]
    (Array(0., dtype=float32), Array(64., dtype=float32))
  """
  if microbatches != 1 and pipeline is None:
    raise TrainError(
      f"microbatches={microbatches} of an evaluation need a pipeline.",
      fix='pipeline="stage", the mesh axis of its stages; or leave microbatches out.',
    )
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  chosen = LayerOptions(None, scan_layers, layers, attention, loss_chunks, stages)
  return EvalStep(StepOptions(loss_fn, microbatches, chosen, tuple(outputs), pairs=pairs))


_ELSEWHERE = {"accum": "microbatches", "chunk": "loss_chunks", "checkpoint": "remat"}
"""Parts of the names that options have in other libraries."""


def _unknown_option(name: str) -> TrainError:
  options = [one for one in inspect.signature(train_step).parameters if one not in ("loss_fn", "unknown")]
  near = [there for part, there in _ELSEWHERE.items() if part in name]
  near += difflib.get_close_matches(name, options, n=1)
  return TrainError(
    f"train_step has no option {name}.",
    details=f"options: {', '.join(options)}",
    fix=f"did you mean {near[0]}=? help(nxp.train_step) explains each." if near else "one of these.",
  )


def _warn_unplanned(labels: list[str]) -> None:
  if labels:
    logger.warning(
      "%s: the plan has no such array, so each device holds all of it. Fix: plan the edited constructor, and"
      " create from that plan.",
      few(labels),
    )


def _abstract(plan: Plan) -> Any:
  """The plan's model and optimizer as they would be created, with a `ShapeDtypeStruct` in every Variable."""
  check_plan(plan, "step.lower(plan)")
  if plan.tx is None:
    raise TrainError(
      "this plan has no optimizer, so there is no train step to lower.",
      fix="nxp.plan(init, mesh, rules, optimizer=optax.adamw(1e-3))",
    )
  return instantiate(
    plan, {"model": plan.abstract_state("model"), "optimizer": plan.abstract_state("optimizer")}
  )


def _identity(root: Model) -> Hashable:
  """A root by the identity of its objects: a tuple or dict of modules is new in each call."""
  if isinstance(root, dict):
    return tuple((key, id(item)) for key, item in cast("dict[Any, Any]", root).items())
  if isinstance(root, (tuple, list)):
    return (type(root), *map(id, cast("tuple[Any, ...]", root)))
  return id(root)


def _check_objects(roots: Mapping[str, Model]) -> None:
  kinds: dict[str, type] = {"model": nnx.Pytree, "optimizer": nnx.Optimizer}
  call = "step(model, optimizer, batch)" if "optimizer" in roots else "evaluate(model, batch)"
  for name, root in roots.items():
    kind = "module" if name == "model" else name
    for item in objects_in(root):
      # An optimizer may be part of the arguments of a loss, but a step does not train it.
      swapped = name == "model" and "optimizer" in roots and isinstance(root, nnx.Optimizer)
      if swapped or not isinstance(item, kinds[name]):
        raise TrainError(
          f"the step's {name} is a {type(item).__name__}, not a live {kind}.",
          fix=f"{call}, in this order" + (", with an nnx.Optimizer." if name == "optimizer" else "."),
        )
  if "optimizer" in roots:
    keyed(roots["model"], roots["optimizer"])


def _warn_unplaced(arrays: list[AnyArray], batch: PyTree) -> None:
  """Warns of a batch that is on no mesh: jax replicates it, and each device computes all examples."""
  if all(x.sharding.mesh.size == 1 for x in arrays if is_placed(x)):
    return
  loose = [name for name, leaf in named_leaves(batch) if jnp.ndim(leaf) and not is_placed(leaf)]
  if loose:
    logger.warning(
      "%s is on no mesh, so every device computes all of its examples. Fix: step(model, optimizer,"
      " nxp.shard_batch(batch, plan))",
      loose[0],
    )
