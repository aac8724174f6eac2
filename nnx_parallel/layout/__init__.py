"""Declare -> plan: meshes, rules, names, and the one table that everything else reads."""
