"""Processes that train together: how they join, tell that they live, find who keeps the others waiting, and report."""
