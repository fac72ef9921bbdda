"""The lowest layer, which imports no other part of the package: errors, clocks, random streams, signals, files."""
