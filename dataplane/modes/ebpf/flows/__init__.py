"""This room reads flows from the maps: it removes idle ones, keeps foreign ones, resets those without endpoint."""
