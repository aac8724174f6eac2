"""Batches on devices, and what several processes have to agree on."""
