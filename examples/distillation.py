"""Trains a large teacher on half of the devices, and a small student of its outputs on the other half.

In a job of several processes, JAX moves no arrays to other devices, so there both models use all devices.
The images come with scikit-learn: pip install scikit-learn

  export JAX_NUM_CPU_DEVICES=8    # simulates devices; leave it out on accelerators
  python distillation.py --steps 200
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import nnx_parallel as nxp

BATCH = 128


def classifier(width, seed):
  def init():
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(64, width, rngs=rngs), nnx.silu, nnx.Linear(width, 10, rngs=rngs))

  return init


def of_labels(model, batch):
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["pixels"]), batch["labels"]).mean()


def of_teacher(model, batch):
  """The cross-entropy to the teacher's probabilities, and how often both choose the same class."""
  mine, theirs = model(batch["pixels"]), batch["logits"]
  same = (mine.argmax(-1) == theirs.argmax(-1)).astype(jnp.float32).mean()
  return optax.softmax_cross_entropy(mine, nnx.softmax(theirs)).mean(), {"same": same}


@nnx.jit
def predict(model, x):
  return model(x)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("--steps", type=int, default=200, help="the steps of the student")
  parser.add_argument("--checkpoint", default="runs/distillation")
  args = parser.parse_args()

  nxp.init_distributed()
  first = last = jax.devices()
  if jax.process_count() == 1 and len(first) > 1:
    first, last = first[::2], last[1::2]
  large, small = nxp.make_mesh(fsdp=-1, devices=first), nxp.make_mesh(data=-1, devices=last)
  plans = {
    "teacher": nxp.plan(classifier(1024, seed=0), large, optimizer=optax.adam(1e-3)),
    "student": nxp.plan(classifier(16, seed=1), small, optimizer=optax.adam(2e-3)),
  }
  teacher, teacher_optimizer = nxp.create_sharded_model(plans["teacher"])
  student, student_optimizer = nxp.create_sharded_model(plans["student"])
  pixels, labels = load_digits(return_X_y=True)
  pixels, labels = (pixels / 16).astype(np.float32), labels.astype(np.int32)

  def digits(samples):  # endless; each batch depends only on the number of samples before it
    while True:
      rows = np.random.default_rng(samples).integers(len(labels), size=BATCH)
      yield {"pixels": pixels[rows], "labels": labels[rows]}
      samples += BATCH

  def labelled(samples):
    return nxp.batches(digits(samples), plans["teacher"], global_batch=True)

  def predicted(samples):
    for batch in labelled(samples):
      found = {"pixels": batch["pixels"], "logits": predict(teacher, batch["pixels"])}
      yield nxp.parallel.send(found, plans["student"])

  def train(name, loss_fn, model, optimizer, batches, steps):
    with nxp.Checkpointer(f"{args.checkpoint}/{name}", max_to_keep=2) as saved:
      options = {"plan": plans[name], "checkpointer": saved, "save_every": 50, "resume": "latest"}
      nxp.fit(nxp.train_step(loss_fn), model, optimizer, batches, steps=steps, **options)

  train("teacher", of_labels, teacher, teacher_optimizer, labelled, 100)
  train("student", of_teacher, student, student_optimizer, predicted, args.steps)


if __name__ == "__main__":
  main()
