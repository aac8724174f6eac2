"""One accelerator: a decoder of about 1B parameters through `train_step`, against a hand-written step.

Each row has the time of one step divided by the time of the hand-written step (`by_hand.py`: `jax.jit`,
donated arrays, parameters in float32 that the loss casts to bfloat16), with both interleaved in one run. The
record also has the tokens per second, the model FLOP utilisation, and the memory of the compiled program. On
CPUs, only `--size tiny` runs, which only shows that the script works.

    python -m benchmarks.gpu                  one GPU, or one TPU
    python -m benchmarks.gpu --size tiny      anywhere; writes no record
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx_parallel as nxp
from benchmarks import by_hand, decode
from benchmarks.harness import Record, measure


class Size(NamedTuple):
  """The sizes of the decoder and of a batch."""

  width: int
  heads: int
  layers: int
  batch: int
  length: int
  vocabulary: int

  @property
  def parameters(self) -> int:
    return 12 * self.layers * self.width**2 + 2 * self.vocabulary * self.width

  @property
  def flops(self) -> float:
    """FLOPs of the matrix products of a step. A causal mask halves the FLOPs of attention."""
    tokens = self.batch * self.length
    attention = 2 * self.layers * tokens * self.length * self.width
    return 3 * (2 * tokens * (self.parameters - self.vocabulary * self.width) + attention)


SIZES = {"1b": Size(2048, 16, 18, 4, 2048, 32_000), "tiny": Size(32, 4, 2, 4, 16, 64)}
RULES = nxp.LogicalRules(batch="data", embed=None, mlp=None, vocab=None)
TX = optax.adamw(1e-4)
HAND = "by hand, jax.jit"
BFLOAT16 = nxp.Precision(compute=jnp.bfloat16)
WAYS: Mapping[str, dict[str, Any]] = {
  "train_step": {},
  "train_step, float32": {"precision": None},
  "train_step, remat='dots'": {"remat": "dots"},
  "train_step, remat='full'": {"remat": "full"},
  "train_step, attention='blockwise'": {"attention": "blockwise"},
  "train_step, scan_layers, remat='full'": {"remat": "full", "scan_layers": True},
  "train_step, loss_chunks=8": {"loss_chunks": 8},
  "train_step, 4 microbatches": {"microbatches": 4},
  "train_step, optimizer state in host memory": {"optimizer_memory": "pinned_host"},
}
"""Options of the plan (`precision`, `optimizer_memory`) and of the step."""


def job_of(size: Size) -> by_hand.Job:
  """The decoder, as a module and by hand. The hand-written loss casts the parameters to bfloat16."""
  job = by_hand.transformer(*size)

  def cast(parameters: by_hand.Arrays, batch: by_hand.Arrays) -> jax.Array:
    low = {name: x if name.endswith("scale") else x.astype(jnp.bfloat16) for name, x in parameters.items()}
    return job.by_hand(low, batch)

  return by_hand.Job(job.init, job.loss, cast, job.batch)


def step_of(
  job: by_hand.Job,
  precision: nxp.Precision | None = BFLOAT16,
  optimizer_memory: str | None = None,
  **options: Any,
) -> tuple[Callable[[], Any], Any]:
  """A call of our step on arrays of its own, and the report of its program."""
  init = job.init if precision is None else precision.apply(job.init)
  mesh = nxp.make_mesh(data=1, devices=jax.devices()[:1])
  plan = nxp.plan(init, mesh, RULES, optimizer=TX, optimizer_memory=optimizer_memory)
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(job.loss, **options)
  batch = nxp.shard_batch(job.batch, plan)
  return functools.partial(step, model, optimizer, batch), nxp.compile_report(step, plan, batch=batch)


def hand_of(job: by_hand.Job) -> Callable[[], Any]:
  """A call of the hand-written step on arrays of its own."""
  mesh = nxp.make_mesh(data=1, devices=jax.devices()[:1])
  plan = nxp.plan(job.init, mesh, RULES, optimizer=TX)
  parameters = by_hand.parameters_of(nxp.create_sharded_model(plan)[0])
  step, state = by_hand.step_by_hand(job, TX, parameters, by_hand.moments_of(plan, parameters))
  batch, held = nxp.shard_batch(job.batch, plan), [parameters, state]

  def call() -> jax.Array:
    held[0], held[1], loss = step(*held, batch)
    return loss

  return call


def generation(record: Record, rounds: int) -> None:
  """Greedy generation with a cache, as in `benchmarks/decode.py`, on one device."""
  mesh = nxp.make_mesh(data=1, tensor=1, devices=jax.devices()[:1])
  model = nxp.create_sharded_model(decode.Model, mesh, decode.rules())
  prompts = (
    np.random.default_rng(0).integers(0, decode.VOCABULARY, (decode.BATCH, decode.WIDTH)).astype(np.int32)
  )
  generate, hand = nxp.generator(decode.NEW), decode.by_hand(model, mesh)
  assert (np.asarray(generate(model, prompts).tokens) == np.asarray(hand(prompts))).all()
  cases = {"generation by hand": lambda: hand(prompts), "generator": lambda: generate(model, prompts).tokens}
  timings = measure(cases, rounds=rounds)
  record.compare(timings, baseline="generation by hand")
  for name, timing in timings.items():
    record.value(f"{name}: new tokens per second", decode.BATCH * decode.NEW / timing.median, "")


def main() -> None:
  """Measures, prints, and writes the record of an accelerator."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--size", choices=SIZES, default="1b")
  parser.add_argument("--rounds", type=int, default=15)
  args = parser.parse_args()
  device, size = jax.devices()[0], SIZES[args.size]
  if device.platform == "cpu" and args.size != "tiny":
    raise SystemExit("there is no accelerator here. Fix: --size tiny, to try the script.")
  title = f"A decoder of {size.parameters / 1e9:.2f}B parameters on one {device.device_kind}"
  record = Record(f"gpu_{device.platform}", title, command="python -m benchmarks.gpu", notes=[str(size)])
  job, tokens = job_of(size), size.batch * size.length
  for name, options in WAYS.items():
    # Each way runs alone with the hand-written step, because two copies of the state fit and ten do not.
    call, report = step_of(job, **options)
    timings = measure({HAND: hand_of(job), name: call}, rounds=args.rounds)
    record.compare(timings, baseline=HAND, group=name)
    for case, timing in timings.items():
      record.value(f"{case}: tokens per second", tokens / timing.median, "", group=name)
      if report.chip is not None:
        share = size.flops / timing.median / report.chip.peak("bfloat16")
        record.value(f"{case}: MFU", 100 * share, "%", group=name)
    record.value("temporaries", report.memory.temporaries / 2**20, "MiB", group=name)
    ratio = timings[name].median / timings[HAND].median
    print(f"{name:44} {ratio:.2f} of {HAND}, {tokens / timings[name].median:.0f} tokens/s", flush=True)
  generation(record, args.rounds)
  if device.platform != "cpu":
    record.write()


if __name__ == "__main__":
  main()
