"""Writes docs/reference/pitfalls.md to standard output."""

import sys

from tests.pitfalls.catalogue.page import page

if __name__ == "__main__":
    sys.stdout.write(page())
