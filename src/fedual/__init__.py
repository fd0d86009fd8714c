"""fedual."""
