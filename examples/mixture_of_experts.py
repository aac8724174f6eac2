"""Trains a transformer with a mixture of experts on the bytes of Python's manual.

During the training, the largest load of an expert falls towards 512 tokens, which is an even load:

  export JAX_NUM_CPU_DEVICES=8    # simulates devices; leave it out on accelerators
  python mixture_of_experts.py --steps 60
"""

import argparse
import functools
import math
from pydoc_data.topics import topics  # the text: the manual that comes with Python

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp

TEXT = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
WIDTH, HIDDEN, EXPERTS, DEPTH, LENGTH, BATCH = 64, 128, 8, 2, 64, 32


gelu_experts = functools.partial(nxp.parallel.mlp_experts, activation=nnx.gelu)


class Experts(nnx.Module):
  def __init__(self, rngs):
    draw, names = nnx.initializers.lecun_normal(batch_axis=0), {"out_sharding": ("expert", None, None)}
    self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
    self.up = nnx.Param(draw(rngs.params(), (EXPERTS, WIDTH, HIDDEN)), eager_sharding=False, **names)
    self.down = nnx.Param(draw(rngs.params(), (EXPERTS, HIDDEN, WIDTH)), eager_sharding=False, **names)
    self.bias = nnx.BatchStat(jnp.zeros(EXPERTS))  # balances the loads; it has no gradient
    self.load = nnx.BatchStat(jnp.zeros(EXPERTS, jnp.int32))  # the tokens of each expert in the last step

  def __call__(self, x):
    routing = nxp.parallel.route(self.router(x), 2, score="sigmoid", bias=self.bias[...])
    self.bias[...] = nxp.parallel.balanced_bias(self.bias[...], routing.load, 0.02)
    self.load[...] = routing.load
    return nxp.parallel.experts(gelu_experts, {"up": self.up, "down": self.down}, x, routing)[0]


class LanguageModel(nnx.Module):
  """Logits of the next byte, (batch, LENGTH, 256), for bytes (batch, LENGTH)."""

  def __init__(self, rngs):
    self.bytes, self.positions = nnx.Embed(256, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
    attentions = [nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs) for _ in range(DEPTH)]
    self.attentions = nnx.List(attentions)
    self.experts = nnx.List([Experts(rngs) for _ in range(DEPTH)])
    self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2 * DEPTH)])
    self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

  def __call__(self, x):
    x = self.bytes(x) + self.positions.embedding
    for n, (attention, experts) in enumerate(zip(self.attentions, self.experts, strict=True)):
      x = x + attention(self.norms[2 * n](x), is_causal=True)
      x = x + experts(self.norms[2 * n + 1](x))
    return self.head(x)


def loss_fn(model, x):
  nats = optax.softmax_cross_entropy_with_integer_labels(model(x[:, :-1]), x[:, 1:])
  return nats.mean(), {"largest_load": jnp.max(jnp.stack([layer.load[...] for layer in model.experts]))}


def windows(samples):
  """Endless random windows of the text; each batch depends only on the number of samples before it."""
  while True:
    starts = np.random.default_rng(samples).integers(len(TEXT) - LENGTH, size=(BATCH, 1))
    yield TEXT[starts + np.arange(LENGTH + 1)].astype(np.int32)
    samples += BATCH


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--checkpoint", default="runs/mixture_of_experts")
  args = parser.parse_args()

  nxp.init_distributed()
  mesh = nxp.make_mesh(data=-1, expert=math.gcd(jax.device_count(), EXPERTS))
  rules = nxp.presets.expert()  # shards the experts over `expert`, and the batch over both axes
  plan = nxp.plan(lambda: LanguageModel(nnx.Rngs(0)), mesh, rules, optimizer=optax.adamw(2e-3))
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss_fn)

  def batches(samples):
    return nxp.batches(windows(samples), plan, global_batch=True)

  with nxp.Checkpointer(args.checkpoint, max_to_keep=2) as saved:
    options = {"checkpointer": saved, "save_every": 20, "resume": "latest"}
    nxp.fit(step, model, optimizer, batches, steps=args.steps, plan=plan, **options)


if __name__ == "__main__":
  main()
