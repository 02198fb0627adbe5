"""Where compiled kernels are kept."""

import os
import stat
import tempfile
from pathlib import Path

FOLDER_VARIABLE = "HOPPER_SOL_CACHE"


def candidate_folders() -> list[Path]:
    """Folders to look into, in order; the first that can be written is written to.

    $HOPPER_SOL_CACHE, else $XDG_CACHE_HOME/hopper_sol, else ~/.cache/hopper_sol. If that can't be
    written, also a folder of this user among the temporary files.
    """
    chosen = _chosen_folder()
    if chosen is not None and can_be_written(chosen):
        return [chosen]
    return [folder for folder in (chosen, _temporary_folder()) if folder is not None]


def can_be_written(folder: Path) -> bool:
    """Whether a file can be made in ``folder``, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _chosen_folder() -> Path | None:
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches and os.path.isabs(caches):  # the XDG rules say to ignore a relative one
        return Path(caches) / "hopper_sol"
    try:
        return Path.home() / ".cache" / "hopper_sol"
    except RuntimeError:  # no HOME, and no such user
        return None


def _temporary_folder() -> Path | None:
    """Code in it will be run: a folder that another user made or may write to is not taken."""
    if not hasattr(os, "getuid"):
        return None  # without owners there is no telling
    try:
        folder = Path(tempfile.gettempdir()) / f"hopper_sol-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    return folder if ours and not facts.st_mode & 0o022 else None
