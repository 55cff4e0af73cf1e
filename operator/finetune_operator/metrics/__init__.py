"""Metrics of jobs and of the operator itself, and its health."""
