"""Generation: caches, sampling, and the loop over tokens."""
