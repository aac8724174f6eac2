"""What every other package builds on: traces, Variables and paths, mesh axes, padding, text, figures."""
