"""The traps of `tests/integration/test_kueue.py` with a real Kueue: `make test-kueue KUEUE=... KUEUE_MANIFESTS=...`."""
