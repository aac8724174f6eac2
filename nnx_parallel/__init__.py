"""Parallelism for Flax NNX: any module, any mesh, one plan.

`plan` decides the layout of every Variable and explains it; everything else reads that plan.
"""

from etils import epy

__version__ = "0.1.0rc1"

# A name is imported when it is first used: help and usage errors of the command line do not wait for jax.
with epy.lazy_api_imports(globals()):
  from nnx_parallel import errors, hosts, interop, loop, parallel, presets, recipes, report, testing, verify
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.core.mesh import abstract_mesh, describe_mesh, make_mesh
  from nnx_parallel.create.constructor import create_sharded_model, unsharded
  from nnx_parallel.create.reshard import from_arrays, reshard
  from nnx_parallel.decode.generate import Generator, generator
  from nnx_parallel.decode.loops import Generated
  from nnx_parallel.decode.sampling import Sampling
  from nnx_parallel.errors import NnxParallelError, NnxParallelWarning
  from nnx_parallel.hosts.bringup import init_distributed
  from nnx_parallel.hosts.compilation_cache import compilation_cache
  from nnx_parallel.hosts.data import batches, shard_batch
  from nnx_parallel.infer.rules import infer_rules
  from nnx_parallel.layers.layers import with_layers
  from nnx_parallel.layers.pipeline import Pipeline
  from nnx_parallel.layers.remat import Remat
  from nnx_parallel.layout.constrain import constrain, use_rules
  from nnx_parallel.layout.leaf import LeafPlan
  from nnx_parallel.layout.plan import Plan
  from nnx_parallel.layout.planning import plan
  from nnx_parallel.layout.resolve import resolve_spec
  from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer
  from nnx_parallel.loop.fit import fit
  from nnx_parallel.loop.sums import evaluate
  from nnx_parallel.loop.task import Task, task
  from nnx_parallel.optimizers.loss_scale import loss_scale_of, with_loss_scale
  from nnx_parallel.optimizers.precision import Precision
  from nnx_parallel.optimizers.wrappers import ema_of, skip_nonfinite, with_ema, with_masters
  from nnx_parallel.report.compile_report import compile_report
  from nnx_parallel.report.layout_check import check_layout
  from nnx_parallel.report.memory import memory_plan
  from nnx_parallel.report.search import search
  from nnx_parallel.rules.fallback import fsdp, replicate, require_names
  from nnx_parallel.rules.inputs import InputRules
  from nnx_parallel.rules.logical import LogicalRules
  from nnx_parallel.rules.paths import PathRules
  from nnx_parallel.rules.ruleset import RuleSet
  from nnx_parallel.train.losses import weighted
  from nnx_parallel.train.step import EvalStep, TrainStep, eval_step, train_step
  from nnx_parallel.verify.check_gradients import check_gradients
  from nnx_parallel.verify.check_step import check_step

__all__ = [
  "Checkpointer",
  "EvalStep",
  "Generated",
  "Generator",
  "InputRules",
  "LeafPlan",
  "LogicalRules",
  "NnxParallelError",
  "NnxParallelWarning",
  "PathRules",
  "Pipeline",
  "Plan",
  "Precision",
  "Remat",
  "RuleSet",
  "Sampling",
  "ShardedOptimizer",
  "Task",
  "TrainStep",
  "abstract_mesh",
  "batches",
  "check_gradients",
  "check_layout",
  "check_step",
  "compilation_cache",
  "compile_report",
  "constrain",
  "create_sharded_model",
  "describe_mesh",
  "ema_of",
  "errors",
  "eval_step",
  "evaluate",
  "fit",
  "from_arrays",
  "fsdp",
  "generator",
  "hosts",
  "infer_rules",
  "init_distributed",
  "interop",
  "loop",
  "loss_scale_of",
  "make_mesh",
  "memory_plan",
  "parallel",
  "plan",
  "presets",
  "recipes",
  "replicate",
  "report",
  "require_names",
  "reshard",
  "resolve_spec",
  "search",
  "shard_batch",
  "skip_nonfinite",
  "task",
  "testing",
  "train_step",
  "unsharded",
  "use_rules",
  "verify",
  "weighted",
  "with_ema",
  "with_layers",
  "with_loss_scale",
  "with_masters",
]
