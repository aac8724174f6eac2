"""Trains a vision transformer with BatchNorm and dropout on the handwritten digits of scikit-learn.

The second run continues with the batch statistics and the random state of dropout of the first. The images
come with scikit-learn: pip install scikit-learn

  export JAX_NUM_CPU_DEVICES=8    # simulates devices; leave it out on accelerators
  python vision_transformer.py --steps 150
  python vision_transformer.py --steps 300
"""

import argparse
import itertools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_parallel as nxp

WIDTH, HEADS, DEPTH, BATCH = 64, 4, 2, 128


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
    self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    x = x + self.dropout(self.attention(self.norms[0](x)))
    return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class VisionTransformer(nnx.Module):
  """Logits (batch, 10) for images (batch, 8, 8, 1)."""

  def __init__(self, rngs):
    self.stem = nnx.Conv(1, WIDTH, (3, 3), strides=2, rngs=rngs)
    self.batch_norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
    self.positions = nnx.Param(0.02 * rngs.params.normal((16, WIDTH)))
    self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
    self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

  def __call__(self, images):
    x = nnx.relu(self.batch_norm(self.stem(images)))
    x = x.reshape(len(x), 16, WIDTH) + self.positions
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean(axis=1))


def loss_fn(model, batch):
  logits = model(batch["image"])
  right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
  return nats.mean(), {"accuracy": nxp.weighted(right.sum(), right.size)}


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("--steps", type=int, default=150)
  parser.add_argument("--checkpoint", default="runs/vision_transformer")
  args = parser.parse_args()

  nxp.init_distributed()
  adamw, rules = optax.adamw(2e-3), nxp.presets.fsdp(min_size=2**12)
  plan = nxp.plan(lambda: VisionTransformer(nnx.Rngs(0)), nxp.make_mesh(fsdp=-1), rules, optimizer=adamw)
  model, optimizer = nxp.create_sharded_model(plan)

  images, labels = load_digits(return_X_y=True)
  images, labels = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32), labels.astype(np.int32)
  order = np.random.default_rng(0).permutation(len(labels))
  held_out, trained = order[: 2 * BATCH].reshape(2, BATCH), order[2 * BATCH :]

  def batches(samples):  # endless; starts after this number of samples
    rows = (np.random.default_rng(i).choice(trained, BATCH) for i in itertools.count(samples // BATCH))
    return place(rows)

  def place(rows):
    return nxp.batches(({"image": images[r], "label": labels[r]} for r in rows), plan, global_batch=True)

  # The same Variables, but without dropout and with the running batch statistics.
  frozen = nnx.view(model, deterministic=True, use_running_average=True)
  step, eval_step = nxp.train_step(loss_fn), nxp.eval_step(loss_fn, pairs=True)

  def evaluate():
    return nxp.evaluate(eval_step, frozen, place(held_out))

  with nxp.Checkpointer(args.checkpoint, max_to_keep=2, best="eval_accuracy") as saved:
    options = {"checkpointer": saved, "save_every": 50, "resume": "latest", "eval_every": 50}
    nxp.fit(step, model, optimizer, batches, steps=args.steps, plan=plan, evaluate=evaluate, **options)


if __name__ == "__main__":
  main()
