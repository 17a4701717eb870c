"""Layouts: the sequence permutations over the shards of a ring."""
