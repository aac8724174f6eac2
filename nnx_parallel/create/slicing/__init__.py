"""Constructors cut into slices: each kind of layer compiles once."""
