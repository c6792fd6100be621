"""`hybrid-proxy trace` with a view: what the kernel shows of real traffic, and what is said without bcc."""
