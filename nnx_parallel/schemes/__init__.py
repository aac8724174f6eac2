"""Schemes that annotations alone cannot express: each is one file, in plain JAX."""
