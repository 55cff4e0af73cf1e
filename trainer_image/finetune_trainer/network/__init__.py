"""Network access that roles have in common: retries, pauses that servers ask for, going online."""
