"""How processes start, are bounded and end."""
