"""Searches for what is wrong. The devices are set here, before jax starts; a process with jax has its own."""

import os
import sys
from importlib import metadata

if "jax" not in sys.modules:
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  os.environ.setdefault("NPROC", "64")  # a collective holds one of XLA's threads for each device that waits
  # Compiled once and run twice: what the code is worth does not matter. The partitioner does not see these.
  flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  flags += " --xla_llvm_disable_expensive_passes=true"
  if [int(number) for number in metadata.version("jaxlib").split(".")[:2]] >= [0, 12]:
    flags += " --xla_cpu_opt_preset=FAST_COMPILE"  # an older XLA ends the process
  os.environ.setdefault("XLA_FLAGS", flags)
