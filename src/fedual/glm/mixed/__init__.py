"""Mixed models: each site's effects are random, and integrated out at the site."""
