"""The service table as rows of maps."""
