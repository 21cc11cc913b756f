"""DSpark speculative decoding for JAX: draft in one pass, verify in one pass, keep the target's distribution."""

__version__ = "0.1.0"
