"""What people measure and try with, beside the agent: the lab, compare, trace and top. A node needs none of it."""
