"""The study that reproduces the paper, run from a clone: `python -m studies --help`. It is not part of the library."""
