"""Attention that never holds all scores: found in a trace or written as a function; by tiles, or kernels."""
