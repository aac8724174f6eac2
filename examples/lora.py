"""Trains LoRA adapters on a Hugging Face checkpoint, and writes them in the format of PEFT.

Without a folder, the script writes a tiny checkpoint and uses it. The tokens are int32 (samples, length):

  export JAX_NUM_CPU_DEVICES=8    # simulates devices; leave it out on accelerators
  python lora.py
  python lora.py theirs --tokens tokens.npy
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import nnx_parallel as nxp
from nnx_parallel.interop import from_config, import_safetensors, weight_map_of


def loss_fn(model, x):
  return optax.softmax_cross_entropy_with_integer_labels(model(x[:, :-1]), x[:, 1:]).mean()


def write_tiny_checkpoint():
  script, cpu = Path(__file__).with_name("tiny_checkpoint.py"), {"JAX_PLATFORMS": "cpu"}
  if not Path("runs/tiny").exists():
    subprocess.run([sys.executable, script, "runs/tiny"], env=os.environ | cpu, check=True)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("folder", nargs="?", help="a Hugging Face checkpoint")
  parser.add_argument("--tokens", default="runs/tiny/tokens.npy")
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--checkpoint", default="runs/lora")
  args = parser.parse_args()

  nxp.init_distributed()
  if args.folder is None:
    args.folder = "runs/tiny/theirs"
    if nxp.hosts.main_process():
      write_tiny_checkpoint()
    nxp.hosts.barrier("the tiny checkpoint")
  tokens = np.load(args.tokens, mmap_mode="r")

  def init():
    model = from_config(args.folder, nnx.Rngs(0))
    nxp.interop.add_lora(model, "layers.*.self_attn.*", rank=8, alpha=16, rngs=nnx.Rngs(1))
    return model

  plan = nxp.plan(init, nxp.make_mesh(fsdp=-1), nxp.fsdp(), optimizer=optax.adam(1e-2), wrt=nnx.LoRAParam)
  model, optimizer = import_safetensors(args.folder, plan, weight_map_of(args.folder), skip=["*.lora.*"])

  def batches(samples):
    return nxp.batches(tokens, plan, batch=16, start=samples)

  with nxp.Checkpointer(args.checkpoint) as saved:
    options = {"checkpointer": saved, "save_every": 50, "only": nnx.LoRAParam, "resume": "latest"}
    nxp.fit(nxp.train_step(loss_fn), model, optimizer, batches, steps=args.steps, plan=plan, **options)
  adapters = Path(args.checkpoint, f"peft-{args.steps}")
  if not adapters.exists():
    nxp.interop.export_peft(adapters, model, args.folder)


if __name__ == "__main__":
  main()
