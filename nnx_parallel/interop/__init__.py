"""Weights of other programs: safetensors, Orbax alone, and models that were built otherwise."""
