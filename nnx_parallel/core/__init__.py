"""What every other room builds on: traces, Variables and paths, mesh axes, padding, text, figures."""
