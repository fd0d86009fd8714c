"""All fuzzers by name."""

from adversary import archives, arrays, folders, posteriors, questions, replies, settings, states, tables

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
}
