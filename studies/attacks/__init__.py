"""What dishonest sites can do to a federation under each setting: `python -m studies attacks run`, then `draw`."""
