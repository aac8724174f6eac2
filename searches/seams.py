"""Searches for combinations of features that train other numbers than one device, or are refused falsely.

    python -m searches.seams --seeds 0:100
    python -m searches.seams --seeds 7:8 --shrink       one case, and the smallest one that fails as it does

Each part of the toolkit is tested by itself; faults lie where parts meet. A case is drawn from a seed:
features of a small decoder, a loss, options of the step, a mesh and the type of its axes, and what follows
the first steps. Its baseline is the same model and loss on one device with the same number of microbatches
and no other option.

A case is *right* when losses and parameters agree to 2e-4, *refused* when an error of the
toolkit says what cannot be done and `TRUE` knows that it is so, and *wrong* otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.errors import NnxParallelError
from searches import driver

SEEDS = "0:50"
LENGTH, TOKENS = 4, 12
TOLERANCE = 2e-4

FEATURES = (
  "scale in layers", "tables in a tuple", "table in a dict", "integer table", "tied head", "shared layer",
  "statistics", "dropout", "attention", "numbered attributes", "uneven width", "number in layers",
  "scan over layers", "exact class", "partition name",
)  # fmt: skip
OPTIONS: Mapping[str, tuple[Any, ...]] = {
  "remat": (None, None, "full", "dots", nxp.Remat("full", every=2), nxp.Remat("full", group=2), "offload"),
  "scan_layers": ("auto", "auto", True), "attention": (None, None, None, "blockwise"),
  "loss_chunks": (None, None, None, 2), "diagnostics": (False, True),
}  # fmt: skip
LAYOUTS: Mapping[str, Mapping[str, int]] = {
  text: {axis: int(size) for axis, size in (one.split() for one in text.split(" x "))}
  for text in ("data 4", "fsdp 4", "data 2 x fsdp 2", "data 2 x tensor 2", "data 2 x fsdp 2 x tensor 2",
               "data 2 x stage 2")
}  # fmt: skip
EXPLICIT = ("no axis", "no axis", "each axis", "the first axis")
WAYS = ("one model", "one model", "one model", "a teacher", "in turn", "own step")
"""What is trained: a model; a student of a model with other rules; two models in turn; by `nnx.jit`."""
AFTER = ("nothing", "restored elsewhere", "replaced array", "another model", "evaluated")

TRUE = (
  (r"finds no (attention|layer)|no attention",
   lambda c: c.options["attention"] and "attention" not in c.features),
  (r"loss_chunks", lambda c: c.options["loss_chunks"] is not None),
  (r"finds no|not scanned|no consecutive equal layers", lambda c: c.options["scan_layers"] is True),
  # One module that is called twice is a layer where layers="blocks.*" says so.
  (r"finds no layer in the loss", lambda c: "shared layer" in c.features and c.layers == 2),
  (r"pipeline|stage", lambda c: "stage" in LAYOUTS[c.layout]),
  (r"zero=\d splits nothing|zero has no effect", lambda c: c.zero),
  (r"microbatches of \d+ examples have", lambda c: c.microbatches > 1),
  (r"Remat|remat|offload",
   lambda c: isinstance(c.options["remat"], nxp.Remat) or c.options["remat"] == "offload"),
)  # fmt: skip
"""Errors that are true, and for which cases: what was asked for cannot be done there."""


@dataclasses.dataclass(frozen=True)
class Case:
  seed: int
  features: frozenset[str]
  layers: int
  loss: str
  microbatches: int
  options: Mapping[str, Any]
  layout: str
  zero: int
  scaled: bool
  after: str
  explicit: str
  way: str = "one model"
  examples: int = 16

  @classmethod
  def draw(cls, seed: int) -> Case:
    rng = random.Random(seed)
    features = frozenset(rng.sample(FEATURES, rng.choice((0, 1, 1, 2, 2, 3))))
    if "scan over layers" in features:  # one class of stacked layers
      features -= {"numbered attributes", "shared layer", "statistics", "dropout"}
    options = {name: rng.choice(values) for name, values in OPTIONS.items()}
    layout = rng.choice([*LAYOUTS])
    drawn = cls(
      seed, features, rng.choice((2, 4)), rng.choice([*LOSSES]), rng.choice((1, 2, 4)), options, layout,
      rng.choice((0, 0, 1, 2)), rng.random() < 0.15, rng.choice(AFTER), rng.choice(EXPLICIT),
      rng.choice(WAYS), rng.choice((16, 16, 64, 512)),
    )  # fmt: skip
    if drawn.way != "one model":
      drawn = dataclasses.replace(drawn, after="nothing", scaled=False)
    if drawn.loss == "sum":  # over more examples it would diverge
      drawn = dataclasses.replace(drawn, examples=16)
    if drawn.way == "own step":  # its own program: no options, and axes that layers of flax can compute on
      plain = {name: values[0] for name, values in OPTIONS.items()}
      drawn = dataclasses.replace(drawn, options=plain, microbatches=1, explicit="no axis")
    return drawn


class Tables(NamedTuple):
  sine: Any
  cosine: Any


class Block(nnx.Module):
  def __init__(self, width: int, has: frozenset[str], rngs: nnx.Rngs):
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 2 * width, rngs=rngs)
    self.down = nnx.Linear(2 * width, width, rngs=rngs)
    self.attend = nnx.MultiHeadAttention(2, width, rngs=rngs, decode=False) if "attention" in has else None
    self.statistics = nnx.BatchNorm(width, rngs=rngs) if "statistics" in has else None
    self.drop = nnx.Dropout(0.2, rngs=rngs) if "dropout" in has else None
    self.scale = jnp.full((width,), 0.5) if "scale in layers" in has else None
    self.factor = 0.5 if "number in layers" in has else 1.0
    self.exact = "exact class" in has
    angles = jnp.arange(LENGTH * width, dtype=jnp.float32).reshape(LENGTH, width)
    tables = Tables(jnp.sin(angles), jnp.cos(angles))
    self.tables = nnx.data(tables) if "tables in a tuple" in has else None

  def __call__(self, x: jax.Array) -> jax.Array:
    y = self.norm(x)
    if self.tables is not None:
      y = y * jnp.broadcast_to(self.tables.cosine, y.shape) + jnp.broadcast_to(self.tables.sine, y.shape)
    if self.attend is not None:
      y = y + self.attend(y)
    if self.statistics is not None:
      y = self.statistics(y)
    y = self.down(jax.nn.gelu(self.up(y)))
    if self.drop is not None:
      y = self.drop(y)
    if self.scale is not None:
      y = y * jnp.broadcast_to(self.scale, y.shape)
    if self.exact and type(self) is not Block:  # as models choose by the class of a layer
      y = 2 * y
    return x + self.factor * y


class Model(nnx.Module):
  def __init__(self, case: Case, rngs: nnx.Rngs):
    has, width = case.features, 10 if "uneven width" in case.features else 8
    self.embed = nnx.Embed(TOKENS, width, rngs=rngs)
    self.order = jnp.arange(TOKENS)[::-1] if "integer table" in has else None
    self.bias = nnx.data({"first": jnp.full((width,), 0.1)}) if "table in a dict" in has else None
    self.count, self.named = case.layers, "numbered attributes" in has
    self.stacked = "scan over layers" in has
    self.names = {nnx.PARTITION_NAME: "layer"} if "partition name" in has else {}
    if self.stacked:
      make = nnx.vmap(lambda rngs: Block(width, has, rngs), transform_metadata=self.names)
      self.blocks = make(rngs.split(case.layers))
    else:
      blocks = [Block(width, has, rngs) for _ in range(case.layers)]
      if "shared layer" in has:
        blocks[-1] = blocks[0]
      for n, block in enumerate(blocks) if self.named else ():
        setattr(self, f"block_{n}", block)
      self.blocks = None if self.named else nnx.List(blocks)
    self.head = None if "tied head" in has else nnx.Linear(width, TOKENS, rngs=rngs)

  def features(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens if self.order is None else self.order[tokens])
    if self.bias is not None:
      x = x + jnp.broadcast_to(self.bias["first"], x.shape)
    if self.stacked:
      scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=self.names)
      return scan(lambda x, block: block(x))(x, self.blocks)
    for n in range(self.count):
      x = getattr(self, f"block_{n}")(x) if self.named else self.blocks[n](x)
    return x

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.features(tokens)
    return self.embed.attend(x) if self.head is None else self.head(x)


def nats(model: Model, batch: Any) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def contrast(model: Model, batch: Any) -> jax.Array:
  z = model.features(batch["x"]).mean(-2)
  return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def balance(model: Model, batch: Any) -> jax.Array:
  """The product of two means over the batch, as in mixtures of experts."""
  chances = jax.nn.softmax(model(batch["x"]))
  return nats(model, batch).mean() + 4 * jnp.square(chances.mean((0, 1))).sum()


def penalty(model: Model, batch: Any) -> jax.Array:
  slope = jax.grad(lambda s: (s * model.features(batch["x"])).mean())(jnp.float32(1.0))
  return nats(model, batch).mean() + jnp.square(slope)


LOSSES: Mapping[str, Callable[[Model, Any], Any]] = {
  "mean": lambda m, b: nats(m, b).mean(),
  "sum": lambda m, b: nats(m, b).sum() / 8,  # the whole sum would diverge, and amplify roundings
  "weighted": lambda m, b: nxp.weighted((nats(m, b) * b["w"]).sum(), b["w"].sum()),
  "masked mean": lambda m, b: (nats(m, b) * b["w"]).sum() / (1 + b["w"].sum()),
  "sum over n - 1": lambda m, b: nats(m, b).mean(-1).sum() / (len(b["x"]) - 1),
  "temperature with n": lambda m, b: jnp.square(m(b["x"]) / (1 + 1 / len(b["x"]))).mean(),
  "logarithm of a mean": lambda m, b: jnp.log(nats(m, b).mean()),
  "contrast": contrast,
  "balance": balance,
  "penalty": penalty,
  "metrics": lambda m, b: (nats(m, b).mean(), {"hits": (m(b["x"]).argmax(-1) == b["y"]).mean()}),
  "vmap": lambda m, b: jax.vmap(lambda b: nats(m, jax.tree.map(lambda x: x[None], b)).mean())(b).mean(),
  "map": lambda m, b: jax.lax.map(lambda x: jnp.square(m(x[None])).mean(), b["x"]).mean(),
  "jit": lambda m, b: jax.jit(lambda x: jnp.square(m(x)).mean())(b["x"]),
  "checkpoint": lambda m, b: jax.checkpoint(lambda x: jnp.square(m(x)).mean())(b["x"]),
}
INSIDE = ("vmap", "map", "jit", "checkpoint", "penalty")
"""Losses that call the model inside a transform of JAX, which cannot write its statistics or random state."""


def data(examples: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  x, y = rng.integers(0, TOKENS, (2, examples, LENGTH)).astype(np.int32)
  return {"x": x, "y": y, "w": (rng.random((examples, LENGTH)) < 0.5).astype(np.float32)}


def planned(case: Case, sizes: Mapping[str, int], *, zero: int, other: bool = False) -> nxp.Plan:
  """The plan of the case on a mesh; or of another model of the case, with other rules and values."""
  explicit = {"no axis": (), "each axis": [*sizes], "the first axis": [*sizes][:1]}[case.explicit]
  devices = jax.devices()[: int(np.prod([*sizes.values()]))]
  mesh = nxp.make_mesh(dict(sizes), devices=devices, explicit=explicit)
  split = [axis for axis in ("tensor", "fsdp") if axis in sizes][:: -1 if other else 1]
  batch = nxp.LogicalRules(batch=tuple(axis for axis in ("data", "fsdp") if axis in sizes))
  rules: list[Any] = [batch, *([nxp.LogicalRules(embed=None)] if other else [])]
  rules.append(nxp.fsdp(tuple(split), min_size=16) if split else nxp.replicate())
  tx = optax.sgd(0.02, momentum=0.9)  # Adam would amplify a gradient that is zero but for rounding
  tx = nxp.with_loss_scale(tx, initial=8.0) if case.scaled else tx
  options: Any = {"optimizer": tx, "zero": zero, "uneven": "next"}
  return nxp.plan(lambda: Model(case, nnx.Rngs(int(other))), mesh, rules, **options)


def follow(case: Case, step: Any, model: Any, optimizer: Any, plan: Any, batch: Any) -> tuple[Any, list[Any]]:
  """What comes after the first steps; returns the model to compare, and losses."""
  if case.after == "replaced array" and "table in a dict" in case.features:
    model.bias = nnx.data({"first": model.bias["first"] * 2})
  if case.after == "another model":
    step(*nxp.create_sharded_model(plan), batch)
  losses = [float(step(model, optimizer, batch)["loss"])]
  if case.after == "evaluated":
    losses.append(float(nxp.eval_step(LOSSES[case.loss])(model, batch)["loss"]))
  if case.after == "restored elsewhere":
    elsewhere = planned(case, {"fsdp": 2}, zero=0)
    with tempfile.TemporaryDirectory() as folder, nxp.Checkpointer(folder) as checkpointer:
      checkpointer.save(1, model, optimizer)
      model, optimizer = checkpointer.restore(elsewhere)
    again = nxp.train_step(LOSSES[case.loss], microbatches=case.microbatches)
    losses.append(float(again(model, optimizer, nxp.shard_batch(data(case.examples), elsewhere))["loss"]))
  return model, losses


def distance_to(model: Model, teacher: Model, batch: Any) -> jax.Array:
  return jnp.square(model(batch["x"]) - jax.lax.stop_gradient(teacher(batch["x"]))).mean()


def value_of(found: Any) -> jax.Array:
  loss = found[0] if type(found) is tuple else found
  return loss.sum / loss.count if isinstance(loss, type(nxp.weighted(0, 1))) else loss


def by_own_step(loss: Callable[[Model, Any], Any], model: Model) -> Callable[..., dict[str, jax.Array]]:
  gathered = nxp.parallel.gather_on_read(lambda model, batch: value_of(loss(model, batch)), model)

  @nnx.jit
  def step(model: Model, optimizer: nnx.Optimizer[Model], batch: Any) -> dict[str, jax.Array]:
    value, slopes = nnx.value_and_grad(gathered)(model, batch)
    optimizer.update(model, slopes)
    return {"loss": value}

  return step


def trained(case: Case, sizes: Mapping[str, int], options: Any, zero: int) -> tuple[list[float], Any]:
  plan, loss = planned(case, sizes, zero=zero), LOSSES[case.loss]
  model, optimizer = nxp.create_sharded_model(plan)
  nxp.check_layout(model, plan, optimizer=optimizer)
  of_several: Mapping[str, Any] = {
    "a teacher": lambda m, b: value_of(loss(m["a"], b)) + distance_to(m["a"], m["b"], b),
    "in turn": {"a": lambda m, b: loss(m["a"], b), "b": lambda m, b: distance_to(m["b"], m["a"], b)},
  }
  models: Any = model
  optimizers: Any = optimizer
  if case.way in of_several:
    second, its_optimizer = nxp.create_sharded_model(planned(case, sizes, zero=zero, other=True))
    models, optimizers = {"a": model, "b": second}, {"a": optimizer}
    optimizers |= {"b": its_optimizer} if case.way == "in turn" else {}
  step: Any = nxp.train_step(of_several.get(case.way, loss), microbatches=case.microbatches, **options)
  step = by_own_step(loss, model) if case.way == "own step" else step
  batch = nxp.shard_batch(data(case.examples), plan)
  found = [step(models, optimizers, batch) for _ in range(2)]
  losses = [float(x) for metrics in found for name, x in metrics.items() if name.split("/")[-1] == "loss"]
  if case.way == "one model":
    models, more = follow(case, step, model, optimizer, plan, batch)
    losses += more
  return losses, jax.device_get(nnx.to_pure_dict(nnx.state(models, nnx.Not(nnx.RngState))))


def distance(a: Any, b: Any) -> float:
  """The largest difference, relative where the first array has elements above 1."""
  return float(abs(np.asarray(a, float) - b).max() / max(1.0, abs(np.asarray(a, float)).max()))


def check(case: Case, given: argparse.Namespace | None = None) -> driver.Result:
  if case.loss in INSIDE and case.features & {"statistics", "dropout", "scan over layers"}:
    return verdict("skipped", "flax refuses to write Variables, or to scan, inside a transform of JAX")
  if {"scale in layers", "scan over layers"} <= case.features:
    return verdict("skipped", "nnx.vmap under jit does not stack a plain array that a layer makes")
  if given:  # many programs are equal
    nxp.compilation_cache(os.path.join(tempfile.gettempdir(), "nnx_parallel-seams"))
  options = dict(case.options)
  if "stage" in LAYOUTS[case.layout]:
    order: Any = ("gpipe", "1f1b", None, None)[case.seed % 4]
    options["pipeline"] = nxp.Pipeline("stage", order=order, recompute=case.seed % 4 < 3)
    if not options["pipeline"].recompute:
      options.pop("remat", None)  # an error without recomputation
  try:
    losses, found = trained(case, LAYOUTS[case.layout], options, case.zero)
  except NnxParallelError as error:
    text = f"{type(error).__name__}: {error}"
    known = any(re.search(pattern, text) and holds(case) for pattern, holds in TRUE)
    return verdict("refused" if known else "FALSELY REFUSED", text)
  wanted, state = trained(case, {"data": 1}, {}, 0)
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
  off = max((distance(a, b) for a, b in pairs), default=0.0)
  lost = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(wanted, losses, strict=True))
  bad = not (lost < TOLERANCE and off < TOLERANCE)
  return verdict("WRONG" if bad else "right", f"losses {wanted} {losses}, parameters off by {off:.1e}")


def verdict(kind: str, why: str) -> driver.Result:
  return {"verdict": kind, "message": why}


def cases(seed: int, _: argparse.Namespace) -> list[Case]:
  return [Case.draw(seed)]


def smaller(case: Case) -> Iterator[Case]:
  for feature in sorted(case.features):
    yield dataclasses.replace(case, features=case.features - {feature})
  for name, values in OPTIONS.items():
    if case.options[name] != values[0]:
      yield dataclasses.replace(case, options={**case.options, name: values[0]})
  plain = {"loss": "mean", "way": "one model", "after": "nothing", "scaled": False, "explicit": "no axis",
           "zero": 0, "microbatches": 1, "layers": 2, "examples": 16, "layout": "data 4"}  # fmt: skip
  for name, value in plain.items():
    if getattr(case, name) != value:
      yield dataclasses.replace(case, **{name: value})


if __name__ == "__main__":
  driver.run("searches.seams")
