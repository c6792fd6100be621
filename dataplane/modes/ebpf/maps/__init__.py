"""The BPF maps: their layout, sizes, pins, and what is read from them."""
