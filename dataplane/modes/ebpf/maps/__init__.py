"""This room has the BPF maps: their layout, sizes, pins, and readers of single maps."""
