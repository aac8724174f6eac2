"""Wrappers of an optax transformation: float32 masters, averaged weights, skipped steps, a loss scale."""
