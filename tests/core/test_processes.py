"""Who is missing at a barrier, from what the processes say to each other."""

import pytest

from nnx_parallel.core import processes
from nnx_parallel.errors import HostError


def test_who_is_missing_is_known_whatever_the_runtime_says(monkeypatch):
  said: dict[str, str] = {}

  class Client:
    def key_value_set(self, key: str, value: str) -> None:
      said[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
      return [(key, value) for key, value in said.items() if key.startswith(prefix)]

    def wait_at_barrier(self, *_: object) -> None:
      raise RuntimeError("in other words.")

  monkeypatch.setattr(processes, "_client", Client)
  monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
  with pytest.raises(HostError, match=r"processes \[1, 2\] did not come to 'a' within 5 s.\n.*in other"):
    processes.wait_for_all("a", 5)
