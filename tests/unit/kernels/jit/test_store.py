"""Files of compiled kernels."""

import os
import stat
import time

import pytest

from hopper_sol.kernels.jit import store as module
from hopper_sol.kernels.jit.store import Entry, Store


def entry(number=0):
    return Entry("scale", f"{number:032x}" + "0" * 32)


def test_file_name_is_readable():
    assert Entry("scale_fp8", "ab" * 32).file_name == f"scale_fp8-{'ab' * 16}.kernel"


def test_first_line_says_what_it_is(tmp_path):
    Store([tmp_path]).write(entry(1), b"\x7fELF\n\0code")
    line, data = (tmp_path / entry(1).file_name).read_bytes().split(b"\n", 1)
    assert line.startswith(b"hopper_sol compiled kernel " + entry(1).key.encode())
    assert data == b"\x7fELF\n\0code"
    assert Store([tmp_path]).read(entry(1)) == data


def test_folders_in_order(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    Store([second]).write(entry(), b"of second")
    store = Store([first, second])
    assert store.read(entry()) == b"of second"
    assert store.write(entry(), b"of first") == first / entry().file_name
    assert store.read(entry()) == b"of first"
    assert store.writable_folder() == first


def test_a_damaged_file_does_not_hide_a_good_one(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        Store([folder]).write(entry(), b"code")
    (first / entry().file_name).write_bytes(b"damaged")
    assert Store([first, second]).read(entry()) == b"code"
    assert list(first.iterdir()) == []  # and is not met again


def test_discard(tmp_path):
    store = Store([tmp_path / "absent", tmp_path])
    store.write(entry(1), b"code")
    Store([tmp_path]).write(entry(1), b"code")
    Store([tmp_path]).write(entry(2), b"other")
    store.discard(entry(1))
    assert store.read(entry(1)) is None and store.read(entry(2)) == b"other"


def test_writing_leaves_nothing_else(tmp_path):
    Store([tmp_path]).write(entry(), b"code")
    assert [path.name for path in tmp_path.iterdir()] == [entry().file_name]


def test_others_may_read_but_not_write(tmp_path):
    """One user fills a folder, another uses it."""
    path = Store([tmp_path / "new"]).write(entry(), b"code")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777 & ~umask


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError("no rename today")

    monkeypatch.setattr(os, "replace", fail)
    assert Store([tmp_path]).write(entry(), b"code") is None
    assert list(tmp_path.iterdir()) == []


def test_readers_see_all_or_nothing(tmp_path, monkeypatch):
    """The name appears with the whole content, never while it is written."""
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append((Store([tmp_path]).read(entry()), os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    path = Store([tmp_path]).write(entry(), b"code")
    assert seen == [(None, path.stat().st_size)]


# --- Bounded size


def filled(folder, count, size=1000):
    """Entries 0 .. count - 1, written one a second; their size on disk."""
    for number in range(count):
        path = Store([folder]).write(entry(number), bytes(size))
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    return path.stat().st_size


def kept(folder):
    return {number for number in range(100) if (folder / entry(number).file_name).exists()}


def test_least_recently_used_go(tmp_path):
    size = filled(tmp_path, 5)
    assert Store([tmp_path]).read(entry(0)) is not None  # the oldest, but used now
    Store([tmp_path], size_limit=4 * size).write(entry(5), bytes(1000))
    assert kept(tmp_path) == {0, 3, 4, 5}


def test_no_more_than_needed_goes(tmp_path):
    size = filled(tmp_path, 5)
    Store([tmp_path], size_limit=6 * size).write(entry(5), bytes(1000))
    assert kept(tmp_path) == set(range(6))
    Store([tmp_path], size_limit=6 * size - 1).write(entry(5), bytes(1000))
    assert kept(tmp_path) == {1, 2, 3, 4, 5}


def test_what_was_just_written_stays(tmp_path):
    filled(tmp_path, 2)
    Store([tmp_path], size_limit=1).write(entry(5), bytes(1000))
    assert kept(tmp_path) == {5}


def test_limit_is_256_mib():
    assert Store([]).size_limit == 256 * 1024 * 1024


def test_other_files_are_left_alone(tmp_path):
    """HOPPER_SOL_CACHE may name a folder that holds other things."""
    for name in ("notes.txt", "model.safetensors", "kernel", "x.kernel.bak"):
        (tmp_path / name).write_bytes(bytes(10_000))
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "sub.kernel").mkdir()
    Store([tmp_path], size_limit=1).write(entry(), b"code")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        *("notes.txt", "model.safetensors", "kernel", "x.kernel.bak", "sub.kernel"),
        entry().file_name,
    }


@pytest.mark.parametrize("name", ["scale-1.kernel-tmp", "scale-1.kernel-lock"])
def test_what_killed_processes_left_goes(tmp_path, name):
    (tmp_path / name).write_bytes(b"half")
    Store([tmp_path]).write(entry(), b"code")
    assert (tmp_path / name).exists()  # perhaps somebody is at it
    old = time.time() - module.STALE_SECONDS - 1
    os.utime(tmp_path / name, (old, old))
    Store([tmp_path]).write(entry(), b"code")
    assert not (tmp_path / name).exists()


# --- Locks


def test_lock_is_given_back(tmp_path):
    store = Store([tmp_path])
    for _ in range(2):
        with store.compiling(entry(), timeout=0):
            assert [path.suffix for path in tmp_path.iterdir()] == [".kernel-lock"]
        assert list(tmp_path.iterdir()) == []


def test_lock_is_given_back_after_an_error(tmp_path):
    with pytest.raises(ValueError), Store([tmp_path]).compiling(entry()):
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    entered = []
    with Store([tmp_path]).compiling(entry()):
        entered.append(True)
    assert entered == [True]
