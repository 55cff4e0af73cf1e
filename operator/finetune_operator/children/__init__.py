"""Pure functions that build the objects that a FineTuneJob owns, as plain dicts for the API server."""
