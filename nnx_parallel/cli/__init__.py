"""The command line: one file per command, each with `register(commands)` and `run(args)`."""
