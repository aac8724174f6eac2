"""What each remat policy keeps and computes, for a plain decoder and for the same one written as a scan.

The plain one is `benchmarks/plain/decoders.py`, the other `benchmarks/plain/scanned.py`. Needs the TPU
compiler, as `report_8b.py` does.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nnx_parallel as nxp
from benchmarks.harness import Record
from benchmarks.plain import decoders, scanned
from nnx_parallel.report.compile_report import CompileReport
from nnx_parallel.report.topology import missing_compiler, read_machine

MIB = 2**20
TOPOLOGY = "tpu:v5e:2x2"
CONFIG = decoders.Config(
  vocab=8192, width=1024, heads=8, kv_heads=4, head_dim=128, hidden=4096, depth=8, dtype="bfloat16"
)
RULES = [
  nxp.LogicalRules(batch="fsdp"),
  nxp.PathRules({r"embed\.embedding": (None, "fsdp")}, optional=True),
  nxp.fsdp(),
]
NOTES = [
  f"Decoders of {CONFIG.depth} layers of width {CONFIG.width}, 8 sequences of 1024 tokens, Adam, float32"
  f" state, bfloat16 compute, fsdp over the chips of {TOPOLOGY}. Plain: a loop over an `nnx.List`, trained by"
  " `nxp.train_step(loss, remat=POLICY, scan_layers=True)`. By hand: stacked layers, cast as a whole, and one"
  " `jax.lax.scan` over `jax.checkpoint` with the policy.",
  "The need is the compiler's peak. Its temporaries count the plain one's stack of cast weights beside the"
  " weights that are cast for it, which are not alive together.",
]


def compiled(policy: str, model: str) -> CompileReport:
  """The report of one train step."""
  if model == "by hand":
    init: Any = lambda: scanned.Decoder(CONFIG, nnx.Rngs(0), policy)  # noqa: E731
    step = nxp.train_step(decoders.loss)
  else:
    init = lambda: decoders.Decoder(CONFIG, nnx.Rngs(0))  # noqa: E731
    step = nxp.train_step(decoders.loss, remat=policy, scan_layers=True)
  plan = nxp.plan(init, nxp.abstract_mesh(fsdp=4), RULES, optimizer=optax.adam(1e-3))
  batch = jax.ShapeDtypeStruct((8, 1025), jnp.int32)
  return nxp.compile_report(step, plan, batch=batch, topology=TOPOLOGY)


def main() -> None:
  """Compiles each policy both ways into the record."""
  if missing_compiler(read_machine(TOPOLOGY)) is not None:
    print("the TPU compiler is not installed: no record is written")
    return
  record = Record(
    "remat", "Remat policies of a plain decoder, rolled", "python -m benchmarks remat", notes=NOTES
  )
  for policy in ("none", "dots", "full"):
    reports = {model: compiled(policy, model) for model in ("by hand", "plain")}
    for model, report in reports.items():
      group = f"{policy}, {model}"
      record.value("need per device", round(report.need_bytes / MIB, 1), "MiB", group=group)
      record.value("temporaries", round(report.memory.temporaries / MIB, 1), "MiB", group=group)
      record.value("matrix FLOPs per device", round(report.cost.flops / 1e9, 1), "G", group=group)
      sent = sum(report.bytes_by("kind").values())
      record.value("sent", round(sent / MIB, 1), "MiB", group=group)
    record.write()


if __name__ == "__main__":
  main()
