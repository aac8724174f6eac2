"""The persistent compilation cache: later starts of a job compile nothing."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import PlanError


@check_arguments(PlanError)
def compilation_cache(directory: str | os.PathLike[str], *, minimum_seconds: float = 0.0) -> str:
  """Keeps compiled programs in a directory, for this process and for later processes.

  This is the persistent compilation cache of JAX, without the thresholds that would exclude the many small
  programs of a model's creation. Processes may share the directory, because the key of an entry contains the
  program, the compiler, its flags and the devices. JAX runs the programs that it finds there, so use a
  directory that only trusted people can write to. On simulated CPU devices, a program that is loaded from the
  cache may hang if it has several concurrent collectives (jaxlib 0.12.0); a program that is compiled does
  not.

  Args:
    directory: a local directory, which is created if it does not exist; or a bucket that JAX can write to,
      for example `gs://bucket/cache`.
    minimum_seconds: programs that compile faster than this are not kept.

  Returns:
    The directory, as an absolute path unless it is a bucket.

  Example:
    >>> import os, tempfile, nnx_parallel as nxp
    >>> directory = nxp.compilation_cache(os.path.join(tempfile.mkdtemp(), "programs"))
    >>> os.path.isdir(directory)
    True
  """
  where = os.fspath(directory)
  if "://" not in where:
    path = Path(where).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    where = str(path)
  # jax decides at its first compilation whether there is a cache, and would not look again.
  jax_cache.reset_cache()
  jax.config.update("jax_compilation_cache_dir", where)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", minimum_seconds)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  return where
