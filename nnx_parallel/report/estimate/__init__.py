"""Memory and time of a step, estimated without a compiler."""
