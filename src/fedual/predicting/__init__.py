"""Predictions of a finished run for inputs from files: `open_run`, `read`, `rule`."""

from fedual.predicting.files import Inputs, read
from fedual.predicting.trained import Rule, Trained, open_run, rule

__all__ = ["Inputs", "Rule", "Trained", "open_run", "read", "rule"]
