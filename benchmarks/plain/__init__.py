"""Models as people write them: plain Python loops over lists of blocks, no annotation, nothing of this package."""
