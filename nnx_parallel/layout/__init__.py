"""Plan: names and rules become the table of layouts that all other code reads."""
