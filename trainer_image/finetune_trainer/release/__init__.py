"""The files beside the weights: model card, provenance, checksums, and the files in the order in which a destination gets
them.
"""
