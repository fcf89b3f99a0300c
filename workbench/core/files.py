"""Files and folders that appear whole or not at all: written under another name beside their own, then renamed.

Standard library only: a bare GPU machine writes with it too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

WRITING = ".writing-"


@contextlib.contextmanager
def replacing(path: str | Path, ending: str = ".tmp") -> Iterator[Path]:
    """Yield the name of a hidden file beside `path`; what the block writes there becomes `path` when it ends.

    Each call has a name of its own, so that two writers do not write into one file. A file that is replaced hands on
    its permissions, a new one has the usual ones. Where the block raises, the temporary file goes and `path` stays.

    Args:
        path: the file; its folder exists.
        ending: of the temporary name, for writers that choose a format by it.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{ending}")
    try:
        yield temporary
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a hidden empty folder beside `path`; with what the block puts there it becomes `path` when the block ends.

    When the block raises, or `path` is there and not empty, the folder goes with all that it holds. That of a process
    that was killed stays: its name begins with `WRITING`.
    """
    path = Path(path)
    temporary = path.with_name(f"{WRITING}{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_file(path: str | Path, content: bytes | str) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
