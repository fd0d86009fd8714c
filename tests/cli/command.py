"""`fedual` as a process runs it: in a folder, with its exit code and what it prints."""

import io
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from fedual.cli import main

PROCESS = "import torch; torch.set_num_threads(1); from fedual.cli import main; main()"


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def fedual(folder: Path, *arguments: str) -> Done:
    """Run a command in this process, with the dtype that a process starts with."""
    out, err, code, dtype = io.StringIO(), io.StringIO(), 0, torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            chdir(folder),
            patch.object(sys, "argv", ["fedual", *arguments]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        torch.set_default_dtype(dtype)
    return Done(code, out.getvalue(), err.getvalue())


def process(folder: Path, *arguments: str) -> Done:
    """Run a command in a process of its own, which takes seconds to load torch."""
    done = subprocess.run([sys.executable, "-c", PROCESS, *arguments], cwd=folder, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)
