"""The base of every other package: traces, Variables and paths, mesh axes, padding, text, figures."""
