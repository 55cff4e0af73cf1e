"""Base model -> adapters -> sharded model, with the invariants that are asserted on the way."""
