"""Checkpoints of trainable parameters and optimizer state that any world size can read, and never half of one."""
