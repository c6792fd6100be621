"""What the maps say to a reader: listings, explanations, events."""
