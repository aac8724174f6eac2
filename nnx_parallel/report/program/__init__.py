"""Facts of compiled programs."""
