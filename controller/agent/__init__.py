"""The running agent: it takes events, has the next table built, and gives it to the mode that serves this node."""
