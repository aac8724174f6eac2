"""Checks of gradients: what one costs beside a step, and how often it errs over 200 seeds.

- Cost: a transformer on simulated devices, the whole check against the step that it checks, in turns; and
  memory by the compiler's own figures, with the state that stays on the devices meanwhile.
- False alarms: the layouts of `parity.py` and the recipes by `train_step`, the models of the tests and others
  by a jit of one's own, in float32 and bfloat16. Each seed gives other directions.
- Faults found: the gradient of one norm's scale twice too large, in the same models.

    python -m benchmarks.check_gradients [SEEDS [WORD...]]

WORDs choose the cases with one of them in their name, such as "cost"; the other rows of the record stay.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "32"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from benchmarks import parity
from benchmarks.harness import Record, measure
from nnx_parallel.layout.constrain import default_scope
from nnx_parallel.loop.loader import load_recipe
from nnx_parallel.loop.recipe import plan_recipe
from nnx_parallel.verify.check_gradients import Looks, check_subject, subject_of
from nnx_parallel.verify.gradient_check import GradientCheck
from nnx_parallel.verify.subject import Subject
from tests.layout.families import GPT, T5, Llama, ViT
from tests.layout.models import LM

SEEDS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
WORDS = sys.argv[2:]
DTYPES = ("float32", "bfloat16")


class Layer(nnx.Module):
  """A transformer's layer with biases, some of whose gradients are zero but for rounding."""

  def __init__(self, width: int, rngs: nnx.Rngs):
    self.before, self.between = nnx.LayerNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
    self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x + self.attention(self.before(x))
    return x + self.down(nnx.gelu(self.up(self.between(x))))


class Transformer(nnx.Module):
  """Layers in a list between an embedding and a head."""

  def __init__(self, width: int, depth: int, vocab: int = 64, *, remat: bool = False):
    rngs = nnx.Rngs(0)
    self.apply = nnx.remat(Layer.__call__) if remat else Layer.__call__
    self.embed = nnx.Embed(vocab, width, rngs=rngs)
    self.layers = nnx.List([Layer(width, rngs) for _ in range(depth)])
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.head = nnx.Linear(width, vocab, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    for layer in self.layers:
      x = self.apply(layer, x)
    return self.head(self.norm(x))


class Images(nnx.Module):
  """Convolutions with a batch norm, whose bias before has no gradient, and a group norm."""

  def __init__(self) -> None:
    rngs = nnx.Rngs(0)
    self.stem, self.norm = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
    self.conv, self.groups = nnx.Conv(16, 16, (3, 3), strides=2, rngs=rngs), nnx.GroupNorm(16, 4, rngs=rngs)
    self.head = nnx.Linear(16, 8, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = nnx.relu(self.norm(self.stem(x)))
    return self.head(nnx.relu(self.groups(self.conv(x))).mean((1, 2)))


def token_loss(model: Any, tokens: jax.Array) -> jax.Array:
  logits = model(tokens[:, :-1]).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def copying_loss(model: Any, tokens: jax.Array) -> jax.Array:
  """The loss of an encoder-decoder that reads what it is to say."""
  return token_loss(lambda tokens: model(tokens, tokens), tokens)


def image_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
  logits = model(batch["x"]).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def parity_loss(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """That of `parity.py`, whose logits may be bfloat16."""
  return parity.loss_fn(lambda tokens: model(tokens).astype(jnp.float32), tokens)


def computing_in(init: Callable[[], nnx.Module], dtype: str) -> Callable[[], nnx.Module]:
  """A constructor whose layers compute in a dtype, also those that have one; parameters stay float32."""

  def made() -> nnx.Module:
    model = init()
    for _, module in nnx.iter_modules(model):
      if hasattr(module, "dtype") and (module.dtype is not None or dtype != "float32"):
        module.dtype = jnp.dtype(dtype)
    return model

  return made


@dataclasses.dataclass(frozen=True)
class Case:
  """A model on a layout, and how its gradients are computed."""

  name: str
  dtype: str
  plan: nxp.Plan
  loss: Any
  batch: Any
  options: dict[str, Any] | None = None

  def subject(self, loss: Any = None) -> Subject:
    batch = nxp.shard_batch(self.batch, self.plan)
    if self.options is None:
      return subject_of(nxp.create_sharded_model(self.plan), batch, loss or self.loss, nnx.Param)
    model, optimizer = nxp.create_sharded_model(self.plan)
    bound = nxp.train_step(loss or self.loss, **self.options)._bind(model, optimizer)
    return bound.subject(loss or self.loss, {None: nnx.Param}, batch)

  @property
  def scope(self) -> Any:
    explicit = "Explicit" in self.name
    return jax.set_mesh(self.plan.mesh) if explicit else default_scope(self.plan.activation_rules)


def cases() -> Iterator[Case]:
  tokens = parity.batches(1)[0]
  rng = np.random.default_rng(0)
  images = {"x": rng.normal(size=(16, 8, 8, 3)).astype("float32"), "y": rng.integers(8, size=16)}
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  rules = [nxp.LogicalRules(batch=("data", "fsdp")), nxp.fsdp(min_size=0)]
  for dtype in DTYPES:
    for layout in parity.LAYOUTS:
      for zero, microbatches in ((0, 1), (2, 4)) if layout == "dp x fsdp x tp" else ((0, 1),):
        case = parity.Case(layout, zero, microbatches)
        plan = parity.plan_of(case, "adamw(1e-3)")
        plan = nxp.plan(
          computing_in(plan.init, dtype), plan.mesh, parity.RULES, optimizer=optax.adamw(1e-3), zero=zero
        )
        yield Case(str(case), dtype, plan, parity_loss, tokens, {"microbatches": microbatches})
    models = {
      "transformer, 2 layers of 16": lambda: Transformer(16, 2),
      "transformer, 6 layers of 64": lambda: Transformer(64, 6),
      "LM of the tests": lambda: LM(32, 16, 2, nnx.Rngs(0)),
      "Llama of the tests": lambda: Llama(nnx.Rngs(0)),
      "GPT of the tests": lambda: GPT(nnx.Rngs(0)),
    }
    for name, init in models.items():
      named = parity.RULES if name.startswith("LM") else rules
      yield Case(name, dtype, nxp.plan(computing_in(init, dtype), mesh, named), token_loss, tokens)
    t5 = nxp.plan(computing_in(lambda: T5(nnx.Rngs(0)), dtype), mesh, rules)
    yield Case("T5 of the tests", dtype, t5, copying_loss, tokens)
    vit = nxp.plan(computing_in(lambda: ViT(nnx.Rngs(0)), dtype), mesh, rules)
    yield Case("ViT of the tests", dtype, vit, image_loss, images | {"x": images["x"][:, :4, :4]})
    yield Case("convolutions", dtype, nxp.plan(computing_in(Images, dtype), mesh, rules), image_loss, images)
    for name in ("text_lm", "digits"):
      recipe = load_recipe(name)
      own = plan_recipe(recipe, nxp.make_mesh({"data": 8} if name == "digits" else dict(mesh.shape)))
      init = computing_in(own.init, dtype)
      plan = nxp.plan(init, own.mesh, own.rules, optimizer=own.tx)
      options = {"microbatches": recipe.parts(None)}
      yield Case(f"recipe {name}", dtype, plan, recipe.loss, next(iter(recipe.batches(0))), options)


def difference(found: GradientCheck) -> float:
  """The largest difference of a group of equal layers, as a part of the tolerance."""
  return max(look.difference for look in found.comparisons) / found.tolerance


def doubled(case: Case) -> Any:
  """The loss with one norm's scale behind a rule that doubles its gradient."""

  def loss(model: Any, batch: Any) -> Any:
    norm = next(m for _, m in nnx.iter_modules(model) if isinstance(getattr(m, "scale", None), nnx.Param))
    scale = norm.scale[...]
    wrong = jax.custom_derivatives.linear_call(lambda _, x: x, lambda _, g: 2 * g, (), scale)
    norm.scale = nnx.Param(wrong)
    found = case.loss(model, batch)
    norm.scale = nnx.Param(scale)
    return found

  return loss


def chosen(name: str) -> bool:
  return not WORDS or any(word in name for word in WORDS)


def false_alarms(record: Record) -> Iterator[int]:
  """How often a check of right gradients says that they are wrong, for each case."""
  for case in cases():
    if not chosen(case.name):
      continue
    with case.scope:
      subject = case.subject()
      checks = [check_subject(subject, seed) for seed in range(SEEDS)]
    largest, alarms = max(map(difference, checks)), sum(not found for found in checks)
    group = f"largest difference / tolerance, {case.dtype}"
    record.value(f"{case.name} ({SEEDS} seeds)", largest, "", group=group)
    print(f"{case.dtype:9} {case.name:46} {largest:.1e}, {alarms} alarms", flush=True)
    yield alarms


def found(record: Record) -> Iterator[int]:
  """How often one norm's gradient that is twice too large is found, and named."""
  for case in cases():
    if case.options is not None or not chosen(case.name):
      continue
    subject = case.subject(doubled(case))
    seen = [check for check in (check_subject(subject, seed) for seed in range(SEEDS)) if not check]
    right = sum(len(check.wrong) == 1 and check.wrong[0].endswith("scale") for check in seen)
    group = f"one norm's gradient doubled, {case.dtype}"
    record.value(f"{case.name}: seen", 100 * len(seen) / SEEDS, "%", group=group)
    record.value(f"{case.name}: named, of {len(seen)} seen", right, "", group=group)
    print(f"{case.dtype:9} {case.name:46} seen {len(seen)}, named {right} of {len(seen)}", flush=True)
    yield 0


def cost(record: Record) -> Iterator[int]:
  """The check against the step, in time and memory."""
  for dtype, remat in (("float32", None), ("bfloat16", None), ("float32", "full")):
    if chosen(f"cost {dtype} {remat}"):
      cost_of(record, dtype, remat)
      yield 0


def cost_of(record: Record, dtype: str, remat: Any) -> None:
  mesh = nxp.make_mesh(data=2, fsdp=2, tensor=2)
  rules = [nxp.LogicalRules(batch=("data", "fsdp")), nxp.fsdp(min_size=0)]
  tokens = np.random.default_rng(0).integers(512, size=(64, 129)).astype(np.int32)
  init = computing_in(lambda: Transformer(128, 4, 512, remat=remat is not None), dtype)
  plan = nxp.plan(init, mesh, rules, optimizer=optax.adam(1e-3))
  model, optimizer = nxp.create_sharded_model(plan)
  batch = nxp.shard_batch(tokens, plan)
  step = nxp.train_step(token_loss)
  subject = step._bind(model, optimizer).subject(token_loss, {None: nnx.Param}, batch)
  group = f"{dtype}, remat {remat or 'none'}"
  cases = {
    "train step": lambda: step(model, optimizer, batch),
    "check_gradients": lambda: check_subject(subject).losses,
  }
  record.compare(measure(cases, rounds=8, warmup=1), baseline="train step", group=group)
  stats = step.compiled(model, optimizer, batch).memory_analysis()
  state = stats.argument_size_in_bytes
  whole = state + stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
  looks = Looks(subject)
  factors = np.ones(len(looks.norms), np.float32)
  programs = {
    "gradients": subject.reverse.lower(looks.arrays, batch, np.array(looks.seeds)),
    "forward mode": subject.forward.lower(looks.arrays, batch, looks.seeds[0], factors),
  }
  for name, lowered in programs.items():
    found = lowered.compile().memory_analysis()
    held = state + found.temp_size_in_bytes + found.output_size_in_bytes
    record.value(f"{name}: memory / that of the step", held / whole, "", group=group)


def main() -> None:
  record = Record(
    "check_gradients",
    "Checks of gradients: their cost, and their errors",
    command="python -m benchmarks.check_gradients",
    notes=[
      "Cost: `check_gradients` is the whole call once compiled: gradients, and for each group of equal layers"
      " two directions by forward mode (four in bfloat16). A transformer of 4 layers of 128 on 8 simulated"
      " devices (2 x 2 x 2), 64 x 128 tokens, Adam. Memory: arguments of the step (they stay on the devices)"
      " with temporaries and results of each program, by the compiler.",
      f"Largest difference / tolerance: over the groups of equal layers, in {SEEDS} seeds. A false alarm"
      " would be one that calls right gradients wrong; one that may be zero but for rounding is not decided.",
      "Doubled: one norm's scale (in a jit of one's own) gets a gradient twice too large; the share of seeds"
      " that show it, and how many checks name it and nothing else.",
    ],
  )
  before = record.written() if WORDS else []
  alarms = 0
  for part in (cost, false_alarms, found):
    for new in part(record):
      alarms += new
      total = {"group": "", "case": "false alarms", "value": alarms, "unit": "in all of these"}
      rows = record.rows + [total] * (alarms > 0 or not WORDS)
      measured = {(row["group"], row["case"]) for row in rows}
      kept = [row for row in before if (row["group"], row["case"]) not in measured]
      dataclasses.replace(record, rows=kept + rows).write()
  if alarms:
    sys.exit(f"{alarms} false alarms")


if __name__ == "__main__":
  main()
