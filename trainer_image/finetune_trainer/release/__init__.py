"""The files next to the weights (model card, provenance, checksums), and the order in which a destination gets all files."""
