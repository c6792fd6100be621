"""The userspace mode: a relay that accepts connections itself, and redirect rules that lead to it."""
