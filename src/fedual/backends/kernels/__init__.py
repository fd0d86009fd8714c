"""Faster steps: compiled updates, CUDA graphs, and the compiled gradient of a single client."""
