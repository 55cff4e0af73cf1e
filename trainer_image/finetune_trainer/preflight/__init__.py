"""Runs the checks that need the real model or the real data, on a CPU, before a GPU is allocated."""
