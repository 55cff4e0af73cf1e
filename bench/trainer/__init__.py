"""Tokens per second and memory of training on CPU, beside a bare PyTorch loop and TRL's SFTTrainer."""
