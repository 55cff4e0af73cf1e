"""A release: both images and the chart in a registry, signed, with their bill of materials and their provenance.

`make release` runs it. Signatures and attestations have the form of cosign, which verifies them: docs/how-to/release.md.
"""
