"""The code of each verb, with the text that only this verb prints; text that several verbs print is in `render`."""
