"""Values are compared bit for bit in this package, so its programs are compiled as users have them."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def programs_of_users():
  jax.clear_caches()  # what earlier tests compiled otherwise
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)
  jax.clear_caches()
