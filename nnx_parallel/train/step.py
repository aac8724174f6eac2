"""Train and eval steps: one compiled program, donated state, pinned layouts, and a module that stays live."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Never, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from nnx_parallel.attention.find import Attention
from nnx_parallel.core.checked import check_arguments, shorten_traceback
from nnx_parallel.core.mesh import no_mesh, own_mesh
from nnx_parallel.core.nodes import named_leaves
from nnx_parallel.core.text import few
from nnx_parallel.core.types import AnyArray, Model, Optimizers, PyTree
from nnx_parallel.create.instantiate import instantiate
from nnx_parallel.errors import TrainError
from nnx_parallel.layers.layers import LayerOptions, LayersUsed, ScanLayers
from nnx_parallel.layers.pipeline import Pipeline
from nnx_parallel.layers.remat import Policy
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.layout.plan import Plan, check_plan
from nnx_parallel.train.binding import check_outside
from nnx_parallel.train.bound import Bound, News
from nnx_parallel.train.loss_call import check_several
from nnx_parallel.train.losses import Metrics
from nnx_parallel.train.options import (
  CompilerOption,
  Constants,
  Gradients,
  LossFn,
  StepOptions,
  constants_key,
  takes_keyword,
)
from nnx_parallel.train.program import Compile, Programs, is_placed, logger
from nnx_parallel.train.update import by_key, of_loss
from nnx_parallel.train.watch import Watch, objects_in
from nnx_parallel.verify.check_gradients import DIRECTIONS, check_subject
from nnx_parallel.verify.gradient_check import GradientCheck, merge_checks

_ABSENT: Any = object()
"""Stands for an argument that was not given."""
_CHECKED_LATER = (
  "loss_fn", "remat", "scan_layers", "layers", "attention", "loss_chunks", "pipeline", "reduction",
)  # fmt: skip
"""Arguments of which `StepOptions` and `LayerOptions` say more."""


class _Step:
  """Common to train and eval steps: the bindings to live objects, and the record of compilations."""

  def __init__(self, options: StepOptions):
    self.options = options
    self.layers = LayersUsed()
    self.calls, self._takes_several = 0, False
    self.compiles: list[Compile] = []
    self._bounds: dict[Hashable, Bound] = {}
    self._programs: dict[Hashable, dict[Hashable, Programs]] = {}  # by the constants
    # Two threads may train two models. A signal handler may run a step inside another's.
    self._lock = threading.RLock()

  def _bind(self, model: Model, optimizer: Optimizers = _ABSENT, constants: Constants | None = None) -> Bound:
    """The step for these objects; made again where an attribute changed since the last call."""
    kept = constants_key(constants) if constants else ()
    key = (_identity(model), _identity(optimizer), kept)
    bound = self._bounds.get(key)
    if bound is None or not bound.watch.same():
      roots = {"model": model} if optimizer is _ABSENT else {"model": model, "optimizer": optimizer}
      with self._lock, no_mesh():
        bound = self._bind_again(key, roots, bound, kept, constants or {})
    return bound

  def _bind_again(
    self, key: Hashable, roots: dict[str, Model], before: Bound | None, kept: Hashable, constants: Constants
  ) -> Bound:
    known = self._programs.setdefault(kept, {})
    reasons = ["other objects than before" if self.compiles else "first call"]
    if self.compiles and not known:
      reasons = [", ".join(f"{name}={value!r}" for name, value in constants.items()) or "no constants"]
    if before is not None:
      now = Watch(roots)
      reasons = before.watch.changes(now)
      if not reasons:  # other objects of equal value
        before.watch = now
        return before
    _check_objects(roots)
    if "optimizer" in roots:
      check_outside(roots.values())
    bounds = self._bounds
    # A weak reference calls this while the identity of its object, which the key has, is still its own.
    made = Bound(
      self.options.with_constants(constants), roots, tuple(reasons), known, lambda _: bounds.pop(key, None)
    )
    bounds[key] = made
    return made

  def rebind(self) -> None:
    """Forgets modules and programs; the next call traverses the module and compiles.

    For the edits that a step does not notice: metadata of a Variable, and changes inside an object that is
    neither a module nor a list or dict.
    """
    self._bounds, self._programs = {}, {}

  def _join(self, batch: PyTree, more: Sequence[PyTree]) -> tuple[PyTree, ...]:
    """One batch of the arrays that a call gave separately."""
    if not self._takes_several:  # once: a signature takes 10 us to read
      losses = self.options.loss_fn
      losses = losses.values() if isinstance(losses, Mapping) else [losses]
      check_several(losses, 1 + len(more), has_optimizer=isinstance(batch, nnx.Optimizer))
      self._takes_several = True
    return (batch, *more)

  def _done(self, bound: Bound, news: News, batch: PyTree) -> None:
    """After a call: counts it, and adds a compilation to `compiles`, if there was one."""
    if news is not None:
      self._record(bound, Compile(self.calls, news))
      _warn_unplaced(bound.read(), batch)
    self.calls += 1

  def _record(self, bound: Bound, compiled: Compile) -> None:
    self.layers = bound.programs.layers
    self.compiles.append(compiled)
    if len(self.compiles) > 1:
      logger.info("the step was compiled again: %s", compiled)


class TrainStep(_Step):
  """A compiled train step; made by `train_step`.

  Threads may share a step if each has its own models.

  Attributes:
    options: the loss function and the options it was made with.
    calls: the number of calls so far.
    compiles: one entry for each compilation, with its reasons. If there is more than one entry, look at the
      reasons. Compilations that `compiled()` starts are not listed.
    reduction: how the last compiled program reduces gradients between replicas.
    layers: a text to print: the layers that were found when the step was last compiled or lowered, which of
      them are rematerialized or scanned, and why the others are not.
  """

  def __init__(self, options: StepOptions):
    super().__init__(options)
    self.reduction = ""

  @shorten_traceback
  def __call__(
    self,
    model: Model,
    optimizer: Optimizers = _ABSENT,
    batch: PyTree = _ABSENT,
    *more: object,
    **constants: Hashable,
  ) -> Metrics:
    """Updates `model` and `optimizer` in place with the gradients of a batch.

    Args:
      model: a live module; or a tuple or dict of modules, which is passed to the loss function as it is.
      optimizer: the `nnx.Optimizer` of the model; for several models, a tuple or dict with the same keys. A
        model for whose key there is no optimizer is not trained.
      batch: a pytree of global arrays with the examples on dim 0. In a job of one process, the step shards
        host arrays by the plan of the models, as `shard_batch` does.
      *more: more arrays of the batch, for a loss function that takes each array as an argument:
        `step(model, optimizer, x, y)` equals `step(model, optimizer, (x, y))`.
      **constants: arguments of the loss function that are no arrays, such as `train=True`. They are constants
        of the program: other values compile another program.

    Returns:
      The metrics, on the devices; the call does not wait for them. They are `loss` and the metrics of the
      loss function, as means over the batch.

    Raises:
      TrainError: the step cannot use the loss, the batch or the module; the message has the path of the
        Variable.
      ShardingError: the batch axes of the plan cannot shard a host array evenly.
    """
    if batch is _ABSENT:
      raise TrainError(
        "a train step needs the model, its optimizer and a batch.",
        fix="metrics = step(model, optimizer, batch)",
      )
    if more:
      batch = self._join(batch, more)
    bound = self._bind(model, optimizer, constants)
    with own_mesh(bound.mesh):
      batch = bound.place(batch)
      metrics, news = bound.train(batch)
    self._done(bound, news, batch)
    return metrics

  def _record(self, bound: Bound, compiled: Compile) -> None:
    super()._record(bound, compiled)
    self.reduction = bound.programs.reduction
    if unplanned := bound.unplanned():
      logger.warning(
        "%s: the plan has no such array, so each device holds all of it. Fix: plan the edited constructor,"
        " and create from that plan.",
        few(unplanned),
      )

  @shorten_traceback
  def lower(
    self, model: Model, optimizer: Optimizers = None, batch: PyTree = None, **constants: Hashable
  ) -> jax.stages.Lowered:
    """Lowers the step for these arguments, which may be abstract, without running it.

    Args:
      model: live modules; or a plan with an optimizer, which may be on an abstract mesh. The rules of the
        plan are in scope for `constrain`, unless you have put other rules in scope.
      optimizer: the live optimizer; None with a plan.
      batch: a pytree of arrays or `ShapeDtypeStruct`s of the global batch. Arrays of the host, and structs
        without shardings, get the layout of the plan.
      **constants: as in a call.

    Returns:
      A `jax.stages.Lowered`; call its `.compile()` for the memory and the cost.

    Raises:
      TrainError: the plan has no optimizer.
    """
    scope = contextlib.nullcontext()
    if isinstance(model, Plan):
      scope = default_scope(model.activation_rules)
      model, optimizer = _abstract(model)
    roots = {"model": model, "optimizer": optimizer}
    _check_objects(roots)
    with no_mesh():
      bound = Bound(self.options.with_constants(constants), roots, (), {})
    with own_mesh(bound.mesh), scope:
      traced = bound.trace(bound.place(batch, abstract=True))
      self.layers = bound.programs.layers
      if isinstance(bound.mesh, AbstractMesh):
        return traced.lower(lowering_platforms=(jax.default_backend(),))
      return traced.lower()

  @check_arguments(TrainError)
  def compiled(
    self, model: Model, optimizer: Optimizers, batch: PyTree, **constants: Hashable
  ) -> jax.stages.Compiled:
    """Returns the program for these arguments. After a call with them, it is not compiled again.

    Args:
      model: as in a call.
      optimizer: as in a call.
      batch: as in a call.
      **constants: as in a call.

    Returns:
      A `jax.stages.Compiled`: its text, memory and cost.
    """
    bound = self._bind(model, optimizer, constants)
    with own_mesh(bound.mesh):
      traced = bound.trace(bound.place(batch, abstract=True))
      self.layers = bound.programs.layers
      return traced.lower().compile()

  @check_arguments(TrainError, directions=DIRECTIONS)
  def check_gradients(
    self,
    model: Model,
    optimizer: Optimizers,
    batch: PyTree,
    *,
    seed: int = 0,
    directions: int | None = None,
    **constants: Hashable,
  ) -> GradientCheck:
    """Checks that the gradients of this step are the derivatives of its loss; see `nxp.check_gradients`.

    The gradients are computed as in the step, with its microbatches, rematerialization, reductions and loss
    scale, and with its corrections of XLA errors. The call trains nothing.

    Args:
      model: as in a call.
      optimizer: as in a call; its `wrt` selects the Variables to check.
      batch: as in a call.
      seed: the seed of the directions.
      directions: the number of directions; see `nxp.check_gradients`.
      **constants: as in a call.

    Returns:
      A `GradientCheck`, which is true if nothing is wrong.

    Raises:
      TrainError: as in a call.
    """
    bound = self._bind(model, optimizer, constants)
    filters = {key: item.wrt for key, item in by_key(model, optimizer).items()}
    losses = bound.options.loss_fn
    several: dict[Any, Any] = dict(losses) if isinstance(losses, Mapping) else {None: losses}
    found: dict[Hashable, GradientCheck] = {}
    with own_mesh(bound.mesh):
      for key, loss_fn in several.items():
        wrt = filters if key is None else {key: of_loss(key, filters)}
        subject = bound.subject(loss_fn, wrt, bound.place(batch))
        found[key] = check_subject(subject, seed, directions)
    return merge_checks(found)


class EvalStep(_Step):
  """A compiled evaluation; made by `eval_step`.

  Attributes:
    options: the loss function and the options it was made with.
    calls: the number of evaluated batches.
    compiles: one entry for each compilation, with its reasons.
    layers: as for a train step.
  """

  @shorten_traceback
  def __call__(self, model: Model, batch: PyTree, *more: PyTree, **constants: Hashable) -> Metrics:
    """Evaluates one batch. The module does not change, even if the loss function edits it.

    Args:
      model: a live module, or a tuple or dict of modules.
      batch: a pytree of global arrays with the examples on dim 0.
      *more: as for a train step: `evaluate(model, x, y)` equals `evaluate(model, (x, y))`.
      **constants: as for a train step.

    Returns:
      The metrics, on the devices: means, or pairs `(sum, count)` if the step was made with `pairs=True`.
    """
    if more:
      batch = self._join(batch, more)
    bound = self._bind(model, constants=constants)
    with own_mesh(bound.mesh):
      batch = bound.place(batch)
      metrics, news = bound.evaluate(batch)
    self._done(bound, news, batch)
    return metrics


@check_arguments(TrainError, *_CHECKED_LATER, microbatches=1)
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
  outputs: str | Sequence[str] = (),
  has_aux: bool = False,
  gradients: Gradients | None = None,
  reduction: DTypeLike | None = None,
  pairs: bool = False,
  diagnostics: bool = False,
  compiler_options: Mapping[str, CompilerOption] | None = None,
  **unknown: Never,
) -> TrainStep:
  """Makes a compiled train step from a loss function.

  The step reads the live Variables, runs one compiled program to which their arrays are donated, and writes
  the results back. The next step sees your edits of the module; after an edit that changes the structure, it
  is compiled again, with the reason in `step.compiles` (`step.rebind()` lists the edits that it cannot see).
  If the optimizer was made from a plan, a replaced layer gets the layout of the plan; new parameters are an
  error that shows the right call.

  An array that something else also holds (a clone of the model, or a value that you read before) is copied,
  not donated. The step does not notice that you hold a single shard: the next step deletes
  `x.addressable_shards[0].data` together with `x`.

  A step either returns, or leaves the model and the optimizer as they were: an exception such as Ctrl-C comes
  before or after a step, never during a step. If the program itself fails, the arrays that were donated to it
  are lost. The error then has a note, and each later step raises a `TrainError`; restore a checkpoint.

  Args:
    loss_fn: a function `loss_fn(model, batch)` that returns `loss`, or `(loss, metrics)` with a dict of
      metrics; each is a scalar or `nxp.weighted(sum, count)`. If it requires several arguments after the
      model, such as `loss_fn(model, x, y)` or `loss_fn(model, *batch)`, it gets the elements of a batch that
      is a tuple or list. For several models that are trained in turn (a GAN), pass a dict: key -> loss
      function. Later losses see the models that earlier losses updated.
    microbatches: the number of parts into which the compiled step splits the batch; it accumulates their
      gradients.
    remat: the activations that each layer saves for the backward pass. `"none"` saves everything. `"full"`
      recomputes each layer from its input. `"dots"` saves the results of matrix products with weights.
      `"offload"` is `"full"`, with the inputs of consecutive equal layers in host memory. `"as written"` or
      None changes nothing. A policy of `jax.checkpoint_policies` applies to each layer.
      `Remat("full", every=2)` recomputes every second layer, and `Remat("full", group=2)` recomputes two
      layers at a time; neither applies to a scan of the model. Scan bodies that call no module, and parts
      under `nnx.remat`, stay as written.
    scan_layers: whether to run consecutive equal layers as one scan, so that the size and the compile time of
      the program do not grow with the depth. True scans wherever it finds two equal layers. `"auto"` scans
      only where 4 or more layers are recomputed. Elsewhere, a scan costs more than it saves: it copies the
      weights of its layers into one stack in each step, and without remat it also stacks all saved
      activations.
    layers: dotted paths of the layers, with `*` for any part, such as `"decoder.blocks.*"`. None finds
      adjacent modules of the same class and structure, in a list or as attributes whose names end in numbers,
      and modules whose layers are stacked, where the model calls one slice at a time.
    attention: how every attention of the model is computed. `"blockwise"` computes it in blocks of 512
      queries and keys (a number sets another block length), so that the full scores never exist. `"fused"`
      uses the fused kernel of the chip, if JAX has a suitable kernel (on TPUs and, in bfloat16 or float16, on
      NVIDIA GPUs, if the mask does not differ between examples or heads), else blockwise attention;
      `step.layers` gives the reason. If a rule shards `seq` over an axis that shards no weight, each device
      computes its own queries, and gathers the keys and values in each layer. With `"ring"`, these travel
      around the devices of that axis instead. With `"ulysses"`, each device computes all positions of some
      heads (the number of key heads must be a multiple of the axis size). With these two, an attention that
      the devices cannot share is an error. None computes attention as the model is written.
    loss_chunks: the number of chunks of the vocabulary (the columns of the head) in which the head and the
      loss are computed, so that the full logits never exist. Sums over the vocabulary add the logits as they
      are; if logits reach several hundreds, an entropy loses digits. None computes the loss as it is written.
    pipeline: the mesh axis of pipeline stages, or a `Pipeline`: each stage computes some of the layers for
      one microbatch at a time, with equal results. `step.layers` describes the stages and their waiting time.
    outputs: the names of metrics that are arrays with the examples on dim 0, or one name. They are returned
      as they are, without a mean.
    has_aux: whether the loss function returns `(loss, aux)`, with any pytree, as for `jax.value_and_grad`.
      The leaves of `aux` are among the metrics, by their places: `aux` for a single array, `aux[0]` and
      `aux[1]` for two. Scalars are averaged like the loss. If there are microbatches, arrays must have the
      examples on dim 0.
    gradients: `"like_parameters"` keeps gradients in the layout of their parameters; `"scattered"` (ZeRO-2)
      keeps them in the layout of their optimizer state, which saves memory, and reduces them in each
      microbatch. None does what the plan of the optimizer says: `"scattered"` with `zero=2`.
    reduction: the dtype in which replicas sum their gradients. It requires that each replica holds the full
      model and first sums its own microbatches; otherwise the step raises an error when it is traced. With
      None, bfloat16 layers send bfloat16 gradients, and sums of several microbatches are sent in float32.
    pairs: whether to return pairs `(sum, count)` instead of means, for exact means over many steps (see
      `MetricSums`). The count of a plain scalar is the number of examples in the batch.
    diagnostics: whether to add two metrics: `grad_norm`, the norm of all gradients before the optimizer
      changes them; and the `learning_rate` of `optax.inject_hyperparams`, if the optimizer state holds it.
    compiler_options: options of XLA for this step, such as `dict(xla_tpu_scoped_vmem_limit_kib=65536)`. They
      also hold for `step.lower` and `nxp.compile_report`. XLA raises an error for a name that it does not
      know.
    **unknown: do not pass it: a name from another library raises an error with the name in this function.

  Returns:
    A callable `(model, optimizer, batch) -> metrics`.

  Raises:
    TrainError: the number of microbatches, the remat policy, the layout of the gradients or the name of an
      option is invalid; or `reduction` is not a floating-point dtype.

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
    raise unknown_option(train_step, next(iter(unknown)))
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  chosen, names = LayerOptions(remat, scan_layers, layers, attention, loss_chunks, stages), _names(outputs)
  options = StepOptions(
    loss_fn, microbatches, chosen, names, gradients, reduction, pairs, diagnostics, compiler_options, has_aux
  )
  return TrainStep(options)


@check_arguments(TrainError, *_CHECKED_LATER, microbatches=1)
def eval_step(
  loss_fn: LossFn,
  *,
  microbatches: int = 1,
  scan_layers: ScanLayers = "auto",
  layers: str | None = None,
  attention: Attention = None,
  loss_chunks: int | None = None,
  pipeline: str | Pipeline | None = None,
  outputs: str | Sequence[str] = (),
  has_aux: bool = False,
  pairs: bool = False,
  compiler_options: Mapping[str, CompilerOption] | None = None,
) -> EvalStep:
  """Makes a compiled evaluation step: the loss and metrics of a batch, with the module unchanged.

  The module is evaluated in the mode that it has. Without dropout and with running averages, evaluate
  `nnx.view(model, deterministic=True, use_running_average=True)`, which shares its Variables; make this view
  once, since another object is compiled again.

  Args:
    loss_fn: as in `train_step`.
    microbatches: the number of microbatches of a pipeline; only a pipeline uses it.
    scan_layers: as in `train_step`; `"auto"` does not scan, because an evaluation recomputes nothing.
    layers: as in `train_step`.
    attention: as in `train_step`.
    loss_chunks: as in `train_step`.
    pipeline: as in `train_step`. Each microbatch starts with the same state of the module, so a loss function
      that draws random numbers draws the same numbers for all microbatches. Batch statistics are computed for
      each microbatch.
    outputs: as in `train_step`.
    has_aux: as in `train_step`.
    pairs: as in `train_step`, for exact means over many batches.
    compiler_options: as in `train_step`.

  Returns:
    A callable `(model, batch) -> metrics`.

  Raises:
    TrainError: `microbatches` is given without a pipeline.

  Example:
    >>> import jax.numpy as jnp, nnx_parallel as nxp
    >>> from flax import nnx
    >>> model = nxp.create_sharded_model(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nxp.make_mesh(data=8))
    >>> evaluate = nxp.eval_step(lambda m, x: nxp.weighted(m(x).sum(), x.size), pairs=True)
    >>> evaluate(model, jnp.zeros((16, 4)))["loss"]
    (Array(0., dtype=float32), Array(64., dtype=float32))
  """
  if microbatches > 1 and pipeline is None:
    raise TrainError(
      f"microbatches={microbatches} of an evaluation need a pipeline.",
      fix='pipeline="stage", the mesh axis of its stages; or leave microbatches out.',
    )
  stages = Pipeline(pipeline) if isinstance(pipeline, str) else pipeline
  if isinstance(stages, Pipeline):  # there is no backward pass to order
    stages = Pipeline(stages.axis, stages.virtual_stages, "gpipe")
  chosen = LayerOptions(None, scan_layers, layers, attention, loss_chunks, stages)
  names = _names(outputs)
  options = StepOptions(
    loss_fn, microbatches, chosen, names, pairs=pairs, compiler_options=compiler_options, has_aux=has_aux
  )
  return EvalStep(options)


def _names(outputs: str | Sequence[str]) -> tuple[str, ...]:
  return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def bind_keywords(loss_fn: LossFn, options: dict[str, Any]) -> Any:
  """`loss_fn` with those of the options that it takes and `train_step` does not; they leave the options."""
  own = inspect.signature(train_step).parameters
  names = [name for name in options if name not in own and takes_keyword(loss_fn, name)]
  return StepOptions(loss_fn).with_constants({name: options.pop(name) for name in names}).loss_fn


_ELSEWHERE = {"accum": "microbatches", "chunk": "loss_chunks", "checkpoint": "remat"}
"""Parts of the names that options have in other libraries."""


def unknown_option(function: Callable[..., Any], name: str) -> TrainError:
  """The error for an option that a function lacks: the nearest of its own options, or of `train_step`'s."""
  own, of_step = (
    [one.name for one in inspect.signature(f).parameters.values() if one.kind is one.KEYWORD_ONLY]
    for f in (function, train_step)
  )
  near = difflib.get_close_matches(name, own, n=1)
  near += [there for part, there in _ELSEWHERE.items() if part in name]
  near += difflib.get_close_matches(name, of_step, n=1)
  fix = "one of these."
  if near:
    fix = f"did you mean {near[0]}=? help(nxp.{function.__name__}) explains each."
    fix = fix if near[0] in own else f"did you mean nxp.train_step(loss_fn, {near[0]}=...)?"
  return TrainError(
    f"{function.__name__} has no option {name}.", details=f"options: {', '.join(own)}", fix=fix
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
      if isinstance(item, nnx.ModelAndOptimizer):
        raise TrainError(
          "the step got an nnx.ModelAndOptimizer, which holds a model too.",
          details="its update takes the gradients alone, and updates the model that it holds",
          fix="optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)\nstep(model, optimizer, batch)",
        )
      if swapped or not isinstance(item, kinds[name]):
        raise TrainError(
          f"the step's {name} is a {type(item).__name__}, not a live {kind}.",
          fix=f"{call}, in this order" + (", with an nnx.Optimizer." if name == "optimizer" else "."),
        )
  if "optimizer" in roots:
    by_key(roots["model"], roots["optimizer"])


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
