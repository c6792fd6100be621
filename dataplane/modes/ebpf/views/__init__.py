"""This room reads the maps for people: listings, explanations, events."""
