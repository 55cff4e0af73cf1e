"""Tokens per second, model FLOPs utilisation and peak memory of an 8B-class LoRA run on one GPU, next to TRL's SFTTrainer."""
