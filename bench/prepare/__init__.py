"""How fast text becomes prepared data, and in how much memory."""
