"""Finds what to write in place of mistakes in manifests."""
