"""Complete small jobs on real data. A user copies one to start.

A recipe is one Python file that defines `init()`, `optimizer()`, `loss(model, batch)` and
`batches(start)`, and may define `rules()`, `mesh()`, `tokens(batch)` and `microbatches()`.
"""
