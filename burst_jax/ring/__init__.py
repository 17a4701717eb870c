"""The ring: what travels when, the forward, the two backwards, and their ``custom_vjp``."""
