"""What all benchmarks share: cases, clocks, ceilings, rows and the command line."""
