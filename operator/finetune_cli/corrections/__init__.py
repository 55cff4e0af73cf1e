"""Mistakes in manifests -> what to write instead."""
