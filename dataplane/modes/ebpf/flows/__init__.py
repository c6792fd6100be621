"""This room removes idle flows, keeps foreign ones, and resets those to gone endpoints."""
