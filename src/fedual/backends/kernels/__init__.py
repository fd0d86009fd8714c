"""What makes a step fast: compiled updates, CUDA graphs, one client's gradient compiled on its own."""
