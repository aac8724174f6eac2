"""MaxText's ahead-of-time compilation of its own step, read by the reader of our reports.

    python -m benchmarks.maxtext_step REPORT.pickle compile_topology=v5e-16 model_name=llama3-8b ...

Does what `python -m maxtext.trainers.pre_train.train_compile` does with the same options, which prints
neither the peak nor what is sent. Needs MaxText beside this project: `pip install 'maxtext[tpu]==0.2.5'`.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from typing import Any

# For a machine without a TPU; read when jax and the TPU compiler are loaded.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax

from nnx_parallel.report.compile_report import CompileReport, report_of


def is_installed() -> bool:
  """Whether MaxText is here."""
  return importlib.util.find_spec("maxtext") is not None


def compile_by_maxtext(*options: str) -> CompileReport:
  """The report of MaxText's own step, compiled in a process of its own."""
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report"
    subprocess.run([sys.executable, "-m", "benchmarks.maxtext_step", str(report), *options], check=True)
    return pickle.loads(report.read_bytes())


def main() -> None:
  """Compiles a step and writes its report."""
  from absl import app
  from maxtext.trainers.pre_train import train_compile

  compile_step = train_compile.jit_and_compile

  def compile_and_report(*args: Any) -> jax.stages.Compiled:
    # Its fourth argument is the mesh; axes of size 1 split nothing.
    compiled = compile_step(*args)
    axes = {axis: size for axis, size in args[3].shape.items() if size > 1}
    pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(report_of(compiled, axes=axes)))
    return compiled

  train_compile.jit_and_compile = compile_and_report
  app.run(train_compile.main, argv=[sys.argv[0], *sys.argv[2:]])


if __name__ == "__main__":
  main()
