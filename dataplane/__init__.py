"""Programs a node from a service table. Nothing here knows Kubernetes."""
