"""One module a verb: plain data in, plain data out; printing is `render`."""
