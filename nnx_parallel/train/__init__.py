"""Train and eval steps, optimizers, precision: what happens between a loss function and an updated module."""
