"""Tokens per second and memory of training on CPU, next to a bare PyTorch loop and TRL's SFTTrainer."""
