"""Processes that die: the server or a site stops at any file that it writes, or any message that it sends.

An exception is not a kill: `except` and `finally` still run. From the moment of death nothing changes on the disk any
more until the dead process has been unwound.
"""

import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from fedual.flower.ledger import Ledger
from fedual.rundir import RunDirectory


class Killed(BaseException):
    """No `except Exception` sees it, as none sees SIGKILL."""


class Crashes:
    """Counts the points that a process passes, and kills it at one of them.

    Attributes:
        site: True while a site answers; otherwise the server works.
        left: Points that the server, or the site, still passes; None: it lives.
        dead: What died, until `revive`.
        replaced: Called after each file that is replaced, with its path.
    """

    def __init__(self) -> None:
        self.site = False
        self.left: dict[bool, int | None] = {False: None, True: None}
        self.dead = False
        self.points = 0
        self.replaced: Callable[[Path], None] = lambda path: None

    def point(self) -> None:
        """The process may die here."""
        if self.dead:
            raise Killed
        self.points += 1
        left = self.left[self.site]
        if left is not None:
            self.left[self.site] = left - 1
            if left <= 1:
                self.dead, self.left[self.site] = True, None
                raise Killed

    def revive(self) -> None:
        """What died has been unwound: another process may start."""
        self.dead = False
        self.left[self.site] = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function with a point before and after it."""

        @wraps(function)
        def passing(*args: Any, **kwargs: Any) -> Any:
            self.point()
            found = function(*args, **kwargs)
            self.point()
            return found

        return passing


CRASHES = Crashes()
"""Of this process: `install` makes files and messages its points."""


def install() -> Crashes:
    """Make every file that is replaced, and every step of a round, a point at which this process may die, for good."""
    if hasattr(os.replace, "__wrapped__"):
        return CRASHES
    replace, unlink, remove = os.replace, Path.unlink, shutil.rmtree

    @wraps(replace)
    def replacing(source: Any, target: Any) -> None:
        CRASHES.point()
        replace(source, target)
        CRASHES.replaced(Path(target))
        CRASHES.point()

    os.replace = replacing
    os.fsync = lambda handle: CRASHES.point()  # what the system has been given survives
    Path.unlink = lambda self, *args, **kwargs: None if CRASHES.dead else unlink(self, *args, **kwargs)  # type: ignore[method-assign, assignment]
    shutil.rmtree = lambda *args, **kwargs: None if CRASHES.dead else remove(*args, **kwargs)  # type: ignore[assignment]
    Ledger.close = CRASHES.around(Ledger.close)  # type: ignore[method-assign]
    RunDirectory.append = CRASHES.around(RunDirectory.append)  # type: ignore[method-assign]
    return CRASHES
