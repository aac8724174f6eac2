"""Trains a transformer to predict the bytes of Python's manual, and continues on another mesh.

The second run continues at step 60, with tensor parallelism:

  export JAX_NUM_CPU_DEVICES=8    # simulates devices; leave it out on accelerators
  python language_model.py --steps 60
  python language_model.py --steps 120 --tensor 2
"""

import argparse
from pydoc_data.topics import topics  # the text: the manual that comes with Python

import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp

TEXT = np.frombuffer("\n".join(topics.values()).encode(), np.uint8)
WIDTH, HEADS, DEPTH, LENGTH, BATCH = 128, 4, 3, 64, 32


class Block(nnx.Module):
  def __init__(self, rngs):
    self.attention_norm, self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
    self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.attention_norm(x), is_causal=True)
    return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nnx.Module):
  """Logits of the next byte, (batch, LENGTH, 256), for bytes (batch, LENGTH)."""

  def __init__(self, rngs):
    self.bytes, self.positions = nnx.Embed(256, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
    self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

  def __call__(self, x):
    x = self.bytes(x) + self.positions.embedding
    for block in self.blocks:
      x = block(x)
    return self.head(x)


class Windows:
  """Random windows of the text. A window depends only on its index, so a run can continue on any mesh."""

  def __len__(self):
    return 10**9

  def __getitem__(self, index):
    start = np.random.default_rng(index).integers(len(TEXT) - LENGTH)
    return TEXT[start : start + LENGTH + 1].astype(np.int32)


def loss_fn(model, x):
  """The mean cross-entropy, in nats per byte."""
  return optax.softmax_cross_entropy_with_integer_labels(model(x[:, :-1]), x[:, 1:]).mean()


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--tensor", type=int, default=1, help="devices for tensor parallelism (default: 1)")
  parser.add_argument("--checkpoint", default="runs/language_model")
  args = parser.parse_args()

  nxp.init_distributed()
  mesh = nxp.make_mesh(data=1, fsdp=-1, tensor=args.tensor)
  rules = [nxp.presets.layers(), nxp.presets.fsdp_tensor(min_size=2**12)]  # names of dims, then their axes
  plan = nxp.plan(lambda: LanguageModel(nnx.Rngs(0)), mesh, rules, optimizer=optax.adamw(1e-3))
  model, optimizer = nxp.create_sharded_model(plan)
  step = nxp.train_step(loss_fn)

  def batches(samples):
    return nxp.batches(Windows(), plan, batch=BATCH, start=samples)

  with nxp.Checkpointer(args.checkpoint, max_to_keep=2) as saved:
    options = {"checkpointer": saved, "save_every": 20, "resume": "latest"}
    nxp.fit(step, model, optimizer, batches, steps=args.steps, plan=plan, **options)


if __name__ == "__main__":
  main()
