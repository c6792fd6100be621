"""Flows in the maps: idle ones, those of other proxies, those whose endpoint is gone."""
