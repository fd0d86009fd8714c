"""Survival across sites: Cox regression stratified by site, and piecewise exponential with a common baseline."""
