"""Smaller models of the same architecture, for the rehearsal and to find out how modules are used."""
