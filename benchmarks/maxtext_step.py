"""MaxText's ahead-of-time compilation of its own step, read by the reader of our reports.

    python -m benchmarks.maxtext_step REPORT.json compile_topology=v5e-16 model_name=llama3-8b ...

Does what `python -m maxtext.trainers.pre_train.train_compile` does with the same options, which prints
neither the peak nor what is sent. Needs MaxText beside this project: `pip install 'maxtext[tpu]==0.2.5'`.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

# For a machine without a TPU; read when the TPU compiler is loaded.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from absl import app
from maxtext.trainers.pre_train import train_compile

from nnx_parallel.report.compile_report import report_of

compile_step = train_compile.jit_and_compile


def compile_and_report(*args: Any) -> jax.stages.Compiled:
  """MaxText's `jit_and_compile`, whose fourth argument is the mesh; its axes of size 1 split nothing."""
  compiled = compile_step(*args)
  axes = {axis: size for axis, size in args[3].shape.items() if size > 1}
  pathlib.Path(sys.argv[1]).write_text(report_of(compiled, axes=axes).to_json())
  return compiled


if __name__ == "__main__":
  train_compile.jit_and_compile = compile_and_report
  app.run(train_compile.main, argv=[sys.argv[0], *sys.argv[2:]])
