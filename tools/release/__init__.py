"""Publishes a release: both images and the chart in a registry, signed, with bills of materials and provenance.

`make release` runs it. Signatures and attestations are in cosign's format, so that cosign verifies them: docs/how-to/release.md.
"""
