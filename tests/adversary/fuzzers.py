"""All fuzzers by name."""

from adversary import archives, arrays, folders, posteriors, questions, regressions, replies, settings, states, tables

FUZZERS = {
    **tables.FUZZERS,
    **arrays.FUZZERS,
    **archives.FUZZERS,
    **posteriors.FUZZERS,
    **settings.FUZZERS,
    **folders.FUZZERS,
    **states.FUZZERS,
    **replies.FUZZERS,
    **questions.FUZZERS,
    **regressions.FUZZERS,
}

SHARES = {
    "scenarios-executed": 0.1,
    "folders-tampered": 0.1,
    "folders-flipped": 0.1,
    "replies": 0.1,
    "replies-networks": 0.05,
    "glm-replies": 0.02,
    "glm-questions": 0.3,
    "questions-networks": 0.5,
}
"""How many of a campaign's cases a fuzzer takes whose cases train, fit, or run a round; others take all."""
