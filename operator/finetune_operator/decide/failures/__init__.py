"""Failures: their classes from the evidence of pods, and the policy of restarts."""
