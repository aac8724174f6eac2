"""A training loop with checkpoints, metrics and resume, and the jobs that it runs."""
