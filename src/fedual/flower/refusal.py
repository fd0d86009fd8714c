"""What a site tells the server of why it does not answer: words without paths, figures of its own, or tracebacks.

The site's own log has the whole error. The server gets the text of errors that were worded for it, and of all others
the kind alone, because their texts may quote the site's data or its files.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import ERROR, WARNING

from flwr.common.logger import log

from fedual.errors import FedualError, InputError
from fedual.flower import wire

PATH = re.compile(r"""(?<![\w)\]])(?:~|[A-Za-z]:)?[/\\](?:[^\s'",;:()]+)""")
"""What looks like the path of a file, which stays at the site; formulas have no / at the start of a word."""


class Refusal(InputError):
    """A site does not do what the server asks.

    Attributes:
        private: What only the site's own log says.
    """

    def __init__(self, words: str, private: str = ""):
        super().__init__(words)
        self.private = private


@contextmanager
def reading() -> Iterator[None]:
    """Refuse a damaged message in one sentence, whatever its parser raises; nothing has been stored at that point."""
    try:
        yield
    except Refusal:
        raise
    except FedualError as error:
        raise Refusal(str(error)) from None
    except Exception as error:
        what = f"{type(error).__name__}: {wire.brief(error)}"
        raise Refusal(
            f"The server's message cannot be read ({what}): run the same version of fedual at the server and all sites."
        ) from None


def words(client: str, error: Exception) -> str:
    """What the server is told of an error; the site's log gets all of it."""
    if not isinstance(error, FedualError):
        log(ERROR, "client %s failed", client, exc_info=error)
    else:
        private = getattr(error, "private", "")
        log(WARNING, "client %s refuses: %s%s", client, error, f" ({private})" if private else "")
    if not isinstance(error, Refusal):
        return f"its SuperNode's log shows why ({type(error).__name__})"
    return without_paths(str(error))


def without_paths(text: str, known: Iterable[str] = ()) -> str:
    """A text in which no path of the site is left, be it one of those known or any other."""
    for path in sorted(known, key=len, reverse=True):
        text = text.replace(path, "a file") if path else text
    return PATH.sub("a file", text)
