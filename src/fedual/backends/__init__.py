"""All clients of a federation in one process."""
