"""Rules that are proposed for a module without any."""
