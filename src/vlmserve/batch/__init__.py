"""Answer many rows of a file or folder, with results that survive an interruption."""
