"""This room reads flows from the maps: it removes idle ones, keeps foreign ones, and resets those to gone endpoints."""
