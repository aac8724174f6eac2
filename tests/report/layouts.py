"""The MLP of the benchmark whose communication is known by hand: used by several tests of this package."""

from benchmarks.layouts import BATCH, HIDDEN, MLP, PARAMS, WIDTH, batch, init, loss, plan

__all__ = ["BATCH", "HIDDEN", "MLP", "PARAMS", "WIDTH", "batch", "init", "loss", "plan"]
