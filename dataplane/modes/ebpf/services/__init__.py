"""This room turns the service table into rows of maps: lower, plan, write."""
