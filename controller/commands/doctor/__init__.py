"""`hybrid-proxy doctor`: what is wrong on this node, with a Service or with a packet, and what to do about it."""
