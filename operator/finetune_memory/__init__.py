"""Computes the memory of a training rank and the time of a step from the plan and the model's structure alone, without torch."""
