"""`python -m nnx_parallel`: the command line, where its script is not on the path."""

from __future__ import annotations

import sys

from nnx_parallel.cli.command import main

if __name__ == "__main__":
  sys.exit(main())
