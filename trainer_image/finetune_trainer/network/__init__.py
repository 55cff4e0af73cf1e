"""Network access that roles share: going online, retries, and pauses that servers ask for."""
