"""Batches on devices, arrays on hosts, and signals to stop."""
