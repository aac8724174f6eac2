"""Reports read what the compiler itself says, so nothing here comes from the cache of compiled programs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def compile_anew(no_program_cache: None) -> None:
  """For every test of this room."""
