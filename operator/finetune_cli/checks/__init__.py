"""Judges manifests and facts about a cluster, fixes manifests, and estimates memory and time, without requests to a cluster."""
