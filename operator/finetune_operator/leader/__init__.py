"""The Lease that ensures that only one replica works at a time."""
