"""The command line: modules with `register(commands)`, which `main` calls."""

from etils import epy

with epy.lazy_api_imports(globals()):
  from nnx_parallel.cli.command import main

__all__ = ["main"]
