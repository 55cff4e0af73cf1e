"""Pure functions over status: conditions and the derived phase."""
