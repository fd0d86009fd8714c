"""The adversary's command line; see the package's docstring."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
for part in ("tests", "tests/flower", "tests/glm", "."):  # what pytest has on its path
    sys.path.insert(0, str(ROOT / part))

from adversary.command import main  # noqa: E402

sys.exit(main())
