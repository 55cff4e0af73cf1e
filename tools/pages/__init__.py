"""Programs that write the pages of docs/reference from the command line and from the rules."""
