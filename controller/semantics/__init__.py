"""What Services mean on this node: objects of the cluster in, the service table out. Pure."""
