"""The interfaces, drivers and cgroups to which programs are attached."""
