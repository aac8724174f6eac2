"""The ground floor: traces, Variables and paths, mesh axes, text."""
