"""workflows/comfy_client/outputs.py: names that stay in their folder, files that are whole."""

import contextlib
import json
import os
import threading

import pytest


@pytest.fixture
def outputs(comfy_client):
    return comfy_client.outputs


@pytest.fixture
def make(outputs):
    def make(filename, subfolder="", kind="output"):
        return outputs.Output("9", "images", filename, subfolder, kind)

    return make


@pytest.mark.parametrize(
    ("filename", "subfolder", "kind", "parts"),
    [
        ("a.png", "", "output", ["a.png"]),
        ("a.png", "x/y", "output", ["x", "y", "a.png"]),
        ("a.png", "x\\y", "output", ["x", "y", "a.png"]),
        ("y/a.png", "x", "output", ["x", "y", "a.png"]),
        ("a.png", "./x/", "output", ["x", "a.png"]),
        ("a..b.png", "..x", "output", ["..x", "a..b.png"]),
        ("12:30 \u4e2d.png", "", "output", ["12:30 \u4e2d.png"]),
        ("a.png", "", "temp", ["temp", "a.png"]),
        ("a.png", "x", "input", ["input", "x", "a.png"]),
        ("con.png", "aux", "output", ["aux", "con.png"]),
    ],
)
def test_safe_parts(outputs, make, filename, subfolder, kind, parts):
    assert outputs.safe_parts(make(filename, subfolder, kind), windows=False) == parts


@pytest.mark.parametrize(
    ("filename", "subfolder", "why"),
    [
        ("../a", "", "leaves the folder"),
        ("..", "", "leaves the folder"),
        ("a", "..", "leaves the folder"),
        ("a", "x/../../y", "leaves the folder"),
        ("a", "x\\..\\..", "leaves the folder"),
        ("..\\a", "", "leaves the folder"),
        ("/etc/passwd", "", "absolute"),
        ("\\\\host\\share", "", "absolute"),
        ("a", "/etc", "absolute"),
        ("C:\\a", "", "absolute"),
        ("c:a", "", "absolute"),
        ("a", "D:/x", "absolute"),
        ("a\0.png", "", "control"),
        ("a", "x\ny", "control"),
        ("a\x1b[2J", "", "control"),
        ("", "x", "folder's name"),
        ("a/", "", "folder's name"),
        (".", "", "leaves the folder"),
        ("x" * 241, "", "longer than"),
        ("\u4e2d" * 81, "", "longer than"),
    ],
)
@pytest.mark.parametrize("windows", [False, True])
def test_names_that_are_refused_everywhere(outputs, make, filename, subfolder, why, windows):
    with pytest.raises(outputs.UnsafeName, match=why):
        outputs.safe_parts(make(filename, subfolder), windows)


@pytest.mark.parametrize(
    "filename",
    [
        "con",
        "CON.png",
        "aux.tar.gz",
        "nul .txt",
        "COM1.x",
        "lpt\xb2",
        "ab:c",
        "a?",
        "a.",
        "a ",
        "x*",
    ],
)
def test_names_that_windows_takes_for_something_else(outputs, make, filename):
    with pytest.raises(outputs.UnsafeName, match="Windows"):
        outputs.safe_parts(make(filename), windows=True)
    assert outputs.safe_parts(make("console.png"), windows=True) == ["console.png"]


def test_unknown_type(outputs, make):
    with pytest.raises(outputs.UnsafeName, match=r"type '\.\./x', need output, temp or input"):
        outputs.safe_parts(make("a", "", "../x"))


# ---- the history


def test_files_of(outputs):
    entry = {
        "outputs": {
            "1": {"images": [{"filename": "a.png", "subfolder": "x", "type": "temp"}, "b"]},
            "2": {"gifs": [{"filename": "c.mp4"}], "animated": [True], "text": ["t"]},
            "3": {"images": [{"filename": "a.png", "subfolder": "x", "type": "temp"}]},
            "4": {"audio": {"filename": "d.flac", "subfolder": None, "type": None}},
            "5": None,
            "6": {"odd": [{"filename": 5}, None, 3], "odder": 7},
        }
    }
    found = [(f.node, f.key, f.name) for f in outputs.files_of(entry)]
    assert found == [
        ("1", "images", "x/a.png [temp]"),
        ("2", "gifs", "c.mp4"),
        ("4", "audio", "d.flac"),
    ]
    assert outputs.files_of({}) == outputs.files_of({"outputs": None}) == []


def test_texts_and_reports(outputs):
    graph = {
        i: {"class_type": c, "inputs": {}} for i, c in (("1", "HopperSolRunReport"), ("2", "T"))
    }
    report = {"schema_version": 1, "runs": []}
    shown = {"text": ["finished"], "json": [json.dumps(report)]}
    entry = {"outputs": {"1": shown, "2": {"json": ["{}"], "text": "one", "n": [1]}}}
    texts = outputs.texts_of(entry)
    assert outputs.take_reports(texts, graph) == {"1": report}
    assert texts == {"1": {"text": ["finished"]}, "2": {"json": ["{}"], "text": ["one"]}}


# ---- fetching


@pytest.fixture
def server(fake_comfy):
    with contextlib.closing(fake_comfy.FakeComfy()) as fake:
        yield fake


@pytest.fixture
def fetch(comfy_client, outputs, make, server, tmp_path):
    client = comfy_client.Client(server.url, timeout=5)

    def fetch(data, filename="a.png", subfolder="x y", kind="output"):
        server.files[filename, subfolder, kind] = data
        path = outputs.fetch(client, make(filename, subfolder, kind), tmp_path / "out")
        return path.as_posix()

    return fetch


def files_below(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_fetch(fetch, tmp_path):
    data = os.urandom(3_000_000)
    assert fetch(data, "a & b?#.png") == "x y/a & b?#.png"
    assert (tmp_path / "out" / "x y" / "a & b?#.png").read_bytes() == data
    assert fetch(b"", "empty.txt", "", "temp") == "temp/empty.txt"
    assert files_below(tmp_path / "out") == ["temp/empty.txt", "x y/a & b?#.png"]


def test_fetch_overwrites_nothing(fetch, tmp_path):
    assert fetch(b"one") == "x y/a.png"
    assert fetch(b"two") == "x y/a_1.png"
    assert fetch(b"one") == "x y/a.png"
    assert fetch(b"two") == "x y/a_1.png"
    (tmp_path / "out" / "x y" / "a_2.png").mkdir()
    assert fetch(b"six") == "x y/a_3.png"
    assert files_below(tmp_path / "out") == ["x y/a.png", "x y/a_1.png", "x y/a_3.png"]


def test_fetch_without_hard_links(fetch, outputs, tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError("not here")

    monkeypatch.setattr(outputs.os, "link", no_links)
    assert [fetch(b"one"), fetch(b"two"), fetch(b"one")] == [
        "x y/a.png",
        "x y/a_1.png",
        "x y/a.png",
    ]
    assert files_below(tmp_path / "out") == ["x y/a.png", "x y/a_1.png"]


def test_two_at_once_take_different_names(fetch, outputs, tmp_path, monkeypatch):
    """What comes to stand there between the look and the move is kept."""
    real = os.link

    def late(part, place):
        monkeypatch.setattr(outputs.os, "link", real)
        place.write_bytes(b"somebody else's")
        return real(part, place)

    monkeypatch.setattr(outputs.os, "link", late)
    assert fetch(b"one") == "x y/a_1.png"
    assert (tmp_path / "out" / "x y" / "a.png").read_bytes() == b"somebody else's"


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_links_in_the_folder_do_not_lead_out(fetch, outputs, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "link").symlink_to(tmp_path / "elsewhere")
    for subfolder in ("link", "link/deeper"):
        with pytest.raises(outputs.UnsafeName, match="is a link that leaves the folder"):
            fetch(b"x", "a.png", subfolder)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    # A link in the file's own place is not written through either.
    (tmp_path / "out" / "a.png").symlink_to(tmp_path / "elsewhere" / "new.png")
    assert fetch(b"x", "a.png", "") == "a_1.png"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_unsafe_names_ask_for_nothing(fetch, outputs, server, tmp_path):
    with pytest.raises(outputs.UnsafeName):
        fetch(b"x", "a.png", "../..")
    assert server.called("GET /view") == 0 and not (tmp_path / "out").exists()


def test_a_file_that_is_not_there(fetch, comfy_client, server, tmp_path):
    server.failures["GET /view"] = [404]
    with pytest.raises(comfy_client.HttpError, match="HTTP 404"):
        fetch(b"x")
    assert files_below(tmp_path) == []


def test_half_a_file_is_none(comfy_client, outputs, make, tmp_path):
    import socket

    def serve():
        end, _ = listener.accept()
        end.recv(4096)
        end.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 50)
        end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        client = comfy_client.Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=5)
        with pytest.raises(comfy_client.NoAnswer, match="50 of 100 bytes"):
            outputs.fetch(client, make("a.png"), tmp_path)
    assert files_below(tmp_path) == []
