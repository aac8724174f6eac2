"""Small modules with the features of real ones, shared by the tests of this package."""

from flax import nnx


def named(*names):
  """Metadata keyword that names the dims of a parameter."""
  return {"out_sharding": names}


class Block(nnx.Module):
  def __init__(self, width, rngs):
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs, kernel_metadata=named("embed", "mlp"))
    self.down = nnx.Linear(4 * width, width, rngs=rngs, kernel_metadata=named("mlp", "embed"))

  def __call__(self, x):
    return x + self.down(nnx.gelu(self.up(self.norm(x))))


class LM(nnx.Module):  # A tiny language model with tied embeddings
  def __init__(self, vocab, width, depth, rngs):
    self.embed = nnx.Embed(vocab, width, rngs=rngs, embedding_metadata=named("vocab", "embed"))
    self.head = self.embed.embedding
    self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return x @ self.head[...].T
