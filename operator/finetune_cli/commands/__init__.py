"""One module a verb, with what only that verb prints; what several verbs print is in `render`."""
