"""The command line: modules with `register(commands)`, which `main` calls."""
