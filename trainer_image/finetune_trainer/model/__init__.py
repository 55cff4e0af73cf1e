"""Loads the base model, attaches adapters and shards the result. Invariants are asserted in each of these steps."""
