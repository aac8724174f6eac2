"""The declarations of a user: logical names, path rules, fallbacks."""
