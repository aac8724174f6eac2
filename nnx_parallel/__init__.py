"""Parallelism for Flax NNX: any module, any mesh, one plan."""
