"""A search for the best mesh, rules and options of a step."""
