"""Parallel schemes that a model calls: pipelines, attention, experts, vocabularies and collectives."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.attention.call import attention
  from nnx_parallel.hosts.send import send
  from nnx_parallel.layers.pipeline import Schedule
  from nnx_parallel.schemes.collectives import gather_parameters, map_kernel, map_shards
  from nnx_parallel.schemes.context import context_attention
  from nnx_parallel.schemes.expert_functions import mlp_experts, ragged_dot
  from nnx_parallel.schemes.experts import experts
  from nnx_parallel.schemes.per_matrix import per_matrix
  from nnx_parallel.schemes.pipeline import pipeline
  from nnx_parallel.schemes.routing import Routing, balanced_bias, route
  from nnx_parallel.schemes.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
  from nnx_parallel.schemes.zigzag import zigzag
  from nnx_parallel.train.axes import auto_axes
  from nnx_parallel.train.own_step import gather_on_read
  from nnx_parallel.train.rng import fold_rng_over_axis

__all__ = [
  "Routing",
  "Schedule",
  "attention",
  "auto_axes",
  "balanced_bias",
  "context_attention",
  "experts",
  "fold_rng_over_axis",
  "gather_on_read",
  "gather_parameters",
  "map_kernel",
  "map_shards",
  "mlp_experts",
  "per_matrix",
  "pipeline",
  "ragged_dot",
  "route",
  "send",
  "vocabulary_cross_entropy",
  "vocabulary_embedding",
  "zigzag",
]
