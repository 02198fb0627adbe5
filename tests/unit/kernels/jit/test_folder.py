"""Where compiled kernels are kept."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from hopper_sol.kernels.jit import folder as module
from hopper_sol.kernels.jit.folder import candidate_folders


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """A home and a folder of temporary files of our own, and no variables."""
    for name in ("HOPPER_SOL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))


def temporary(tmp_path):
    return tmp_path / "tmp" / f"hopper_sol-{os.getuid()}"


def unwritable(tmp_path):
    """A folder that can't be made, for root either."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "below"


def test_home(tmp_path):
    assert candidate_folders() == [tmp_path / "home" / ".cache" / "hopper_sol"]
    assert not temporary(tmp_path).exists()


def test_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert candidate_folders() == [tmp_path / "xdg" / "hopper_sol"]
    monkeypatch.setenv("HOPPER_SOL_CACHE", str(tmp_path / "ours"))
    assert candidate_folders() == [tmp_path / "ours"]
    monkeypatch.setenv("HOPPER_SOL_CACHE", "~/ours")
    assert candidate_folders() == [tmp_path / "home" / "ours"]
    monkeypatch.setenv("HOPPER_SOL_CACHE", "")
    assert candidate_folders() == [tmp_path / "xdg" / "hopper_sol"]


def test_relative_xdg_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert candidate_folders() == [tmp_path / "home" / ".cache" / "hopper_sol"]


def test_relative_folder_does_not_move_with_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOPPER_SOL_CACHE", "ours")
    assert candidate_folders() == [tmp_path / "ours"]


def test_unwritable_home(tmp_path, monkeypatch):
    """It is still read; a folder among the temporary files is made, for this user alone."""
    home = unwritable(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    ours = temporary(tmp_path)
    assert candidate_folders() == [home / ".cache" / "hopper_sol", ours]
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700


def test_no_home(tmp_path, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert candidate_folders() == [temporary(tmp_path)]


def of_another_user(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    facts = os.stat(folder)
    changed = os.stat_result((*facts[:4], facts.st_uid + 1, *facts[5:]))
    monkeypatch.setattr(Path, "lstat", lambda path: changed)


def writable_by_others(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o777)


def a_link(folder, monkeypatch):
    target = folder.parent / "theirs"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def a_file(folder, monkeypatch):
    folder.touch()


@pytest.mark.parametrize("prepare", [of_another_user, writable_by_others, a_link, a_file])
def test_temporary_folder_that_is_not_taken(tmp_path, monkeypatch, prepare):
    """What lies in it is run: nobody else may put anything there."""
    home = unwritable(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    prepare(temporary(tmp_path), monkeypatch)
    assert candidate_folders() == [home / ".cache" / "hopper_sol"]


def test_systems_without_owners(monkeypatch):
    monkeypatch.delattr(os, "getuid")
    assert module._temporary_folder() is None
