"""What a user declares: logical names, path rules, fallbacks, presets."""
