"""Checkpoints of trainable parameters and optimizer state. Any world size can read them, and an incomplete one is never used."""
