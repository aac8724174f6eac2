"""Ways to compute in parallel that the layout of arrays alone does not give."""
