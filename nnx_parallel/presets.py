"""Ready-made rules: plain `RuleSet`s and `PathRules`, to print, edit and combine.

*Layouts* map logical names to mesh axes (`fsdp_tensor`, ...). *Model tables* give logical names to the
parameters of a family of models without annotations (`llama`, ...). Use one of each:
`[presets.llama(), presets.fsdp_tensor()]` is a complete `rules` argument.

The names: `batch`, `seq`, `embed` (the residual width), `mlp` (the hidden width), `heads`, `kv_heads`,
`vocab`, `features` (the output dim of any other layer), `expert`, `layers`.
"""

from __future__ import annotations

from typing import Any

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import ShardingError
from nnx_parallel.rules.fallback import MIN_SIZE, Fallback, replicate
from nnx_parallel.rules.fallback import fsdp as fsdp_fallback
from nnx_parallel.rules.inputs import InputRules
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.paths import PathRules
from nnx_parallel.rules.ruleset import RuleSet

__all__ = [
  "context",
  "data_parallel",
  "expert",
  "fsdp",
  "fsdp_tensor",
  "gpt",
  "layers",
  "llama",
  "pipeline",
  "t5",
  "vit",
]

first = LogicalRules.first


@check_arguments(ShardingError)
def data_parallel(data: str = "data") -> RuleSet:
  """Replicates the model and shards the batch. Names on parameters are ignored.

  Args:
    data: the mesh axis that shards the batch.

  Returns:
    Rules to pass to `plan`, alone or in a list.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.data_parallel()
    [LogicalRules(batch='data', unknown='replicate'), replicate()]
  """
  return _layout(LogicalRules(batch=data, unknown="replicate"), replicate())


@check_arguments(ShardingError)
def fsdp(axis: str = "fsdp", replica: str | None = None, *, min_size: int = MIN_SIZE) -> RuleSet:
  """FSDP (ZeRO-3): one mesh axis shards the batch, the parameters and the optimizer state.

  With `replica`, there is FSDP inside each slice, and the slices hold replicas, so only gradients cross the
  slow network.

  Args:
    axis: the mesh axis of FSDP, which lies inside a slice.
    replica: the mesh axis across slices, if any: `make_mesh(replica=2, fsdp=-1, dcn=dict(replica=2))`.
    min_size: parameters with at most this many elements are replicated.

  Returns:
    Rules to pass to `plan`.

  Source: ZeRO, arXiv:1910.02054; hybrid sharding, PyTorch FSDP, arXiv:2304.11277.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.fsdp(replica="replica").logical
    LogicalRules(batch=('replica', 'fsdp'), unknown='replicate')
  """
  batch = axis if replica is None else (replica, axis)
  return _layout(LogicalRules(batch=batch, unknown="replicate"), fsdp_fallback(axis, min_size=min_size))


@check_arguments(ShardingError)
def fsdp_tensor(
  data: str = "data", fsdp: str = "fsdp", tensor: str = "tensor", *, min_size: int = MIN_SIZE
) -> RuleSet:
  """Tensor parallelism by logical names, combined with FSDP and data parallelism.

  If the mesh lacks one of these axes, the rules for this axis are left out, and a note in the plan says so.

  `tensor` shards hidden widths and heads; `fsdp` then shards the largest free dim of each large parameter.

  Args:
    data: mesh axis that shards only the batch.
    fsdp: mesh axis that shards the batch and the parameters.
    tensor: mesh axis that shards `mlp`, `heads`, `kv_heads`, `vocab` and `features`.
    min_size: parameters with at most this many elements are not sharded over `fsdp`.

  Returns:
    Rules to pass to `plan`.

  Source: Megatron-LM, arXiv:1909.08053; GSPMD, arXiv:2105.04663.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.fsdp_tensor().logical["kv_heads"]
    (('tensor',), ())
  """
  return _layout(
    _by_name(tensor, batch=first((data, fsdp), fsdp, data)), fsdp_fallback(fsdp, min_size=min_size)
  )


@check_arguments(ShardingError)
def context(
  data: str = "data",
  context: str | tuple[str, ...] = "context",
  tensor: str | None = None,
  *,
  min_size: int = MIN_SIZE,
) -> RuleSet:
  """Shards the positions of inputs and activations, for sequences that are too long for one device.

  No parameter is sharded over `context`. With `train_step(attention="ring")`, or `context_attention` in the
  model, each device computes the attention of its own positions. Otherwise, the compiler decides how
  attention is computed.

  Args:
    data: mesh axis that shards the batch and, by FSDP, the parameters.
    context: mesh axis that shards the `seq` dim of inputs and activations, or several axes, for
      `context_attention(heads_axis=)`.
    tensor: mesh axis for hidden widths and heads, if any.
    min_size: parameters with at most this many elements are not sharded over `data`.

  Returns:
    Rules to pass to `plan`. Inputs of two or three dims are sharded as (batch, seq, ...). Their length must
    be a multiple of the axis size, so cut inputs and labels out of a sequence before `shard_batch`.

  Source: sequence parallelism, arXiv:2105.13120; ring attention, arXiv:2310.01889.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.context().inputs
    InputRules(map_1d=('batch',), map_2d=('batch', 'seq'), map_3d=('batch', 'seq', None))
  """
  inputs = InputRules(map_1d=("batch",), map_2d=("batch", "seq"), map_3d=("batch", "seq", None))
  fallback = fsdp_fallback(data, min_size=min_size)
  return _layout(_by_name(tensor, batch=data, seq=context), fallback, inputs)


@check_arguments(ShardingError)
def pipeline(
  data: str = "data", stage: str = "stage", tensor: str | None = None, *, min_size: int = MIN_SIZE
) -> RuleSet:
  """Shards the `layers` dim of stacked layers over the stages of a pipeline.

  Use it with `train_step(pipeline=stage)`, `generator(pipeline=stage)` or `nxp.parallel.pipeline`. `stage`
  also shards the largest free dim of other large parameters. So no device holds all layers even if the layers
  are separate modules; each step then moves them to their stages by all-to-alls. `data` shards only the
  batch, because weights that it shards would be gathered in each tick.

  Args:
    data: mesh axis that shards the batch.
    stage: mesh axis that shards the layers.
    tensor: mesh axis for hidden widths and heads, if any.
    min_size: parameters with at most this many elements are replicated.

  Returns:
    Rules to pass to `plan`.

  Source: GPipe, arXiv:1811.06965.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.pipeline().logical["layers"]
    (('stage',), ())
  """
  return _layout(
    _by_name(tensor, batch=data, layers=first(stage, None)), fsdp_fallback(stage, min_size=min_size)
  )


@check_arguments(ShardingError)
def expert(
  data: str = "data", expert: str = "expert", tensor: str | None = None, *, min_size: int = MIN_SIZE
) -> RuleSet:
  """Shards the `expert` dim of expert weights over a mesh axis that also shards the batch.

  These rules are only the layout; `nxp.parallel.route` chooses the experts, and `nxp.parallel.experts`
  exchanges the tokens. `experts` gathers weights that are also sharded over `data`, and keeps them sharded
  over `tensor`.

  Args:
    data: mesh axis that shards the batch and, by FSDP, the parameters.
    expert: mesh axis that shards the batch and the experts.
    tensor: mesh axis for hidden widths and heads, if any.
    min_size: parameters with at most this many elements are not sharded over `data`.

  Returns:
    Rules to pass to `plan`.

  Source: GShard, arXiv:2006.16668.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.expert().logical["batch"]
    (('data', 'expert'),)
  """
  logical = _by_name(tensor, batch=(data, expert), expert=expert)
  return _layout(logical, fsdp_fallback(data, min_size=min_size))


def _layout(logical: LogicalRules, fallback: Fallback, inputs: InputRules | None = None) -> RuleSet:
  """Rules whose axes a mesh may lack, except the batch axes."""
  return RuleSet(logical, (), fallback, inputs, frozenset({*logical, "fallback"} - {"batch"}))


def _by_name(tensor: str | None, **rules: Any) -> LogicalRules:
  """Rules for all names of the model tables; `tensor` splits hidden widths and heads."""
  # Few key-value heads and odd vocabularies are common, so these may be replicated; the plan shows it.
  soft = None if tensor is None else first(tensor, None)
  split = {"mlp": tensor, "heads": tensor, "kv_heads": soft, "vocab": soft, "features": soft}
  return LogicalRules(
    {
      "batch": rules.pop("batch"),
      "seq": None,
      "embed": None,
      "layers": None,
      "expert": first("expert", None),
      **rules,
      **split,
    }
  )


_NORM = r"(?i).*(norm|ln|layernorm|rmsnorm)(_?\w+)?"


def layers() -> PathRules:
  """Names for the layers of `flax.nnx`, which it finds only by the names of their Variables.

  The projections of `MultiHeadAttention`, and others called `q`, `k_proj`, `wo` and the like, get `heads` or
  `kv_heads`, so that no rule shards the head dim, over which attention sums. `Embed` gets `vocab`; the last
  (output) dim of any other kernel (`Linear`, `LinearGeneral`, `Einsum`, `Conv`, LSTM and GRU cells) and of
  LoRA's second factor gets `features`. Biases, scales, statistics and LoRA's first factor are replicated. If
  there is a table for the family of the model (`llama`, `gpt`, `vit`, `t5`), it shards pairs of layers
  better.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.layers().match(("mlp", "up", "kernel")).names
    ('...', 'features')
  """
  return PathRules(
    [
      (("query|key|value|q|q_proj|wq", "kernel"), ("embed", "heads", ...)),
      (("query|key|value|q|q_proj|wq", "bias"), ("heads", ...)),
      (("k|v|(k|v)_proj|wk|wv", "kernel"), ("embed", "kv_heads", ...)),
      (("k|v|(k|v)_proj|wk|wv", "bias"), ("kv_heads", ...)),
      (("out|o|o_proj|wo", "kernel"), ("heads", ..., "embed")),
      (("embedding",), ("vocab", "embed")),
      ((r"(\w+_)?lora_b",), (None, "features")),
      (("kernel",), (..., "features")),
      ((r"bias|scale|mean|var|(\w+_)?lora_a|negative_slope|scales",), None),
    ],
    optional=True,
  )


def t5() -> PathRules:
  """Names for T5-shaped encoder-decoders with the path parts of T5X and Hugging Face.

  The original table, with its mesh axis `mp`, is this table with
  `LogicalRules(embed=None, heads="mp", mlp="mp", vocab="mp")`.

  Returns:
    Path rules, to combine with a layout.

  Source: the T5 table of Hugging Face's `partition_rules`, as used with T5X.

  Example:
    >>> import nnx_parallel as nxp
    >>> path = ("encoder", "block", 0, "SelfAttention", "q", "kernel")
    >>> nxp.presets.t5().match(path).names
    ('embed', 'heads')
  """
  return PathRules(
    [
      (("relative_attention_bias", "embedding"), None),
      (("shared", "embedding"), ("vocab", "embed")),
      (("SelfAttention|EncDecAttention", "q|k|v", "kernel"), ("embed", "heads")),
      (("SelfAttention|EncDecAttention", "o", "kernel"), ("heads", "embed")),
      (("DenseReluDense|DenseGatedActDense", r"wi(_\d)?", "kernel"), ("embed", "mlp")),
      (("DenseReluDense|DenseGatedActDense", "wo", "kernel"), ("mlp", "embed")),
      (("layer_norm|final_layer_norm", "weight|scale"), None),
      (("lm_head", "kernel"), ("embed", "vocab")),
    ],
    optional=True,
  )


def llama() -> PathRules:
  """Names for Llama-shaped decoders: gated MLP or Mixtral's experts, grouped query heads, RMSNorm.

  Kernels may have two dims (`Linear`), or three with heads and head size as separate dims.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.llama().match(("layers", 0, "self_attn", "k_proj", "kernel")).names
    ('embed', 'kv_heads', '...')
  """
  return PathRules(
    [
      (("q_proj|query|wq", "kernel"), ("embed", "heads", ...)),
      (("(k|v)_proj|key|value|wk|wv", "kernel"), ("embed", "kv_heads", ...)),
      (("o_proj|out|wo", "kernel"), ("heads", ..., "embed")),
      (("block_sparse_moe", "gate", "kernel"), ("embed", None)),
      (("gate_proj|up_proj|gate|up|w1|w3", "kernel"), ("embed", "mlp")),
      (("down_proj|down|w2", "kernel"), ("mlp", "embed")),
      (("block_sparse_moe", "w1|w3"), ("expert", "embed", "mlp")),
      (("block_sparse_moe", "w2"), ("expert", "mlp", "embed")),
      (("embed_tokens|tok_embeddings|embed|token_embedding", "embedding"), ("vocab", "embed")),
      (("lm_head|output|head", "kernel"), ("embed", "vocab")),
      ((_NORM, "scale|weight"), None),
      (("bias",), None),
    ],
    optional=True,
  )


def gpt() -> PathRules:
  """Names for GPT-shaped decoders: learned positions, LayerNorm, biases, fused or separate attention.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> rules = nxp.presets.gpt()
    >>> rules.match(("h", 0, "attn", "c_proj", "kernel")).names
    ('heads', '...', 'embed')
    >>> rules.match(("h", 0, "mlp", "c_proj", "kernel")).names
    ('mlp', 'embed')
  """
  attention = "attn|attention|self_attention|mha"
  return PathRules(
    [
      ((attention, "c_attn|qkv|q_proj|k_proj|v_proj|query|key|value", "kernel"), ("embed", "heads", ...)),
      ((attention, "c_attn|qkv|q_proj|k_proj|v_proj|query|key|value", "bias"), ("heads", ...)),
      ((attention, "c_proj|out_proj|out|proj", "kernel"), ("heads", ..., "embed")),
      (("mlp|ffn|feed_forward", "c_fc|fc|fc1|fc_in|up|linear1", "kernel"), ("embed", "mlp")),
      (("mlp|ffn|feed_forward", "c_fc|fc|fc1|fc_in|up|linear1", "bias"), ("mlp",)),
      (("mlp|ffn|feed_forward", "c_proj|out|fc2|fc_out|down|linear2", "kernel"), ("mlp", "embed")),
      # An MLP whose layers are in the block itself, next to the attention.
      ((r"(\w*_)?\d+", "c_fc|fc|fc1|fc_in|up|linear1", "kernel"), ("embed", "mlp")),
      ((r"(\w*_)?\d+", "c_fc|fc|fc1|fc_in|up|linear1", "bias"), ("mlp",)),
      ((r"(\w*_)?\d+", "out|fc2|fc_out|down|linear2", "kernel"), ("mlp", ..., "embed")),
      (("wte|token_embedding|tok_emb|embed", "embedding"), ("vocab", "embed")),
      (("wpe|position_embedding|pos_emb", "embedding"), None),
      (("lm_head|head", "kernel"), ("embed", "vocab")),
      ((_NORM, "scale|bias"), None),
      (("bias",), None),
    ],
    optional=True,
  )


def vit() -> PathRules:
  """Names for ViT-shaped encoders: patch convolution, class token, `MultiHeadAttention`, MLP, small head.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.vit().match(("blocks", 0, "attn", "out", "kernel")).names
    ('heads', '...', 'embed')
  """
  return PathRules(
    [
      (("patch_embeddings?|patch_embed|conv_proj", ".*kernel"), (..., "embed")),
      ((r"pos(ition)?_embed(ding)?s?|cls(_token)?|class_token",), None),
      (("q_proj|k_proj|v_proj|query|key|value|qkv", "kernel"), ("embed", "heads", ...)),
      (("q_proj|k_proj|v_proj|query|key|value|qkv", "bias"), ("heads", ...)),
      (("out|out_proj|o_proj|proj", "kernel"), ("heads", ..., "embed")),
      (("fc1|linear1|up|dense1", "kernel"), ("embed", "mlp")),
      (("fc1|linear1|up|dense1", "bias"), ("mlp",)),
      (("fc2|linear2|down|dense2", "kernel"), ("mlp", "embed")),
      (("head|classifier", "kernel"), ("embed", None)),
      ((_NORM, "scale|bias"), None),
      (("bias",), None),
    ],
    optional=True,
  )
