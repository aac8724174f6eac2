"""Constructors cut into slices that compile once for each kind of layer."""
