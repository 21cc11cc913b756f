"""DSpark speculative decoding for JAX: one pass drafts, one pass verifies, the target's law is kept."""

__version__ = "0.1.0"
