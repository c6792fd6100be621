"""This room finds backends that fail, ejects them and probes them."""
