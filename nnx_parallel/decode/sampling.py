"""How the next token is chosen: the same token for the same request, on each layout."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from nnx_parallel.core.checked import check_arguments
from nnx_parallel.errors import DecodeError


@check_arguments(DecodeError)
@dataclasses.dataclass(frozen=True)
class Sampling:
  """How `nxp.generator` chooses a token from the logits; greedy by default.

  Attributes:
    temperature: the number that divides the logits; 0 takes the most likely token (greedy decoding).
    top_k: draw only from this many of the most likely tokens; None draws from all tokens.
    top_p: draw only from the smallest set of most likely tokens whose probabilities sum to at least this
      number (arXiv:1904.09751).

  Raises:
    DecodeError: a value is out of range, or `top_k` or `top_p` is given for greedy decoding, which does not
      draw.

  Example:
    >>> import nnx_parallel as nxp
    >>> nxp.Sampling(temperature=0.8, top_k=40)
    Sampling(temperature=0.8, top_k=40, top_p=1.0)
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0

  def __post_init__(self) -> None:
    wrong = {
      "temperature": not 0 <= self.temperature < float("inf"),
      "top_k": self.top_k is not None and self.top_k < 1,
      "top_p": not 0 < self.top_p <= 1,
    }
    for name in wrong:
      if wrong[name]:
        raise DecodeError(
          f"{name}={getattr(self, name)!r} is out of range.",
          fix="temperature >= 0, top_k >= 1 and 0 < top_p <= 1.",
        )
    if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
      raise DecodeError(
        "top_k and top_p need a temperature: greedy decoding draws nothing.",
        details=str(self),
        fix="nxp.Sampling(temperature=1.0, top_k=40)",
      )

  @check_arguments(DecodeError)
  def choose(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
    """Chooses one token for each row.

    Args:
      logits: logits of global shape `(batch, vocabulary)`.
      keys: one PRNG key for each row, `(batch,)`; greedy decoding does not use them.

    Returns:
      int32 tokens `(batch,)`.

    Raises:
      DecodeError: the shapes do not fit.
    """
    if logits.ndim != 2 or (self.temperature and keys.shape[:1] != logits.shape[:1]):
      raise DecodeError(
        "choose needs logits of rows of tokens, and a key for each row.",
        details=f"logits {logits.shape}, keys {keys.shape}",
        fix="choose(logits[:, -1], jax.random.split(key, len(logits)))",
      )
    logits = logits.astype(jnp.float32)
    if self.temperature == 0:
      return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = self._kept(logits / self.temperature)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

  def _kept(self, logits: jax.Array) -> jax.Array:
    """The logits, with minus infinity for tokens that must not be drawn."""
    if self.top_k is not None:
      chosen = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[1]
      logits = _only(logits, chosen, jnp.ones(chosen.shape, bool))
    if self.top_p < 1:
      order = jnp.argsort(logits, axis=-1, descending=True)
      falling = jnp.take_along_axis(logits, order, -1)
      chances = jax.nn.softmax(falling, axis=-1)
      # A token is kept while earlier tokens sum to less than top_p, so the first token is always kept.
      kept = jnp.cumsum(chances, axis=-1) - chances < self.top_p
      logits = _only(logits, order, kept)
    return logits


def _only(logits: jax.Array, numbers: jax.Array, kept: jax.Array) -> jax.Array:
  """The logits of the kept tokens: by their numbers, since bfloat16 logits often tie."""
  mask = jax.vmap(lambda n, k: jnp.zeros(logits.shape[-1], bool).at[n].set(k))(numbers, kept)
  return jnp.where(mask, logits, -jnp.inf)
