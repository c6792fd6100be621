"""`hybrid-proxy compare`: compares the modes with each other and with no proxy at all."""
