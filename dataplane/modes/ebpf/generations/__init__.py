"""The programs and maps that serve together, and how one such generation replaces another."""
