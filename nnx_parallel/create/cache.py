"""The persistent compilation cache: later starts of a job compile nothing."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache


def compilation_cache(directory: str | os.PathLike[str], *, minimum_seconds: float = 0.0) -> str:
  """Keeps compiled programs in a directory, for this process and for later processes.

  This is jax's cache, without the thresholds that leave out the many small programs of a creation. Processes
  may share the directory; the key of an entry is its program, the compiler, its flags and the devices.
  Programs in the directory are run: use a directory that only trusted people can write. On simulated CPU
  devices a loaded program with several concurrent collectives may hang (jaxlib 0.12.0); a compiled program
  does not.

  Args:
    directory: made when it does not exist; or a bucket that jax can write, for example `gs://bucket/cache`.
    minimum_seconds: programs that compile faster than this are not kept.

  Returns:
    The directory; an absolute path unless it is a bucket.

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
