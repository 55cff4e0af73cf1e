"""Judges manifests, their fixes, memory and time, and facts about a cluster, without a request to a cluster."""
