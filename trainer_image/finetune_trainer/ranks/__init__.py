"""Processes that train together: they join, show that they are alive, find the rank that others wait for, and report."""
