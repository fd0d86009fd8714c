"""The last answer of a site, on its disk: the same request gets the same answer, even from a process that came later.

An answer that is lost on its way is sent again without a new look at the table, so that it costs nothing of what the
site may tell, and what the site remembers is what the server has.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from fedual.glm.messages import Message
from fedual.rundir import atomic, checksum
from fedual.rundir.locking import locked

LAST, LOCK = "answer.safetensors", "answer.lock"


def answer_once(folder: Path, run: int, request: Message, answer: Callable[[Message], Message], wait: float) -> Message:
    """The answer to a request: the last one if it was to the same request, else a new one, on disk before it leaves.

    Args:
        folder: The site's folder.
        run: The server's run; another one is answered anew, because the table may have changed.
        request: What is asked.
        answer: Answers it.
        wait: Seconds to wait until another process has answered.
    """
    key = f"{run} {request.digest()}"
    with locked(folder / LOCK, wait):
        path = folder / LAST
        content = path.read_bytes() if path.exists() else b""
        if checksum.verify(content):
            metadata, tensors = checksum.parse(content)
            if metadata["key"] == key:
                return Message(metadata["kind"], json.loads(metadata["facts"]), tensors)
        reply = answer(request)
        tensors = {name: each.clone(memory_format=torch.contiguous_format) for name, each in reply.tensors.items()}
        metadata = {"key": key, "kind": reply.kind, "facts": json.dumps(dict(reply.facts))}
        atomic.store(path, checksum.seal(tensors, metadata), "the answer was not sent", atomic.PRIVATE)
        return reply
