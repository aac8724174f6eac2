"""A plan as text, JSON, pictures, a difference and an audit: each reads the table, nothing else."""
