"""Judgements without a cluster: manifests, their fixes, and the memory of a rank; plain data in and out."""
