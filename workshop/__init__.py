"""Tools to measure and to try with: the lab, compare, trace and top. The agent needs none of them."""
