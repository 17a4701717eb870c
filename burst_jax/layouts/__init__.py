"""Layouts: the permutations of a sequence over the shards of a ring."""
