"""A folder that appears when all of it is on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


class NewFolder:
    """A folder that is written beside its place, and renamed when it is complete.

    Args:
      folder: its place: a folder that does not exist yet, or is empty. Of a symbolic link it is
        what the link points to.

    Raises:
      FileExistsError: there is something in the folder.
      ValueError: it is a mount point, so nothing can be renamed to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = place = folder.resolve()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise FileExistsError(f"{folder} exists: choose a folder that does not, or is empty")
        if place.is_mount():
            raise ValueError(
                f"{folder} is a mount point, to which no complete folder can be renamed: choose a "
                f"folder in it, like {folder / 'model'}"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        # The name is this call's own. Its folder is for this user alone, so the one that others
        # may read, as the umask says, is made within it.
        prefix = f".{place.name}.being-written-"
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=place.parent))
        self.path = made / place.name
        # What discard removes.
        self._made: Path | None = made
        self.path.mkdir()

    def finish(self) -> None:
        """Renames the folder when the disk has all of it.

        Raises:
          OSError: the disk is full or broken; or the folder could not be renamed, and then the
            error says where it is kept.
        """
        for path in (*self.path.iterdir(), self.path):
            _sync(path)
        try:
            os.replace(self.path, self._folder)
        except OSError as error:
            kept, self._made = self.path, None
            message = f"{error.strerror}: {self._folder} cannot be replaced; {kept} is complete"
            raise OSError(error.errno, message) from error
        _sync(self._folder.parent)

    def discard(self) -> None:
        """Removes what is left of the writing: all of it if it was not finished."""
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
