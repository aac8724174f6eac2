"""Data placement and many hosts."""
