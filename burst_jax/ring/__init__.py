"""The ring: schedule, forward and backward pass, and their ``custom_vjp``."""
