"""Algorithms: each file fills a ring of backends; the datapath only indexes it."""
