"""Programs a node from a service table. Nothing in here knows Kubernetes."""
