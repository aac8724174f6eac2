"""Train and eval steps: everything between a loss function and an updated module."""
