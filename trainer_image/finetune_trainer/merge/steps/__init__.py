"""Carries out changes on rows of a matrix, with exactly the bits that PEFT gives on a CPU; one module per kind of change."""
