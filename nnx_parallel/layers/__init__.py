"""Layers of any module: marked in the trace of a loss, and used there without an edit."""
