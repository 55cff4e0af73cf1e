"""Network access that roles share: retries, waiting as servers ask, going online."""
