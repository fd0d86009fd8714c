"""The adversary: fuzzers for everything that fedual reads, random faults for its federations, and mutants of its rules.

    python -m tests.adversary fuzz --seed 7 --cases 2000           every fuzzer, 2,000 cases each
    python -m tests.adversary fuzz --only csv,replies              some of them
    python -m tests.adversary schedules --seed 7 --cases 1000      random schedules of faults, with the checker
    python -m tests.adversary mutants --seed 7                     wrong rules, which the checker must catch

A case is a function of (fuzzer, seed, number), so that any of them can be run alone: `fuzz --only csv --case 1234`.
Campaigns append what they found to results/adversary/.
"""

import os

# Arrow's own allocators reserve a gigabyte at once, which a limit of memory would count
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
