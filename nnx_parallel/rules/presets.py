"""Ready-made rules: plain `RuleSet`s and `PathRules`, to print, edit and combine.

Two kinds, which go together: *layouts* say which mesh axes the logical names get (`fsdp_tensor`, ...), and
*model tables* give logical names to the parameters of a family of models that nobody annotated (`llama`,
...). `[presets.llama(), presets.fsdp_tensor()]` is a complete `rules` argument.

The names: `batch`, `seq`, `embed` (the residual width), `mlp` (the hidden width), `heads`, `kv_heads`,
`vocab`, `features` (the output of a layer whose part is unknown), `expert`, `stage`, `layers`.
"""

from __future__ import annotations

from typing import Any

from nnx_parallel.core.axes import Entry
from nnx_parallel.rules.fallback import fsdp as fsdp_fallback
from nnx_parallel.rules.fallback import replicate
from nnx_parallel.rules.inputs import InputRules
from nnx_parallel.rules.logical import LogicalRules
from nnx_parallel.rules.paths import PathRules
from nnx_parallel.rules.ruleset import RuleSet

__all__ = [
  "data_parallel",
  "expert",
  "fsdp_tensor",
  "gpt",
  "hybrid",
  "layers",
  "llama",
  "pipeline",
  "sequence",
  "t5",
  "vit",
  "whole_mesh_inputs",
  "zero",
]
MIN_SIZE = 2**18


def data_parallel(data: str = "data") -> RuleSet:
  """Every device holds the whole model and its share of the batch; names on parameters are ignored.

  Args:
    data: the mesh axis that splits the batch.

  Returns:
    Rules to pass to `plan`, alone or in a list.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.data_parallel()
    [LogicalRules(batch='data', unknown='whole'), replicate()]
  """
  return RuleSet(LogicalRules(batch=data, unknown="whole"), fallback=replicate())


def zero(data: str = "data", *, min_size: int = MIN_SIZE) -> RuleSet:
  """ZeRO-3 on one axis: the axis that splits the batch also splits parameters and optimizer state.

  The stages that split the optimizer state or the gradients alone are options of the optimizer, since they
  leave the parameters whole.

  Args:
    data: the mesh axis.
    min_size: parameters with at most this many elements stay whole.

  Returns:
    Rules to pass to `plan`.

  Source: ZeRO, arXiv:1910.02054.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.zero()
    [LogicalRules(batch='data', unknown='whole'), fsdp('data', min_size=262144, extend=True)]
  """
  return RuleSet(LogicalRules(batch=data, unknown="whole"), fallback=fsdp_fallback(data, min_size=min_size))


def hybrid(replica: str = "replica", fsdp: str = "fsdp", *, min_size: int = MIN_SIZE) -> RuleSet:
  """FSDP inside a slice, replicas across slices: only gradients cross the slow network.

  Args:
    replica: the mesh axis across slices: `make_mesh(replica=2, fsdp=-1, dcn=dict(replica=2))`.
    fsdp: the mesh axis inside a slice.
    min_size: parameters with at most this many elements stay whole.

  Returns:
    Rules to pass to `plan`.

  Source: hybrid sharding, PyTorch FSDP, arXiv:2304.11277.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.hybrid().logical
    LogicalRules(batch=('replica', 'fsdp'), unknown='whole')
  """
  return RuleSet(
    LogicalRules(batch=(replica, fsdp), unknown="whole"), fallback=fsdp_fallback(fsdp, min_size=min_size)
  )


def fsdp_tensor(
  data: str = "data", fsdp: str = "fsdp", tensor: str = "tensor", *, min_size: int = MIN_SIZE
) -> RuleSet:
  """Tensor parallelism by name inside FSDP inside data parallelism. The mesh may lack `data`.

  Hidden widths and heads are split over `tensor`; each large parameter is then split over `fsdp` along its
  largest dim that is still free.

  Args:
    data: mesh axis that splits only the batch.
    fsdp: mesh axis that splits the batch and the parameters.
    tensor: mesh axis that splits `mlp`, `heads`, `kv_heads`, `vocab` and `features`.
    min_size: parameters with at most this many elements are not split over `fsdp`.

  Returns:
    Rules to pass to `plan`.

  Source: Megatron-LM, arXiv:1909.08053; GSPMD, arXiv:2105.04663.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.fsdp_tensor().logical["kv_heads"]
    (('tensor',), ())
  """
  logical = LogicalRules(
    batch=[(data, fsdp), fsdp], seq=None, embed=None, layers=None, **_tensor_names(tensor)
  )
  return RuleSet(logical, fallback=fsdp_fallback(fsdp, min_size=min_size))


def sequence(
  data: str = "data",
  sequence: str = "sequence",
  tensor: str | None = None,
  *,
  min_size: int = MIN_SIZE,
) -> RuleSet:
  """Activations that are laid out by name are split along `seq`, parameters over both axes by FSDP.

  A layout, not a scheme: there is no ring attention. Attention over a split sequence is left to the compiler,
  which gathers the keys and values of the whole sequence on each device. What no name reaches
  (`nxp.constrain`, the inputs) is laid out as the compiler likes.

  Args:
    data: mesh axis that splits the batch.
    sequence: mesh axis that splits the `seq` dim of activations and inputs.
    tensor: mesh axis for hidden widths and heads, if any.
    min_size: parameters with at most this many elements stay whole.

  Returns:
    Rules to pass to `plan`, with inputs of two or more dims split as (batch, seq, ...).

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.sequence().inputs
    InputRules(map_1d=('batch',), map_2d=('batch', 'seq'), map_3d=('batch', 'seq', None))
  """
  logical = LogicalRules(batch=data, seq=sequence, embed=None, layers=None, **_tensor_names(tensor))
  inputs = InputRules(map_1d=("batch",), map_2d=("batch", "seq"), map_3d=("batch", "seq", None))
  return RuleSet(logical, fallback=fsdp_fallback((data, sequence), min_size=min_size), inputs=inputs)


def expert(
  data: str = "data", expert: str = "expert", tensor: str | None = None, *, min_size: int = MIN_SIZE
) -> RuleSet:
  """The `expert` dim of expert weights over one axis, which also splits the batch.

  A layout, not a scheme: routing, and the exchange of tokens, are your model's and the compiler's.

  Args:
    data: mesh axis that splits the batch and, by FSDP, the parameters.
    expert: mesh axis that splits the batch and the experts.
    tensor: mesh axis for hidden widths and heads, if any.
    min_size: parameters with at most this many elements are not split over `data`.

  Returns:
    Rules to pass to `plan`.

  Source: GShard, arXiv:2006.16668.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.expert().logical["batch"]
    (('data', 'expert'),)
  """
  logical = LogicalRules(
    batch=(data, expert), seq=None, embed=None, layers=None, expert=expert, **_tensor_names(tensor)
  )
  return RuleSet(logical, fallback=fsdp_fallback(data, min_size=min_size))


def pipeline(
  data: str = "data", stage: str = "stage", tensor: str | None = None, *, min_size: int = MIN_SIZE
) -> RuleSet:
  """The stage (or stacked layer) dim of parameters over one axis, to save memory.

  A layout, not a scheme: nothing is pipelined. In a scan over the layers each device computes all of them,
  and gathers their weights: on data=2 x stage=4, four times the FLOPs per device of data=8.

  Args:
    data: mesh axis that splits the batch and, by FSDP, the parameters.
    stage: mesh axis that splits the layers; it splits no batch.
    tensor: mesh axis for hidden widths and heads, if any.
    min_size: parameters with at most this many elements are not split over `data`.

  Returns:
    Rules to pass to `plan`.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.pipeline().logical["layers"]
    (('stage',), ())
  """
  logical = LogicalRules(
    batch=data, seq=None, embed=None, stage=stage, layers=[stage, None], **_tensor_names(tensor)
  )
  return RuleSet(logical, fallback=fsdp_fallback(data, min_size=min_size))


def whole_mesh_inputs() -> InputRules:
  """Inputs split along the batch dim over every axis of the mesh; the same as `InputRules.whole_mesh()`.

  Returns:
    Rules for inputs, to add to other rules.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.whole_mesh_inputs()
    InputRules.whole_mesh()
  """
  return InputRules.whole_mesh()


def _tensor_names(tensor: str | None) -> dict[str, Any]:
  # Few key-value heads and odd vocabularies are common, so those two may stay whole; the plan says so.
  soft = None if tensor is None else [tensor, None]
  return {"mlp": tensor, "heads": tensor, "kv_heads": soft, "vocab": soft, "features": soft}


_NORM = r"(?i).*(norm|ln|layernorm|rmsnorm)(_?\w+)?"


def layers(
  *, embed: Entry = "embed", heads: Entry = "heads", vocab: Entry = "vocab", features: Entry = "features"
) -> PathRules:
  """Names for stock NNX layers, wherever they are, by the names of their Variables alone.

  Attention projections of `MultiHeadAttention` get `heads`; `Embed` gets `vocab`; any other kernel (`Linear`,
  `LinearGeneral`, `Einsum`, `Conv`, LSTM and GRU cells) gets `features` on its last dim, its output; so does
  LoRA's second factor. Biases, scales, statistics and LoRA's first factor stay whole. A table for the
  model's family splits pairs of layers better: `llama`, `gpt`, `vit`, `t5`.

  Args:
    embed: name of the residual width.
    heads: name of the heads dim.
    vocab: name of the vocabulary dim.
    features: name of the last dim of other kernels.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.layers().match(("mlp", "up", "kernel")).names
    ('...', 'features')
  """
  return PathRules(
    [
      (("query|key|value", "kernel"), (embed, heads, ...)),
      (("query|key|value", "bias"), (heads, ...)),
      (("out", "kernel"), (heads, ..., embed)),
      (("embedding",), (vocab, embed)),
      (("lora_b",), (None, features)),
      (("kernel",), (..., features)),
      (("bias|scale|mean|var|lora_a|negative_slope|scales",), None),
    ],
    optional=True,
  )


def t5(
  *, embed: Entry = "embed", heads: Entry = "heads", mlp: Entry = "mlp", vocab: Entry = "vocab"
) -> PathRules:
  """Names for T5-shaped encoder-decoders with the path parts of T5X and Hugging Face.

  `t5(embed=None, heads="mp", mlp="mp", vocab="mp")` is the original table with its mesh axis.

  Args:
    embed: name of the residual width.
    heads: name of the width of all heads together.
    mlp: name of the hidden width.
    vocab: name of the vocabulary dim.

  Returns:
    Path rules, to combine with a layout.

  Source: the T5 table of Hugging Face's `partition_rules`, as used with T5X.

  Example:
    >>> import nnx_parallel as nxp
    >>> path = ("encoder", "block", 0, "SelfAttention", "q", "kernel")
    >>> nxp.presets.t5(embed=None, heads="mp").match(path).names
    (None, 'mp')
  """
  return PathRules(
    [
      (("relative_attention_bias", "embedding"), None),
      (("shared", "embedding"), (vocab, embed)),
      (("SelfAttention|EncDecAttention", "q|k|v", "kernel"), (embed, heads)),
      (("SelfAttention|EncDecAttention", "o", "kernel"), (heads, embed)),
      (("DenseReluDense|DenseGatedActDense", r"wi(_\d)?", "kernel"), (embed, mlp)),
      (("DenseReluDense|DenseGatedActDense", "wo", "kernel"), (mlp, embed)),
      (("layer_norm|final_layer_norm", "weight|scale"), None),
      (("lm_head", "kernel"), (embed, vocab)),
    ],
    optional=True,
  )


def llama(
  *,
  embed: Entry = "embed",
  heads: Entry = "heads",
  kv_heads: Entry = "kv_heads",
  mlp: Entry = "mlp",
  vocab: Entry = "vocab",
) -> PathRules:
  """Names for Llama-shaped decoders: gated MLP, grouped query heads, RMSNorm.

  Kernels of two dims (`Linear`) and of three (with heads and head size apart) are both understood.

  Args:
    embed: name of the residual width.
    heads: name of the query heads.
    kv_heads: name of the key and value heads.
    mlp: name of the hidden width.
    vocab: name of the vocabulary dim.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.llama().match(("layers", 0, "self_attn", "k_proj", "kernel")).names
    ('embed', 'kv_heads', '...')
  """
  return PathRules(
    [
      (("q_proj|query|wq", "kernel"), (embed, heads, ...)),
      (("(k|v)_proj|key|value|wk|wv", "kernel"), (embed, kv_heads, ...)),
      (("o_proj|out|wo", "kernel"), (heads, ..., embed)),
      (("gate_proj|up_proj|gate|up|w1|w3", "kernel"), (embed, mlp)),
      (("down_proj|down|w2", "kernel"), (mlp, embed)),
      (("embed_tokens|tok_embeddings|embed|token_embedding", "embedding"), (vocab, embed)),
      (("lm_head|output|head", "kernel"), (embed, vocab)),
      ((_NORM, "scale|weight"), None),
      (("bias",), None),
    ],
    optional=True,
  )


def gpt(
  *, embed: Entry = "embed", heads: Entry = "heads", mlp: Entry = "mlp", vocab: Entry = "vocab"
) -> PathRules:
  """Names for GPT-shaped decoders: learned positions, LayerNorm, biases, fused or separate attention.

  Args:
    embed: name of the residual width.
    heads: name of the attention heads; of a fused kernel, its whole output.
    mlp: name of the hidden width.
    vocab: name of the vocabulary dim.

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
      ((attention, "c_attn|qkv|q_proj|k_proj|v_proj|query|key|value", "kernel"), (embed, heads, ...)),
      ((attention, "c_attn|qkv|q_proj|k_proj|v_proj|query|key|value", "bias"), (heads, ...)),
      ((attention, "c_proj|out_proj|out|proj", "kernel"), (heads, ..., embed)),
      (("mlp|ffn|feed_forward", "c_fc|fc1|fc_in|up|linear1", "kernel"), (embed, mlp)),
      (("mlp|ffn|feed_forward", "c_fc|fc1|fc_in|up|linear1", "bias"), (mlp,)),
      (("mlp|ffn|feed_forward", "c_proj|fc2|fc_out|down|linear2", "kernel"), (mlp, embed)),
      (("wte|token_embedding|tok_emb|embed", "embedding"), (vocab, embed)),
      (("wpe|position_embedding|pos_emb", "embedding"), None),
      (("lm_head|head", "kernel"), (embed, vocab)),
      ((_NORM, "scale|bias"), None),
      (("bias",), None),
    ],
    optional=True,
  )


def vit(*, embed: Entry = "embed", heads: Entry = "heads", mlp: Entry = "mlp") -> PathRules:
  """Names for ViT-shaped encoders: patch convolution, class token, `MultiHeadAttention`, MLP, small head.

  Args:
    embed: name of the residual width.
    heads: name of the attention heads.
    mlp: name of the hidden width.

  Returns:
    Path rules, to combine with a layout.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.presets.vit().match(("blocks", 0, "attn", "out", "kernel")).names
    ('heads', '...', 'embed')
  """
  return PathRules(
    [
      (("patch_embeddings?|patch_embed|conv_proj", ".*kernel"), (..., embed)),
      ((r"pos(ition)?_embed(ding)?s?|cls(_token)?|class_token",), None),
      (("q_proj|k_proj|v_proj|query|key|value|qkv", "kernel"), (embed, heads, ...)),
      (("q_proj|k_proj|v_proj|query|key|value|qkv", "bias"), (heads, ...)),
      (("out|out_proj|o_proj|proj", "kernel"), (heads, ..., embed)),
      (("fc1|linear1|up|dense1", "kernel"), (embed, mlp)),
      (("fc1|linear1|up|dense1", "bias"), (mlp,)),
      (("fc2|linear2|down|dense2", "kernel"), (mlp, embed)),
      (("head|classifier", "kernel"), (embed, None)),
      ((_NORM, "scale|bias"), None),
      (("bias",), None),
    ],
    optional=True,
  )
