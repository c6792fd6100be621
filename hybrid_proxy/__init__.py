"""A Kubernetes service proxy for a node: its controller, its dataplane, and the workshop beside them."""
