"""Proposes corrections for mistakes in manifests."""
