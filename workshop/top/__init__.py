"""`hybrid-proxy top`: services, backends and drops of this node, live in a terminal."""
