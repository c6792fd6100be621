"""PURE. Decides the meaning of Services on this node: objects of the cluster in, the service table out."""
