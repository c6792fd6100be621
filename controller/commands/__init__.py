"""What people ask on a node: listings, status, explain --live, drops. They read the kernel, and ask the agent."""
