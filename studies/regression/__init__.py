"""Federated regression against the fit to the pooled rows: error by rounds, other methods, and coverage."""
