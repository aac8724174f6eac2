"""Parallelism for Flax NNX: any module, any mesh, one plan.

`plan` decides the layout of every Variable and explains it; everything else reads that plan.
"""

from etils import epy

# A name is imported when it is first used: help and usage errors of the command line do not wait for jax.
with epy.lazy_api_imports(globals()):
  from nnx_parallel import errors
  from nnx_parallel.checkpoint.checkpointer import Checkpointer
  from nnx_parallel.core.mesh import abstract_mesh, describe_mesh, make_mesh
  from nnx_parallel.create.cache import compilation_cache
  from nnx_parallel.create.constructor import create_sharded_model, unsharded
  from nnx_parallel.create.layout_check import check_layout
  from nnx_parallel.create.reshard import from_arrays, reshard
  from nnx_parallel.decode.generate import Generator, generator
  from nnx_parallel.decode.loops import Generated
  from nnx_parallel.decode.sampling import Beams, Sampling
  from nnx_parallel.errors import NnxParallelError, NnxParallelWarning
  from nnx_parallel.hosts.agree import barrier, broadcast, main_process, once_per_host
  from nnx_parallel.hosts.bringup import Processes, init_distributed
  from nnx_parallel.hosts.data import batches, shard_batch
  from nnx_parallel.hosts.fetch import to_host
  from nnx_parallel.hosts.stop import StopSignals
  from nnx_parallel.layers.layers import Remat, with_layers
  from nnx_parallel.layers.pipeline import Pipeline, Schedule
  from nnx_parallel.layout.constrain import constrain, use_rules
  from nnx_parallel.layout.infer import infer_rules
  from nnx_parallel.layout.leaf import LeafPlan
  from nnx_parallel.layout.plan import Plan
  from nnx_parallel.layout.planning import plan
  from nnx_parallel.layout.resolve import resolve_spec
  from nnx_parallel.layout.sharded_optimizer import ShardedOptimizer
  from nnx_parallel.loop.fit import FitResult, fit
  from nnx_parallel.loop.metrics import MetricsLog, TensorBoardLog, read_metrics
  from nnx_parallel.loop.recorder import EarlyStop
  from nnx_parallel.loop.sums import MetricSums, evaluate
  from nnx_parallel.loop.task import Task, task
  from nnx_parallel.report.chips import Chip, chip
  from nnx_parallel.report.compile_report import CompileReport, compile_report
  from nnx_parallel.report.estimate.memory import MemoryPlan, memory_plan
  from nnx_parallel.report.estimate.roofline import StepTime, predict_time
  from nnx_parallel.report.html import plan_page
  from nnx_parallel.report.search.search import SearchResult, search
  from nnx_parallel.report.topology import topology_mesh
  from nnx_parallel.rules import presets
  from nnx_parallel.rules.fallback import fsdp, replicate, require_names
  from nnx_parallel.rules.inputs import InputRules
  from nnx_parallel.rules.logical import LogicalRules
  from nnx_parallel.rules.paths import PathRules
  from nnx_parallel.rules.ruleset import RuleSet
  from nnx_parallel.schemes.collectives import (
    all_gather_matmul,
    gather_parameters,
    map_kernel,
    map_shards,
    matmul_reduce_scatter,
  )
  from nnx_parallel.schemes.context import context_attention, zigzag
  from nnx_parallel.schemes.experts import experts
  from nnx_parallel.schemes.pipeline import pipeline
  from nnx_parallel.schemes.routing import Routing, balanced_bias, route
  from nnx_parallel.schemes.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
  from nnx_parallel.train.hold import with_correct_convolutions
  from nnx_parallel.train.loss_scale import loss_scale_of, with_loss_scale
  from nnx_parallel.train.losses import weighted
  from nnx_parallel.train.precision import Precision
  from nnx_parallel.train.rng import fold_rng_over_axis
  from nnx_parallel.train.step import EvalStep, TrainStep, eval_step, train_step
  from nnx_parallel.train.wrappers import ema_of, skip_nonfinite, with_ema, with_masters
  from nnx_parallel.verify.check_gradients import check_gradients
  from nnx_parallel.verify.check_step import StepCheck, StepDifference, check_step
  from nnx_parallel.verify.gradient_check import GradientCheck, GradientComparison

__all__ = [
  "Beams",
  "Checkpointer",
  "Chip",
  "CompileReport",
  "EarlyStop",
  "EvalStep",
  "FitResult",
  "Generated",
  "Generator",
  "GradientCheck",
  "GradientComparison",
  "InputRules",
  "LeafPlan",
  "LogicalRules",
  "MemoryPlan",
  "MetricSums",
  "MetricsLog",
  "NnxParallelError",
  "NnxParallelWarning",
  "PathRules",
  "Pipeline",
  "Plan",
  "Precision",
  "Processes",
  "Remat",
  "Routing",
  "RuleSet",
  "Sampling",
  "Schedule",
  "SearchResult",
  "ShardedOptimizer",
  "StepCheck",
  "StepDifference",
  "StepTime",
  "StopSignals",
  "Task",
  "TensorBoardLog",
  "TrainStep",
  "abstract_mesh",
  "all_gather_matmul",
  "balanced_bias",
  "barrier",
  "batches",
  "broadcast",
  "check_gradients",
  "check_layout",
  "check_step",
  "chip",
  "compilation_cache",
  "compile_report",
  "constrain",
  "context_attention",
  "create_sharded_model",
  "describe_mesh",
  "ema_of",
  "errors",
  "eval_step",
  "evaluate",
  "experts",
  "fit",
  "fold_rng_over_axis",
  "from_arrays",
  "fsdp",
  "gather_parameters",
  "generator",
  "infer_rules",
  "init_distributed",
  "loss_scale_of",
  "main_process",
  "make_mesh",
  "map_kernel",
  "map_shards",
  "matmul_reduce_scatter",
  "memory_plan",
  "once_per_host",
  "pipeline",
  "plan",
  "plan_page",
  "predict_time",
  "presets",
  "read_metrics",
  "replicate",
  "require_names",
  "reshard",
  "resolve_spec",
  "route",
  "search",
  "shard_batch",
  "skip_nonfinite",
  "task",
  "to_host",
  "topology_mesh",
  "train_step",
  "unsharded",
  "use_rules",
  "vocabulary_cross_entropy",
  "vocabulary_embedding",
  "weighted",
  "with_correct_convolutions",
  "with_ema",
  "with_layers",
  "with_loss_scale",
  "with_masters",
  "zigzag",
]
