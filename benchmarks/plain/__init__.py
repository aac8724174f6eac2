"""Models as people write them: loops over lists of blocks, without annotations or this package."""
