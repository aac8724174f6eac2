"""Plan: names and rules made into the one table of layouts that everything else reads."""
