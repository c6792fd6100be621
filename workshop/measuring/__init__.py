"""The harness of compare and the benchmarks: order of turns, statistics, loads, the machine, nodes with an agent."""
