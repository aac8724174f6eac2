"""The second start compiles nothing."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache as jax_cache

import nnx_parallel as nxp
from create.models import arrays_of, assert_same_arrays

OPTIONS = (
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
  "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def events() -> Iterator[Counter[str]]:
  before = {name: getattr(jax.config, name) for name in OPTIONS}
  counted: Counter[str] = Counter()

  def count(event: str, **_: object) -> None:
    counted[event.rsplit("/", 1)[-1]] += 1

  jax.monitoring.register_event_listener(count)
  yield counted
  jax.monitoring.unregister_event_listener(count)
  for name, value in before.items():
    jax.config.update(name, value)
  jax_cache.reset_cache()


@pytest.mark.slow
def test_a_second_creation_reads_every_program(tmp_path, events):
  directory = nxp.compilation_cache(tmp_path / "new" / "cache")
  assert directory == str(tmp_path / "new" / "cache")
  plan = nxp.plan(lambda: nnx.Linear(24, 40, rngs=nnx.Rngs(0)), nxp.make_mesh(fsdp=8), nxp.fsdp(min_size=0))
  jax.clear_caches()
  first = nxp.create_sharded_model(plan)
  assert events["cache_misses"] > 0
  assert list(Path(directory).iterdir())
  events.clear()
  jax.clear_caches()
  second = nxp.create_sharded_model(plan)
  assert (events["cache_misses"], events["cache_hits"] > 0) == (0, True)
  assert_same_arrays(arrays_of(first), arrays_of(second))
