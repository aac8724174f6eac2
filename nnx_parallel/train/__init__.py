"""Train and eval steps, optimizers, precision: everything between a loss function and an updated module."""
