"""Checks what needs the real model or the real data. This runs on a CPU before a GPU is allocated."""
