"""One accelerator: steps of a decoder of 1B parameters, attention of long sequences, experts and generation.

Each case runs in a process of its own, together with what a person writes by hand for the same work (plain
JAX with `jax.jit` and donated arrays), in turns. The figure is the ratio of the times. A case of the decoder
also has the tokens per second, the model FLOP utilisation, and the memory: what `compile_report` says, and
what the allocator of the device says after two steps.

    python -m benchmarks.gpu                     one GPU, or one TPU
    python -m benchmarks.gpu experts             the cases with this in their name
    python -m benchmarks.gpu --size tiny         anywhere, to try the script
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The memory holds two copies of the state, and the activations of a step as written.
os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx_parallel as nxp
from benchmarks import by_hand, decode, experts
from benchmarks.harness import Record, Timing, measure


class Size(NamedTuple):
  """The sizes of the decoder and of a batch, of long sequences, and of a layer with experts."""

  width: int
  heads: int
  layers: int
  batch: int
  length: int
  vocabulary: int
  long: tuple[int, ...]
  experts: tuple[int, int, int, int, int]

  @property
  def parameters(self) -> int:
    return 12 * self.layers * self.width**2 + 2 * self.vocabulary * self.width

  @property
  def flops(self) -> float:
    """FLOPs of the matrix products of a step. A causal mask halves the FLOPs of attention."""
    tokens = self.batch * self.length
    attention = 2 * self.layers * tokens * self.length * self.width
    return 3 * (2 * tokens * (self.parameters - self.vocabulary * self.width) + attention)


SIZES = {
  "1b": Size(2048, 16, 18, 2, 2048, 32_000, (8192, 32_768), experts.PRODUCTS[0]),
  "tiny": Size(32, 4, 2, 2, 16, 64, (1024,), (4, 2, 64, 16, 32)),
}
RULES = nxp.LogicalRules(batch="data", embed=None, mlp=None, vocab=None)
TX = optax.adamw(1e-4)
BFLOAT16 = nxp.Precision(compute=jnp.bfloat16)
HAND = "by hand"


class Way(NamedTuple):
  """A step: the options of the plan and of `train_step`, and whether the step by hand rematerializes."""

  options: Mapping[str, Any]
  remat: bool = False


FUSED = {"attention": "fused"}
WAYS: Mapping[str, Way] = {
  "as written": Way({}),
  "remat='full'": Way({"remat": "full"}, remat=True),
  "attention='blockwise'": Way({"attention": "blockwise"}),
  "attention='fused'": Way(FUSED),
  "attention='fused', remat='full', scan_layers": Way(
    {**FUSED, "remat": "full", "scan_layers": True}, remat=True
  ),
  "attention='fused', loss_chunks=8": Way({**FUSED, "loss_chunks": 8}),
  "attention='fused', 2 microbatches": Way({**FUSED, "microbatches": 2}),
  "attention='fused', moments in host memory": Way({**FUSED, "optimizer_memory": "pinned_host"}),
}
NOTES = [
  "Step: a decoder of 1.04B parameters, 18 layers of width 2048, 2 sequences of 2048 tokens, AdamW.",
  "Its step by hand: the same decoder in plain JAX, bfloat16 compute and float32 state, one `jax.jit`,"
  " donated arrays. It has the same attention (XLA's, or cuDNN's where ours is fused) and the same"
  " rematerialization, and no scan, chunks, microbatches or host memory. With `remat='full'`, `train_step`"
  " scans the layers, which is its default.",
  "Memory: `report` is the figure of `compile_report`. `measured` is the peak of the allocator after the"
  " creation of the state and two steps, in a process that did nothing else.",
  "Attention: value and gradients, batch 1, 16 heads of 128 features, causal, bfloat16. By hand:"
  " `jax.nn.dot_product_attention` with cuDNN.",
  "Generation: the small model of the record `decode`, on one device.",
  "Experts: value and gradients of one layer of gated experts, 16 of 2048 x 4096, 2 for each of 8192 tokens,"
  " bfloat16, random routing. By hand: tokens sorted by expert, and `jax.lax.ragged_dot`.",
]


def fused_by_hand() -> by_hand.Implementation:
  """The implementation of fused attention in `jax.nn.dot_product_attention`."""
  return "cudnn" if jax.default_backend() == "gpu" else "xla"


def job_of(size: Size, attention: by_hand.Implementation = "xla", *, remat: bool = False) -> by_hand.Job:
  """The decoder, as a module and by hand. The hand-written loss casts the parameters to bfloat16."""
  job = by_hand.transformer(*size[:6], attention=attention, remat=remat)

  def cast(parameters: by_hand.Arrays, batch: by_hand.Arrays) -> jax.Array:
    return job.by_hand({name: x.astype(jnp.bfloat16) for name, x in parameters.items()}, batch)

  return by_hand.Job(job.init, job.loss, cast, job.batch)


def step_of(
  job: by_hand.Job, optimizer_memory: str | None = None, **options: Any
) -> tuple[Callable[[], Any], Any]:
  """A call of our step on arrays of its own, and the report of its program."""
  mesh = nxp.make_mesh(data=1, devices=jax.devices()[:1])
  plan = nxp.plan(BFLOAT16.apply(job.init), mesh, RULES, optimizer=TX, optimizer_memory=optimizer_memory)
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(job.loss, **options)
  batch = nxp.shard_batch(job.batch, plan)
  report = nxp.compile_report(step, plan, batch=batch)
  return lambda: step(model, optimizer, batch)["loss"], report


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


class Found(NamedTuple):
  """What a case measured: the seconds of each round, by name, and other figures with their units."""

  seconds: Mapping[str, tuple[float, ...]]
  values: Mapping[str, tuple[float, str]]


def timed(cases: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, ...]]:
  """The seconds of each round."""
  return {name: timing.seconds for name, timing in measure(cases, rounds=rounds).items()}


def step(name: str, size: Size, rounds: int) -> Found:
  """One of `WAYS`."""
  way = WAYS[name]
  fused = way.options.get("attention") == "fused"
  job = job_of(size, fused_by_hand() if fused else "xla", remat=way.remat)
  call, report = step_of(job, **way.options)
  losses = [float(call()) for _ in range(2)]
  stats = jax.devices()[0].memory_stats()  # None on a CPU
  hand = hand_of(job)
  np.testing.assert_allclose([float(hand()) for _ in range(2)], losses, rtol=1e-2)
  seconds = timed({HAND: hand, "nxp.train_step": call}, rounds)
  values = {"memory, report": (report.need_bytes / 2**30, "GiB")}
  if stats is not None:
    values["memory, measured"] = stats["peak_bytes_in_use"] / 2**30, "GiB"
  for case, own in seconds.items():
    rate = size.batch * size.length / Timing(case, own).median
    values[f"{case}: tokens per second"] = rate, ""
    if report.chip is not None:
      used = size.flops * rate / (size.batch * size.length) / report.chip.peak("bfloat16")
      values[f"{case}: MFU"] = 100 * used, "%"
  return Found(seconds, values)


def attention(length: int, rounds: int) -> Found:
  """Attention of a long sequence: blockwise, and by the fused kernel."""
  shape = 1, length, 16, 128
  q, k, v, w = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))

  def attend(arrays: Any, implementation: by_hand.Implementation = "xla") -> jax.Array:
    return jax.nn.dot_product_attention(*arrays, is_causal=True, implementation=implementation)

  def loss(arrays: Any, w: Any, implementation: by_hand.Implementation = "xla") -> jax.Array:
    return (attend(arrays, implementation) * w).astype(jnp.float32).sum()

  forms = {
    HAND: functools.partial(loss, implementation=fused_by_hand()),
    **{f"attention={how!r}": nxp.with_layers(loss, attention=how) for how in ("fused", "blockwise")},
  }
  calls, values, gradients = dict[str, Any](), dict[str, tuple[float, str]](), list[Any]()
  for name, form in forms.items():
    program = jax.jit(jax.value_and_grad(form)).lower((q, k, v), w).compile()
    gradients.append(program((q, k, v), w)[1])
    calls[name] = functools.partial(program, (q, k, v), w)
    values[f"{name}: temporaries"] = program.memory_analysis().temp_size_in_bytes / 2**20, "MiB"
  for found in gradients[1:]:
    for one, other in zip(found, gradients[0], strict=True):
      a, b = (np.asarray(x, np.float32) for x in (one, other))
      assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)
  return Found(timed(calls, rounds), values)


def ragged(_: Any, parameters: Any, x: jax.Array, routing: nxp.parallel.Routing) -> tuple[Any, int]:
  """The layer as a person writes it for one device: tokens sorted by expert, products of groups."""
  count, top_k = parameters["gate"].shape[0], routing.experts.shape[1]
  order = jnp.argsort(routing.experts.reshape(-1))
  sizes = jnp.bincount(routing.experts.reshape(-1), length=count).astype(jnp.int32)
  rows = x[order // top_k]
  wide = jax.nn.silu(jax.lax.ragged_dot(rows, parameters["gate"], sizes))
  wide = wide * jax.lax.ragged_dot(rows, parameters["up"], sizes)
  rows = jax.lax.ragged_dot(wide, parameters["down"], sizes)
  rows = rows * routing.weights.reshape(-1)[order, None].astype(rows.dtype)
  return jnp.zeros_like(x).at[order // top_k].add(rows), 0


def layer(size: Size, rounds: int) -> Found:
  """A layer with experts, with a capacity and without."""
  count, top_k, tokens, width, hidden = size.experts
  mesh = nxp.make_mesh(data=1, devices=jax.devices()[:1])
  forms = {
    HAND: ragged,
    "without a capacity": nxp.parallel.experts,
    "capacity 1.25": functools.partial(nxp.parallel.experts, capacity=1.25),
  }
  calls, values = dict[str, Any](), dict[str, tuple[float, str]]()
  sizes = {"top_k": top_k, "tokens": tokens, "width": width, "hidden": hidden}
  for name, form in forms.items():
    program, given = experts.program(form, mesh, count, jnp.bfloat16, **sizes)
    calls[name] = functools.partial(program, *experts.drawn(given))
    values[f"{name}: temporaries"] = program.memory_analysis().temp_size_in_bytes / 2**20, "MiB"
  totals = [float(calls[name]()[0]) for name in (HAND, "without a capacity")]
  np.testing.assert_allclose(*totals, rtol=0.02)
  return Found(timed(calls, rounds), values)


def generation(rounds: int) -> Found:
  """Greedy generation with a cache, as in `benchmarks/decode.py`, on one device."""
  mesh = nxp.make_mesh(data=1, tensor=1, devices=jax.devices()[:1])
  model = nxp.create_sharded_model(decode.Model, mesh, decode.rules())
  prompts = (
    np.random.default_rng(0).integers(0, decode.VOCABULARY, (decode.BATCH, decode.WIDTH)).astype(np.int32)
  )
  generate, hand = nxp.generator(decode.NEW), decode.by_hand(model, mesh)
  assert (np.asarray(generate(model, prompts).tokens) == np.asarray(hand(prompts))).all()
  calls = {HAND: lambda: hand(prompts), "nxp.generator": lambda: generate(model, prompts).tokens}
  return Found(timed(calls, rounds), {})


def cases_of(size: Size) -> dict[str, Callable[[int], Found]]:
  """All cases by name."""
  return {
    **{f"step, {name}": functools.partial(step, name, size) for name in WAYS},
    **{f"attention, {length} tokens": functools.partial(attention, length) for length in size.long},
    "a layer of experts": functools.partial(layer, size),
    "generation": generation,
  }


def measured(group: str, record: Record, command: list[str]) -> None:
  """Adds the rows of a case, which a process of its own measures."""
  variables = {**os.environ, "JAX_PLATFORMS": ""}  # the imported benchmarks set another platform
  done = subprocess.run([*command, "--here", group], stdout=subprocess.PIPE, text=True, env=variables)
  if done.returncode:
    print(f"{group}: failed", flush=True)
    return
  found = Found(*json.loads(done.stdout.splitlines()[-1]))
  timings = {case: Timing(case, tuple(seconds)) for case, seconds in found.seconds.items()}
  record.compare(timings, baseline=HAND, group=group)
  for case, (value, unit) in found.values.items():
    record.value(case, value, unit, group=group)


def main() -> None:
  """Measures each case, and writes the record of an accelerator."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("names", nargs="*", help="names of cases, or parts of them; all cases by default")
  parser.add_argument("--size", choices=SIZES, default="1b")
  parser.add_argument("--rounds", type=int, default=15)
  parser.add_argument("--here", metavar="CASE", help="measure one case in this process, print JSON")
  args = parser.parse_args()
  device, cases = jax.devices()[0], cases_of(SIZES[args.size])
  if args.here:
    print(json.dumps(cases[args.here](args.rounds)))
    return
  if device.platform == "cpu" and args.size != "tiny":
    raise SystemExit("there is no accelerator here. Fix: --size tiny, to try the script.")
  record = Record(
    f"one_{device.platform}",
    f"One {device.device_kind}: steps, attention, experts and generation",
    command="python -m benchmarks.gpu",
    notes=NOTES,
  )
  command = [sys.executable, "-m", "benchmarks.gpu", "--size", args.size, "--rounds", str(args.rounds)]
  makes = {group: functools.partial(measured, group, record, command) for group in cases}
  parts = args.names or [""]
  chosen = [
    group for group in cases if group in parts or any(part in group for part in parts if part not in cases)
  ]
  if args.size != "tiny":
    record.make(makes, chosen)
    return
  for group in chosen:
    makes[group]()
  print(json.dumps(record.rows, indent=1))


if __name__ == "__main__":
  main()
