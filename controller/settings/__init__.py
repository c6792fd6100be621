"""The settings: kube-proxy's flags and configuration file, and ours, checked, to one frozen `Config`."""
