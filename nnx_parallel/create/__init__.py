"""Plan -> live, sharded module."""
