"""Represents jobs of a cluster as plain data, and draws conclusions from them. Reads no cluster, file or clock."""
