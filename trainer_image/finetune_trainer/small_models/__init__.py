"""Smaller models of the same architecture: for the rehearsal, and to see how modules are used."""
