"""A small cluster out of network namespaces, real traffic through it, and the demo."""
