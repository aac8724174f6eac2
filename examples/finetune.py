"""Trains a Hugging Face checkpoint on all devices. The next run continues from the last saved step.

It reads theirs/ (config.json, *.safetensors) and tokens.npy, int32 (samples, length). tiny_checkpoint.py
writes small files to try it with:

  python tiny_checkpoint.py
  python finetune.py 100
"""

import sys

import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.interop import from_config, import_safetensors, weight_map_of


def loss(model, x):
  return optax.softmax_cross_entropy_with_integer_labels(model(x[:, :-1]), x[:, 1:]).mean()


nxp.init_distributed()  # on a cluster, joins the processes
steps, tokens = int(sys.argv[1]), np.load("tokens.npy", mmap_mode="r")
mesh, rules, adamw = nxp.make_mesh(fsdp=-1), nxp.fsdp(), optax.adamw(1e-4)
plan = nxp.plan(lambda: from_config("theirs", nnx.Rngs(0)), mesh, rules, optimizer=adamw)
model, optimizer = import_safetensors("theirs", plan, weight_map_of("theirs"))
step, batches = nxp.train_step(loss), lambda samples: nxp.batches(tokens, plan, batch=16, start=samples)
with nxp.Checkpointer("run", max_to_keep=2) as saved:
  options = {"checkpointer": saved, "save_every": 100, "resume": "latest"}
  nxp.fit(step, model, optimizer, batches, steps=steps, plan=plan, **options)
