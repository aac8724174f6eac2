"""Numbers as people read them."""

import pytest

from nnx_parallel.core.text import format_bytes

SHOWN = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 2**20 - 1: "1024 KiB", 2**52: "4096 TiB"}


@pytest.mark.parametrize("count", SHOWN)
def test_bytes(count):
  assert format_bytes(count) == SHOWN[count]
