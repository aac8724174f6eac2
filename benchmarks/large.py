"""A decoder of 70B and mixtures of experts of 107B and 141B parameters, unedited, compiled for 256 TPU chips.

Nothing of their size is created: plans, traces and programs need only shapes. Needs the TPU compiler, as
`report_8b.py` does. Some cases again, by a part of their names:

    python -m benchmarks.large mixture
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from flax import nnx

import nnx_parallel as nxp
from benchmarks import llama
from benchmarks.harness import Record
from benchmarks.maxtext_step import compile_by_maxtext, is_installed
from benchmarks.overlap import OPTIONS
from benchmarks.plain import decoders
from benchmarks.plain_8b import GIB, RULES, add_bytes
from nnx_parallel.report.chips import ENDLESS
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.topology import missing_compiler, read_machine

TOPOLOGY = "tpu:v5p:4x8x8"
BATCH, LENGTH = 256, 4096  # one sequence for each chip
DENSE = decoders.Config(
  vocab=128_256, width=8192, heads=64, kv_heads=8, head_dim=128, hidden=28_672, depth=80, dtype="bfloat16"
)
SPARSE = decoders.Config(
  vocab=151_552, width=4096, heads=96, kv_heads=8, head_dim=128, hidden=10_944, depth=46, dtype="bfloat16"
)
MIXTRAL = decoders.Config(
  vocab=32_768, width=6144, heads=48, kv_heads=8, head_dim=128, hidden=16_384, depth=56, dtype="bfloat16"
)
ALL = ("fsdp", "expert")
MIXTURE_RULES = [
  nxp.LogicalRules(batch=("data", *ALL)),
  nxp.PathRules(
    {
      r".*\.mlp\.(gate|up)": ("expert", "fsdp", None),
      r".*\.mlp\.down": ("expert", None, "fsdp"),
      r"embed\.embedding": (None, ALL),
      r"(.*\.)?(q|k|v|gate|up|router|head)\.kernel": (ALL, None),
      r".*\.(o|down)\.kernel": (None, ALL),
      r"(.*\.)?norm\d?\.scale": (None,),
    },
    optional=True,
  ),
]


class Experts(NamedTuple):
  """The sizes of a mixture of experts.

  Attributes:
    count: the number of experts.
    choices: the number of experts of each token.
    hidden: the hidden width of an expert.
    shared: whether all tokens share one more expert.
    first: the first layer with experts.
  """

  count: int
  choices: int
  hidden: int
  shared: bool
  first: int


MIXTURES = {
  "mixture": (SPARSE, Experts(128, 8, 1408, shared=True, first=1)),
  "mixture of 8": (MIXTRAL, Experts(8, 2, MIXTRAL.hidden, shared=False, first=0)),
}


class Mixture(nnx.Module):
  """Experts of which each token has some, and perhaps one that all tokens share."""

  def __init__(self, c: decoders.Config, sizes: Experts, rngs: nnx.Rngs):
    init, count, hidden = nnx.initializers.lecun_normal(batch_axis=0), sizes.count, sizes.hidden
    self.choices = sizes.choices
    self.router = nnx.Linear(c.width, count, use_bias=False, rngs=rngs)
    self.gate, self.up = (nnx.Param(init(rngs.params(), (count, c.width, hidden))) for _ in range(2))
    self.down = nnx.Param(init(rngs.params(), (count, hidden, c.width)))
    self.shared = decoders.MLP(dataclasses.replace(c, hidden=hidden), rngs) if sizes.shared else None

  def __call__(self, x: jax.Array) -> jax.Array:
    routing = nxp.parallel.route(self.router(x.astype(jnp.float32)), self.choices)
    weights = {name: getattr(self, name)[...].astype(x.dtype) for name in ("gate", "up", "down")}
    y, _ = nxp.parallel.experts(nxp.parallel.mlp_experts, weights, x, routing)
    return y.astype(x.dtype) + (0 if self.shared is None else self.shared(x))


def mixture(c: decoders.Config, sizes: Experts) -> decoders.Decoder:
  """The decoder of `plain/decoders.py` with mixtures of experts."""
  rngs = nnx.Rngs(0)
  model = decoders.Decoder(c, rngs)
  for layer in model.layers[sizes.first :]:
    layer.mlp = Mixture(c, sizes, rngs)
  return model


class Model(NamedTuple):
  """A model, and what a user writes to train it.

  Attributes:
    init: makes it.
    rules: its layout.
    loss: `(model, batch) -> loss`.
    batch: the types of a global batch.
    options: of `train_step`.
  """

  init: Callable[[], nnx.Module]
  rules: Any
  loss: Callable[..., Any]
  batch: Any
  options: Mapping[str, Any]


TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
FOUND = {"remat": "full", "scan_layers": True, "attention": "fused", "loss_chunks": 8}
MODELS = {
  "decoder": Model(lambda: decoders.Decoder(DENSE, nnx.Rngs(0)), RULES, decoders.loss, TOKENS, FOUND),
  "decoder by hand": Model(
    functools.partial(llama.build, "70b", loss_chunks=8),
    llama.RULES,
    llama.loss,
    llama.batch_of(llama.SIZES["70b"], batch=BATCH),
    {},
  ),
  **{
    name: Model(
      functools.partial(mixture, *sizes),
      MIXTURE_RULES,
      decoders.loss,
      TOKENS,
      FOUND,
    )
    for name, sizes in MIXTURES.items()
  },
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One model on one layout.

  Attributes:
    model: one of `MODELS`.
    axes: the sizes of the mesh axes.
    options: the compiler's, one of `benchmarks.overlap.OPTIONS`.
  """

  model: str
  axes: Mapping[str, int]
  options: str = "no option"

  @property
  def name(self) -> str:
    layout = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
    return f"{self.model}, {layout}, {self.options}"

  def compiled(self) -> CompileReport:
    """The report of its train step."""
    model = MODELS[self.model]
    mesh = nxp.abstract_mesh({"data": 1, "fsdp": 1, "tensor": 1, **self.axes})
    plan = nxp.plan(model.init, mesh, model.rules, optimizer=llama.optimizer())
    step = nxp.train_step(model.loss, compiler_options=OPTIONS[self.options], **model.options)
    return nxp.compile_report(step, plan, batch=model.batch, topology=TOPOLOGY)


CASES = (
  *(Case("decoder", {"fsdp": 256}, options) for options in ("no option", "SparseCore")),
  Case("decoder by hand", {"fsdp": 256}),
  *(
    Case(model, {"fsdp": 32, "expert": 8}, options)
    for model in MIXTURES
    for options in ("no option", "SparseCore")
  ),
)
# MaxText's own steps, with the choices of the models above.
MAXTEXT = (
  "compile_topology=v5p-512",
  "compile_topology_num_slices=1",
  "per_device_batch_size=1",
  f"max_target_length={LENGTH}",
  "remat_policy=full",
  "grad_dtype=bfloat16",
  "gradient_clipping_threshold=0",
)
BY_MAXTEXT = {
  "decoder of MaxText, fsdp 256": ("model_name=llama3-70b", "ici_fsdp_parallelism=256"),
  "mixture of 8 of MaxText, fsdp 32 x expert 8": (
    "model_name=mixtral-8x22b",
    "ici_fsdp_parallelism=32",
    "ici_expert_parallelism=8",
  ),
}
TITLE = (
  "Unedited decoders of 70B to 141B parameters, with and without experts, compiled for 256 TPU v5p chips"
)
NOTES = [
  "Decoder: `benchmarks/plain/decoders.py` with the sizes of Llama 3 70B (arXiv:2407.21783), laid out by path"
  ' rules and trained by `nxp.train_step(loss, remat="full", scan_layers=True, attention="fused",'
  " loss_chunks=8)`. By hand: `benchmarks/llama.py`, whose layers are stacked, recomputed and sharded by"
  " hand, and whose attention goes by blocks. Mixture: the same decoder and options with the sizes of"
  " GLM-4.5-Air (arXiv:2508.06471), 107B: 46 layers, of which the first is dense; 128 experts, of which each"
  " token has 8, and one shared expert. Mixture of 8: with the sizes of Mixtral 8x22B, 141B: 56 layers, and 8"
  " experts, of which each token has 2. No token is dropped (`nxp.parallel.experts`).",
  "Of MaxText: its own steps (MaxText 0.2.5), compiled by the same jax and libtpu and read by the same"
  f" reader, `python -m benchmarks.maxtext_step REPORT.pickle {' '.join(MAXTEXT)}`, and"
  f" {' or '.join('`' + ' '.join(own) + '`' for own in BY_MAXTEXT.values())}. Equal choices: full"
  " recomputation, gradients in bfloat16, no clipping, a fused attention, and no token is dropped. Its batch"
  " also has positions and segment ids; its loss is not computed in chunks.",
  f"Batches of {BATCH} sequences of {LENGTH} tokens, AdamW, float32 state, bfloat16 compute. Compiled by"
  " `jax[tpu]`; nothing was run. SparseCore: compiler options of [another record](overlap.json).",
  "Sent: by each device in a step with ring algorithms; an all-reduce sends its payload twice. The least with"
  " FSDP: the weights are gathered twice and the gradients are reduce-scattered once, in bfloat16, 6 bytes"
  " for each parameter. Exposed: what no computation overlaps with in the compiler's schedule.",
  "Mixtures: on TPUs, an exchange of tokens is ragged; it is counted with the full size of its buffers. Those"
  " of MaxText have a row for each token of the 8 devices that exchange tokens. Here, the numbers of rounds"
  " and of blocks of rows depend on the tokens: the bytes are those of the first round, whose buffers are 1.1"
  " times those of an even load, and of one further round, a quarter of its size; FLOPs are not given. FLOPs"
  " do not include kernels (the fused attention, grouped products).",
]


def add(record: Record, group: str, compiled: Callable[[], CompileReport]) -> None:
  """Compiles a step and adds its rows."""
  start = processor_s()
  report = compiled()
  spent_s = processor_s() - start
  add_bytes(record, group, report, lambda found: found.kind)
  record.value("exposed", round(report.sent().exposed / GIB, 2), "GiB", group=group)
  if ENDLESS not in report.cost.uncounted:
    record.value("FLOPs per device", round(report.cost.flops / 1e12), "T", group=group)
  record.value("processor time", round(spent_s), "s", group=group)


def processor_s() -> float:
  """Processor time of this process and of those that it waited for."""
  return sum(os.times()[:4])


def by_maxtext(own: tuple[str, ...], options: str) -> CompileReport:
  """The report of MaxText's own step."""
  flags = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS[options].items())
  return compile_by_maxtext(*MAXTEXT, *own, *([f"compile_xla_flags={flags}"] if flags else []))


def main(part: str = "") -> None:
  """Compiles all cases, or those with a part of their name, into the record."""
  if missing_compiler(read_machine(TOPOLOGY)) is not None:
    print("the TPU compiler is not installed: no record is written")
    return
  record = Record("large", TITLE, "python -m benchmarks large", notes=NOTES)
  compiled: dict[str, Callable[[], CompileReport]] = {case.name: case.compiled for case in CASES}
  maxtext = {
    f"{name}, {options}": functools.partial(by_maxtext, own, options)
    for name, own in BY_MAXTEXT.items()
    for options in ("no option", "SparseCore")
  }
  compiled |= maxtext
  chosen = [group for group in compiled if part in group and (group not in maxtext or is_installed())]
  record.make({group: functools.partial(add, record, group, one) for group, one in compiled.items()}, chosen)


if __name__ == "__main__":
  main(*sys.argv[1:])
