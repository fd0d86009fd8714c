"""All fuzzers by name."""

from adversary import archives, folders, posteriors, questions, replies, settings, states, tables

FUZZERS = {
    **tables.FUZZERS,
    **archives.FUZZERS,
    **posteriors.FUZZERS,
    **settings.FUZZERS,
    **folders.FUZZERS,
    **states.FUZZERS,
    **replies.FUZZERS,
    **questions.FUZZERS,
}
