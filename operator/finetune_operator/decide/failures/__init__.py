"""Failures: how they are classified by the evidence of pods, and the restart policy."""
