"""Wrong and odd arguments of every public function: each exception is one of this package.

The functions and their arguments come from the public surface; `GIVEN` has values that work, by name.
"""

import contextlib
import functools
import inspect
import io
import itertools
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.checkpoint import targets
from nnx_parallel.errors import NnxParallelError
from surface import public_members, public_objects

P = jax.sharding.PartitionSpec


def closed():
  file = io.StringIO("text")
  file.close()
  return file


class Odd:
  def __repr__(self):
    return "<odd>"


VALUES = {
  "None": None, "True": True, "zero": 0, "negative": -3, "large": 2**40, "float": 1.5, "nan": float("nan"),
  "text": "data", "no text": "", "bytes": b"data", "tuple": (), "list": [], "list of texts": ["data"],
  "list of numbers": [1, -2], "dict": {}, "dict of odds": {"data": Odd()}, "dict of numbers": {1: 2},
  "set": {"data"}, "numpy int": np.int64(3), "numpy float": np.float32(1.5), "numpy bool": np.bool_(True),
  "numpy array": np.ones((3, 2)), "texts of numpy": np.array(["a", "b"]), "jax array": jnp.ones(3),
  "dtype": jnp.dtype("int8"), "a function": len, "a class": Odd, "closed file": closed(), "object": Odd(),
}  # fmt: skip
once = functools.cache
PACKAGE = str(Path(nxp.__file__).parent)


def linear():
  return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def loss_fn(model, x):
  return (model(x) ** 2).mean()


class Sum(nnx.Module):  # The next token is the sum of the tokens so far, modulo 8
  def __init__(self):
    self.total = nnx.Cache(jnp.zeros((8,), jnp.int32))

  def __call__(self, tokens):
    self.total[...] = (self.total[...] + tokens[:, 0]) % 8
    return jax.nn.one_hot(self.total[...], 8)[:, None]


MESH = once(lambda: nxp.make_mesh(data=4, tensor=2))
PLAN = once(lambda: nxp.plan(linear, MESH(), nxp.fsdp("data", min_size=0), optimizer=optax.sgd(0.1)))
MADE = once(lambda: nxp.create_sharded_model(PLAN()))
STEP = once(lambda: nxp.train_step(loss_fn))
X = np.ones((8, 8), np.float32)
TOKENS = np.ones((8, 3), np.int32)
WEIGHTS = {name: np.ones((4, 8, 8), np.float32) for name in ("up", "down")}
SIZES = np.full(4, 2, np.int32)
REFERENCE = Path(__file__).parents[1] / "interop" / "references" / "llama"
RULE = nxp.interop.Rule("h.{i}.w", "h.{i}.k")

starter_recipe = once(lambda: nxp.recipes.load_recipe("starter"))
RECIPE_PLAN = once(lambda: nxp.recipes.plan_recipe(starter_recipe(), nxp.make_mesh(fsdp=8)))


def averaged(wrap):
  model = linear()
  return nnx.Optimizer(model, wrap(optax.sgd(0.1)), wrt=nnx.Param)


class Files:  # Files that functions read, and a name for those that they write
  def __init__(self, folder: Path):
    self.folder, self.count = folder, itertools.count()
    model, optimizer = MADE()
    with nxp.Checkpointer(folder / "steps") as checkpointer:
      checkpointer.save(1, model, optimizer, extra={"seen": {"n": 3}})
    nxp.interop.export_safetensors(folder / "tensors", model)
    nxp.interop.export_program(folder / "program", lambda m, x: m(x), model, X)
    (folder / "map.py").write_text(
      'from nnx_parallel.interop import Rule, WeightMap\nWEIGHT_MAP = WeightMap(Rule("{i}", "{i}"))\n'
    )
    (folder / "log").write_text('{"step": 1, "loss": 2.0}\n')
    with ocp.StandardCheckpointer() as orbax:
      orbax.save(folder / "orbax", nnx.to_pure_dict(nnx.state(model)))
    with nxp.Checkpointer(folder / "recipe") as checkpointer:
      checkpointer.save(1, *nxp.create_sharded_model(RECIPE_PLAN()))
    nxp.interop.export_peft(folder / "peft", self.adapted(), REFERENCE)

  def new(self) -> Path:
    return self.folder / f"new{next(self.count)}"

  def checkpointer(self):
    return nxp.Checkpointer(self.folder / "steps")

  @staticmethod
  @once
  def family():
    return nxp.interop.from_config(REFERENCE, nnx.Rngs(0))

  @classmethod
  def adapted(cls):
    model = nnx.clone(cls.family())
    nxp.interop.add_lora(model, "*.q_proj", rank=2, rngs=nnx.Rngs(0))
    return model


MADE_BY_US = {
  "EvalStep", "Generated", "Generator", "LeafPlan", "Plan", "ShardedOptimizer", "Task", "TrainStep",
  "hosts.Processes", "loop.FitResult", "parallel.Routing", "recipes.Resumed",
  "report.CompileReport", "report.MemoryPlan", "report.SearchResult", "testing.GradientNorms",
  "testing.Training", "verify.GradientCheck", "verify.GradientComparison", "verify.StepCheck",
  "verify.StepDifference",
}  # fmt: skip
"""Classes whose objects a function of the package returns: nobody calls them. Their methods are called."""

NOT_FED = {
  "hosts.StopSignals.__exit__": "Python calls it", "Checkpointer.__exit__": "Python calls it",
  "loop.MetricsLog.__exit__": "Python calls it", "LogicalRules.__getitem__": "a Mapping: KeyError",
  "interop.WeightMap.through": "takes what `restore` made of its target",
  "testing.assert_same_numbers": "compares two results of run_training, and raises an AssertionError",
}  # fmt: skip


def given(files: Files) -> dict[str, Callable[[], Any]]:
  """Values that work, by the name of an argument; or by `function.argument`, where that needs its own."""
  model, optimizer = (lambda: MADE()[0]), (lambda: MADE()[1])
  steps = itertools.count(2)
  plain = lambda value: lambda: value
  alone = lambda: nxp.plan(linear, nxp.make_mesh(data=8), nxp.fsdp("data", min_size=0))
  arrays = lambda: {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}
  logits = jax.random.normal(jax.random.key(0), (8, 4))
  report = once(lambda: nxp.compile_report(STEP(), PLAN(), batch=X))
  memory = once(lambda: nxp.memory_plan(PLAN(), loss_fn, X))
  generate = once(lambda: nxp.generator(2))
  return {
    # Objects whose methods are called.
    "Checkpointer": files.checkpointer, "EvalStep": once(lambda: nxp.eval_step(loss_fn)),
    "Generator": generate, "LogicalRules": lambda: nxp.LogicalRules(embed="data"),
    "PathRules": lambda: nxp.PathRules([("kernel", (None, "data"))]), "Pipeline": lambda: nxp.Pipeline(),
    "Plan": PLAN, "Precision": lambda: nxp.Precision(),
    "RuleSet": lambda: nxp.RuleSet.of(nxp.LogicalRules(embed="data")),
    "Sampling": lambda: nxp.Sampling(temperature=1.0), "ShardedOptimizer": optimizer, "TrainStep": STEP,
    "hosts.StopSignals": lambda: nxp.hosts.StopSignals(),
    "interop.WeightMap": lambda: nxp.interop.WeightMap(RULE),
    "loop.EarlyStop": lambda: nxp.loop.EarlyStop("loss"), "loop.MetricSums": lambda: nxp.loop.MetricSums(),
    "loop.MetricsLog": lambda: nxp.loop.MetricsLog(files.folder / "written"),
    "parallel.Schedule": lambda: nxp.parallel.Schedule(4, 8, 8),
    "report.Chip": lambda: nxp.report.chip("v5e"), "report.CompileReport": report,
    # Arguments by name.
    "axis": plain("data"), "base": plain(REFERENCE), "batch": plain(X), "batches": lambda: [X],
    "decay": plain(0.9), "directory": files.new, "folder": plain(REFERENCE),
    "grads": lambda: nnx.state(linear(), nnx.Param), "group_sizes": plain(SIZES), "init": plain(linear),
    "logits": plain(logits), "loss": plain(loss_fn), "loss_fn": plain(loss_fn), "mesh": MESH, "model": model,
    "module": model, "name": plain("kernel"), "parameters": lambda: {"w": jnp.ones((4, 8, 8))},
    "path": files.new, "paths": plain(["a"]), "plan": PLAN, "prompts": plain(TOKENS),
    "rngs": lambda: nnx.Rngs(0), "rows": plain(X), "rules": lambda: nxp.fsdp("data", min_size=0),
    "step": STEP, "text": lambda: PLAN().to_json(), "topology": plain("cpu:8"), "tx": lambda: optax.sgd(0.1),
    "x": plain(X),
    # Arguments of one function.
    "Checkpointer.diff.target": PLAN, "Checkpointer.metadata.step": plain(1),
    "Checkpointer.restore.target": PLAN, "Checkpointer.restore_extra.name": plain("seen"),
    "Checkpointer.save.optimizer": optimizer, "Checkpointer.save.step": lambda: next(steps),
    "Generator.model": lambda: Sum(), "InputRules.**": plain({"map_2d": ("data", None)}),
    "LogicalRules.**": plain({"embed": "data"}), "LogicalRules.first.candidates": plain(("data",)),
    "LogicalRules.from_linen.rules": plain([("embed", "data")]),
    "LogicalRules.replace.**": plain({"embed": None}), "PathRules.match.path": plain(("kernel",)),
    "PathRules.rules": plain([("kernel", (None, "data"))]),
    "Pipeline.saved_inputs.schedule": lambda: nxp.parallel.Schedule(4, 8, 8), "Plan.of.root": plain("model"),
    "Plan.batch_spec.ndim": plain(2), "Plan.diff.other": PLAN, "Precision.compute": plain("float32"),
    "RuleSet.**": plain({}), "RuleSet.replace.**": plain({"embed": None}),
    "Sampling.choose.keys": lambda: jax.random.split(jax.random.key(0), 8), "TrainStep.batch": plain(X),
    "TrainStep.optimizer": optimizer, "abstract_mesh.**": plain({"data": 8}), "batches.source": lambda: [X],
    "check_step.other": plain(None), "compile_report.batch": plain(X), "compile_report.plan": PLAN,
    "constrain.names": plain(("data", None)), "create_sharded_model.mesh": MESH,
    "create_sharded_model.rules": lambda: nxp.fsdp("data", min_size=0),
    "ema_of.optimizer": lambda: averaged(lambda tx: nxp.with_ema(tx, 0.9)), "ema_of.model": linear,
    "evaluate.step": once(lambda: nxp.eval_step(loss_fn)), "fit.optimizer": optimizer, "fit.steps": plain(1),
    "fit.progress": plain(False), "from_arrays.arrays": arrays, "from_arrays.plan": alone,
    "generator.max_new_tokens": plain(2), "hosts.StopSignals.asked.step": plain(0),
    "hosts.barrier.name": plain("here"), "hosts.to_host.tree": model,
    "infer_rules.call": plain(lambda module, x: module(x)), "infer_rules.inputs": plain((X,)),
    "infer_rules.min_size": plain(0), "interop.Rule.file": plain("h.{i}.w"),
    "interop.Rule.model": plain("h.{i}.k"), "interop.Rule.pattern": plain("o i -> i o"),
    "interop.WeightMap.compare.arrays": lambda: {"kernel": np.ones((8, 8), np.float32)},
    "interop.WeightMap.compare.wanted": lambda: targets.read(PLAN(), optimizer="drop").leaves["model"],
    "interop.WeightMap.rules": plain((RULE,)), "interop.WeightMap.to_write.paths": plain(["h.0.k"]),
    "interop.add_lora.model": linear, "interop.add_lora.rank": plain(2),
    "interop.add_lora.targets": plain("*"), "interop.dry_run_import.path": lambda: files.folder / "tensors",
    "interop.export_peft.model": files.adapted, "interop.export_program.args": plain((X,)),
    "interop.export_program.file": files.new,
    "interop.export_program.function": plain(lambda model, x: model(x)),
    "interop.import_linen.source": lambda: {"params": arrays()}, "interop.import_linen.plan": alone,
    "interop.import_peft.model": files.adapted, "interop.import_peft.path": lambda: files.folder / "peft",
    "interop.import_safetensors.path": lambda: files.folder / "tensors",
    "interop.import_safetensors.plan": alone,
    "interop.load_huggingface.mesh": once(lambda: nxp.make_mesh(fsdp=8)),
    "interop.load_huggingface.rules": lambda: nxp.fsdp(),
    "interop.load_program.file": lambda: files.folder / "program",
    "interop.load_weight_map.file": lambda: str(files.folder / "map.py"),
    "interop.merge_adapters.adapted": files.adapted,
    "interop.merge_adapters.base": lambda: nnx.clone(files.family()),
    "interop.restore_orbax.path": lambda: files.folder / "orbax", "interop.restore_orbax.target": alone,
    "loop.EarlyStop.metric": plain("loss"), "loop.EarlyStop.update.record": plain({"loss": 1.0}),
    "loop.MetricSums.add.metrics": plain({"loss": 1.0}), "loop.MetricsLog.path": files.new,
    "loop.MetricsLog.write.step": plain(1), "loop.MetricsLog.write.values": plain({"loss": 1.0}),
    "loop.read_metrics.path": lambda: files.folder / "log",
    "loss_scale_of.optimizer": lambda: averaged(nxp.with_loss_scale), "make_mesh.**": plain({"data": 8}),
    "parallel.Schedule.item.stage": plain(0), "parallel.Schedule.item.tick": plain(0),
    "parallel.Schedule.layers": plain(8), "parallel.Schedule.microbatches": plain(8),
    "parallel.Schedule.stages": plain(4), "parallel.attention.key": plain(np.ones((2, 8, 2, 4), np.float32)),
    "parallel.attention.query": plain(np.ones((2, 8, 2, 4), np.float32)),
    "parallel.attention.value": plain(np.ones((2, 8, 2, 4), np.float32)),
    "parallel.auto_axes.step": plain(lambda model, x: model(x)),
    "parallel.balanced_bias.bias": plain(jnp.ones(3)),
    "parallel.balanced_bias.load": plain(np.ones(3, np.int32)),
    "parallel.context_attention.axis": plain("data"), "parallel.experts.axis": plain("tensor"),
    "parallel.experts.expert_fn": plain(nxp.parallel.mlp_experts),
    "parallel.experts.parameters": plain(WEIGHTS),
    "parallel.experts.routing": lambda: nxp.parallel.route(logits, 2),
    "parallel.fold_rng_over_axis.target": lambda: jax.random.key(0),
    "parallel.map_kernel.in_names": plain([("data", None)]),
    "parallel.map_kernel.kernel": plain(lambda x: x * 2),
    "parallel.map_kernel.out_names": plain(("data", None)),
    "parallel.map_shards.f": plain(lambda model, x: jax.lax.pmean(x.sum(), "data")),
    "parallel.mlp_experts.parameters": plain(WEIGHTS), "parallel.pipeline.axis": plain("data"),
    "parallel.pipeline.layer": plain(lambda p, x: jnp.tanh(x @ p["w"])),
    "parallel.pipeline.microbatches": plain(4), "parallel.route.top_k": plain(2),
    "parallel.ragged_dot.weights": plain(WEIGHTS["up"]), "parallel.send.source": model,
    "parallel.send.to": model, "parallel.vocabulary_cross_entropy.head": plain(np.ones((8, 16), np.float32)),
    "parallel.vocabulary_cross_entropy.hidden": plain(np.ones((4, 3, 8), np.float32)),
    "parallel.vocabulary_cross_entropy.labels": plain(np.zeros((4, 3), np.int32)),
    "parallel.vocabulary_embedding.ids": plain(np.zeros((4, 3), np.int32)),
    "parallel.vocabulary_embedding.table": plain(np.ones((16, 8), np.float32)),
    "parallel.zigzag.tree": plain({"x": X}), "parallel.zigzag.shards": plain(2),
    "plan.optimizer": lambda: optax.sgd(0.1), "recipes.load_recipe.spec": plain("starter"),
    "recipes.plan_recipe.mesh": lambda: nxp.make_mesh(fsdp=8), "recipes.plan": RECIPE_PLAN,
    "recipes.restore.checkpointer": lambda: nxp.Checkpointer(files.folder / "recipe"),
    "reshard.model": linear, "reshard.plan": alone, "recipes.recipe": starter_recipe,
    "report.Chip.**": plain({}), "report.Chip.flops": plain({"bfloat16": 1e12}),
    "report.Chip.hbm_bandwidth": plain(1e12), "report.Chip.hbm_bytes": plain(2**34),
    "report.Chip.link_bandwidth": plain(1e11), "report.Chip.links": plain(4),
    "report.Chip.network_bandwidth": plain(1e10), "report.Chip.peak.arithmetic": plain("bfloat16"),
    "report.Chip.platform": plain("tpu"), "report.Chip.usable_bytes": plain(2**34),
    "report.CompileReport.bytes_by.keys": plain(("kind",)), "report.chip.name": plain("v5e"),
    "report.plan_page.memory": memory, "report.topology_mesh.**": plain({"data": 8}),
    "report.topology_mesh.text": plain("cpu:8"), "resolve_spec.names": plain(("embed", None)),
    "resolve_spec.rules": lambda: nxp.LogicalRules(embed="data"), "resolve_spec.shape": plain((8, 8)),
    "search.compile_best": plain(0), "search.rules": lambda: [nxp.LogicalRules(batch="fsdp"), nxp.fsdp()],
    "shard_batch.batch": lambda: {"x": X}, "task.mesh": MESH, "task.loss": plain(loss_fn),
    "task.batch": plain(X), "task.rules": lambda: nxp.fsdp("data", min_size=0),
    "task.optimizer": lambda: optax.sgd(0.1),
    "testing.assert_golden_plan.file": lambda: files.folder / "golden",
    "testing.assert_golden_plan.update": plain(True),
    "testing.assert_same_training.plans": lambda: {"plan": PLAN()},
    "verify.with_correct_convolutions.run": plain(lambda x: x), "weighted.count": plain(1.0),
    "weighted.sum": plain(1.0),
  }  # fmt: skip


def entered(context):
  with context:
    pass


def applied(tx):
  model = linear()
  nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, nnx.state(model, nnx.Param))


QUERY = np.ones((2, 8, 4, 8), np.float32)
USED = {
  "parallel.context_attention": lambda attend: jax.eval_shape(attend, QUERY, QUERY, QUERY),
  "parallel.map_kernel": lambda run: jax.eval_shape(run, X),
  "parallel.map_shards": lambda run: nnx.eval_shape(run, MADE()[0], X), "parallel.per_matrix": applied,
  "skip_nonfinite": applied, "testing.with_gradient_norms": applied, "use_rules": entered,
  "with_ema": applied, "with_layers": lambda loss: loss(MADE()[0], X),
  "with_loss_scale": lambda tx: tx.init({"w": jnp.ones(3)}),
  "with_masters": lambda tx: tx.init({"w": jnp.ones(3)}),
}  # fmt: skip
"""How the result of a function is used: what it makes must not fail later than it has to."""


def public_callables() -> dict[str, tuple[Any, str]]:
  """Name -> (function, the class of its object); of classes, the constructor and the methods."""
  found: dict[str, tuple[Any, str]] = {}
  for name, value in public_objects(nxp):
    if isinstance(value, types.ModuleType) or (inspect.isclass(value) and issubclass(value, BaseException)):
      continue
    found[name] = value, ""
    if inspect.isclass(value):
      for member, static in public_members(value, "nnx_parallel"):
        if callable(static) or isinstance(static, classmethod | staticmethod):
          found[f"{name}.{member}"] = static, name
  return found


def arguments_of(function):
  """The parameters that a caller may give; constructors of tuples have none."""
  own = function.__func__ if isinstance(function, classmethod | staticmethod) else function
  return [p for p in inspect.signature(own).parameters.values() if p.name not in ("self", "cls", "_")]


FED = {
  name: pair
  for name, pair in public_callables().items()
  if name not in MADE_BY_US and name not in NOT_FED and arguments_of(pair[0])
}

SLOW = {
  "TrainStep.check_gradients", "check_gradients", "interop.load_huggingface", "interop.restore_orbax",
  "parallel.attention", "parallel.experts", "parallel.pipeline", "parallel.route",
  "parallel.vocabulary_cross_entropy", "parallel.vocabulary_embedding", "recipes.restore", "recipes.start",
  "reshard", "search", "task", "testing.assert_same_training",
}  # fmt: skip
"""Functions that take more than a second for all their calls."""
NEVER_WRONG = {
  "LogicalRules.first": "what is in a rule is checked where the rule is made",
  "RuleSet": "made by RuleSet.of",
  "weighted": "a step looks at what its loss returns",
}
"""Functions that take anything."""
MANUAL = {f"parallel.{name}" for name in ("fold_rng_over_axis", "gather_parameters")}
"""Functions for the body of a `jax.shard_map`."""


def apply(function, args, keywords):
  return function(*args, **keywords)


def inside(function, args, keywords):
  """The call in the body of a `jax.shard_map`."""

  def body(x):
    function(*args, **keywords)
    return x

  return jax.eval_shape(jax.shard_map(body, in_specs=P(), out_specs=P(), check_vma=False), jnp.ones(8))


def is_users(error: Exception) -> bool:
  """Whether a function that this file gives to the package raised it, or one without a frame of its own."""
  files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.name != "body"]
  ours = next((n for n, file in enumerate(files) if file.startswith(PACKAGE)), len(files))
  called = ("len()", "Odd()", "object of type", "given.<locals>")
  return __file__ in files[ours:] or str(error).startswith(called)


class Call:  # A public function with arguments that work, any of which can be replaced
  def __init__(self, name: str, files: Files):
    self.name, self.values = name, given(files)
    self.function, self.owner = FED[name]
    if isinstance(self.function, classmethod | staticmethod):
      self.function, self.owner = getattr(dict(public_objects(nxp))[self.owner], name.split(".")[-1]), ""
    found = inspect.signature(self.function).parameters.values()
    self.parameters = [p for p in found if p.name != "self" and (p.kind is not p.VAR_KEYWORD or self.more)]
    self.arguments = [*(p.name for p in self.parameters if p.kind is not p.VAR_KEYWORD), *self.more]

  @property
  def more(self) -> dict[str, Any]:
    """Keywords that have no parameter of their own."""
    return self.value("**", None) or {}

  def value(self, argument: str, default: Any) -> Any:
    """The value of an argument that works."""
    scopes = [self.name, self.name.rpartition(".")[0], self.name.split(".")[0]]
    keys = [f"{scope}.{argument}" for scope in scopes if scope]
    for key in keys if default is not inspect.Parameter.empty else [*keys, argument]:
      if key in self.values:
        return self.values[key]()
    assert default is not inspect.Parameter.empty, f"{self.name} has no value for {argument}"
    return default

  def __call__(self, argument: str = "", odd: Any = None) -> str:
    """How a call ends: "works", "ours", or the exception that it should not raise."""
    function = self.function
    if self.owner:
      function = functools.partial(function, self.values[self.owner]())
    args, keywords = [], {}
    for p in self.parameters:
      if p.kind is p.VAR_KEYWORD:
        keywords |= self.more | ({argument: odd} if argument in self.more else {})
        continue
      plain = () if p.kind is p.VAR_POSITIONAL else p.default
      x = odd if p.name == argument else self.value(p.name, plain)
      if p.kind is p.VAR_POSITIONAL:
        args += [odd] if p.name == argument else x
      elif p.kind is p.KEYWORD_ONLY:
        keywords[p.name] = x
      else:
        args.append(x)
    returned = False
    try:
      with jax.set_mesh(MESH()) if self.name.startswith("parallel.") else contextlib.nullcontext():
        result = (inside if self.name in MANUAL else apply)(function, args, keywords)
      returned = True
      if self.name in USED:
        USED[self.name](result)
      elif isinstance(result, Iterator) and result is not odd:
        next(result, None)
    except NnxParallelError as error:
      frames = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
      return "ours" if frames[-1] == __name__ or returned else f"ours, below {frames[-1]}"
    except AssertionError:
      return "works" if self.name.startswith("testing.") else "AssertionError"  # it is for tests
    except Exception as error:  # noqa: BLE001
      if is_users(error):
        return "users"
      return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "works"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  return Files(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A folder for the files that odd names make, and jax's settings as they were."""
  monkeypatch.chdir(tmp_path)
  kept = {name: getattr(jax.config, name) for name in SETTINGS}
  jax.config.update("jax_traceback_filtering", "auto")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    yield
  for name, value in kept.items():
    jax.config.update(name, value)


SETTINGS = [f"jax_{name}" for name in (
  "traceback_filtering", "compilation_cache_dir", "enable_compilation_cache",
  "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes",
)]  # fmt: skip


@pytest.mark.each_case
@pytest.mark.usefixtures("here")
@pytest.mark.auto_axes("the arguments that work are of Auto meshes")
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in FED])
def test_a_wrong_argument_is_an_error_of_this_package(name, files):
  call = Call(name, files)
  assert call() == "works"
  found = {
    f"{argument}={value}": call(argument, VALUES[value])
    for argument, value in itertools.product(call.arguments, VALUES)
  }
  raw = {one: how for one, how in found.items() if how not in ("works", "ours", "users")}
  assert not raw, "\n".join(f"{one}: {how}" for one, how in raw.items())
  assert "ours" in found.values() or name in NEVER_WRONG


def test_every_public_function_is_fed_or_has_a_reason(files):
  known = {*FED, *MADE_BY_US, *NOT_FED}
  without = {name for name, (function, _) in public_callables().items() if not arguments_of(function)}
  assert public_callables().keys() == known | without
  count = sum(len(Call(name, files).arguments) for name in FED)
  text = f"{len(FED)} functions, {count} arguments, {len(VALUES)} odd values: {count * len(VALUES):,} calls"
  assert text in (Path(__file__).parents[1] / "DEFECTS.md").read_text(), text
