"""Meshes, sharding rules, collectives of weights, processes, and XLA options."""
