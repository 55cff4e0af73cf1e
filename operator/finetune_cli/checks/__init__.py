"""Judges manifests and facts about a cluster, fixes manifests, and estimates memory and time; sends no requests to a cluster."""
