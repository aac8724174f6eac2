"""Searches for what is wrong. The devices are set here, before jax starts."""

import os
from importlib import metadata

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("NPROC", "64")  # a collective holds one of XLA's threads for each device that waits
# Compiled once and run twice: what the code is worth does not matter. The partitioner does not see these.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
  " --xla_llvm_disable_expensive_passes=true"
  # An older XLA ends the process.
  + " --xla_cpu_opt_preset=FAST_COMPILE"
  * ([int(number) for number in metadata.version("jaxlib").split(".")[:2]] >= [0, 12]),
)
