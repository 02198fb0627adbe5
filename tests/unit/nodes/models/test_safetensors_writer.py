"""A file that is written tensor by tensor: read back by safetensors itself; whole or not there."""

import errno
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hopper_sol.nodes.models import safetensors_writer
from hopper_sol.nodes.models.safetensors_writer import Entry, write_safetensors

DTYPES = (
    torch.float64,
    torch.int64,
    torch.float32,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def entry(key, tensor):
    return Entry(key, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def tensors():
    generator = torch.Generator().manual_seed(1)
    found = {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    for dtype in DTYPES:
        values = torch.randint(0, 2, (3, 5), generator=generator) * 1.5
        found[str(dtype)] = values.to(dtype)
    found["view"] = torch.arange(24, dtype=torch.float32).view(4, 6).t()[1:, ::2]
    return dict(sorted(found.items(), key=lambda item: -item[1].dtype.itemsize))


def test_every_type_comes_back(tmp_path):
    path = tmp_path / "sub" / "m.safetensors"
    want = tensors()
    size = write_safetensors(str(path), (entry(*item) for item in want.items()), {"format": "pt"})
    assert path.stat().st_size == size
    got = load_file(path)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype and got[key].shape == tensor.shape
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got[key], tensor)]
        assert torch.equal(*bits), key
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert os.listdir(path.parent) == ["m.safetensors"]


def test_the_data_is_aligned(tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(str(path), [entry("a" * 13, torch.zeros(2))])
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % 8 == 0


def test_misaligned_entries_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    entries = [entry("a", torch.zeros(3, dtype=torch.uint8)), entry("b", torch.zeros(1))]
    with pytest.raises(ValueError, match="b: begins at byte 3, not a multiple of its type's size"):
        write_safetensors(str(path), entries)
    assert os.listdir(tmp_path) == []


def test_one_tensor_at_a_time(tmp_path):
    """Each is made when it is due, and told of when it is written."""
    events = []

    def make(name):
        events.append(f"make {name}")
        return torch.zeros(4)

    entries = [Entry(n, torch.float32, (4,), lambda n=n: make(n)) for n in "ab"]
    path = str(tmp_path / "m.safetensors")
    write_safetensors(path, entries, done=lambda e: events.append(f"done {e.key}"))
    assert events == ["make a", "done a", "make b", "done b"]


def test_a_file_that_is_there(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"mine")
    made = []
    wanted = Entry("a", torch.float32, (1,), lambda: made.append(1) or torch.ones(1))
    with pytest.raises(ValueError, match=r"m\.safetensors: exists already; choose another name"):
        write_safetensors(str(path), [wanted])
    assert path.read_bytes() == b"mine" and made == []
    write_safetensors(str(path), [wanted], overwrite=True)
    assert load_file(path)["a"] == 1
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_somebody_was_faster(tmp_path):
    """The name is taken while the file is being written."""
    path = tmp_path / "m.safetensors"

    def make():
        path.write_bytes(b"theirs")
        return torch.ones(1)

    with pytest.raises(ValueError, match="exists already"):
        write_safetensors(str(path), [Entry("a", torch.float32, (1,), make)])
    assert path.read_bytes() == b"theirs" and os.listdir(tmp_path) == ["m.safetensors"]


def test_no_links_on_this_file_system(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    write_safetensors(str(tmp_path / "m.safetensors"), [entry("a", torch.ones(1))])
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", ["make", "done"])
def test_a_stop_half_way_leaves_what_was_there(tmp_path, where, overwrite):
    path = tmp_path / "m.safetensors"
    if overwrite:
        path.write_bytes(b"old")

    def stop(*args):
        raise KeyboardInterrupt

    entries = [entry("a", torch.ones(4)), entry("b", torch.ones(4))]
    if where == "make":
        entries[1] = Entry("b", torch.float32, (4,), stop)
    done = stop if where == "done" else lambda e: None
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(str(path), entries, overwrite=overwrite, done=done)
    assert os.listdir(tmp_path) == (["m.safetensors"] if overwrite else [])
    assert not overwrite or path.read_bytes() == b"old"


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(safetensors_writer.shutil, "disk_usage", lambda folder: usage)
    big = Entry("a", torch.float32, (2**29,), lambda: pytest.fail("nothing is written"))
    with pytest.raises(ValueError, match=r"needs 2\.00 GiB, the disk .* has 1\.00 GiB left; free"):
        write_safetensors(str(tmp_path / "m.safetensors"), [big])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "left; free some space"), (errno.EIO, "can't be written")]
)
def test_a_disk_that_fails_meanwhile(tmp_path, monkeypatch, number, words):
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(number, "failed")))
    with pytest.raises(ValueError, match=words):
        write_safetensors(str(tmp_path / "m.safetensors"), [entry("a", torch.ones(1))])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"m\.safetensors: can't be written .* output folder"):
        write_safetensors(str(tmp_path / "taken" / "m.safetensors"), [entry("a", torch.ones(1))])


def test_a_tensor_that_is_not_what_was_announced(tmp_path):
    wrong = Entry("a", torch.float32, (3,), lambda: torch.ones(4))
    with pytest.raises(RuntimeError, match=r"a: got torch\.float32 \(4,\), announced"):
        write_safetensors(str(tmp_path / "m.safetensors"), [wrong])
    assert os.listdir(tmp_path) == []
