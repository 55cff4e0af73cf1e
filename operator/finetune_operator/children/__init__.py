"""Pure builders of the objects that a FineTuneJob owns, as plain dicts ready for the API server."""
