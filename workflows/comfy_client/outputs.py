"""Files of a run: found in the history, fetched, and kept inside their folder."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Client
from .errors import NoAnswer, as_dict
from .graphs import Graph

REPORT_CLASS = "HopperSolRunReport"
_CHUNK_BYTES = 1024 * 1024
_MAX_NAME_BYTES = 240  # of most file systems' 255; the rest is for a number and our own ending
_DEVICES = {"con", "prn", "aux", "nul", "conin$", "conout$"} | {
    f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789\xb9\xb2\xb3"
}


class UnsafeName(ValueError):
    """The server names a file that is not written, because of where it would end up."""


@dataclass(frozen=True)
class Output:
    """A file that the history lists.

    Attributes:
        node, key: whose it is, and under which word ("images", "gifs", "audio").
        filename, subfolder, kind: as the server names it; kind is "output", "temp" or "input".
    """

    node: str
    key: str
    filename: str
    subfolder: str
    kind: str

    @property
    def name(self) -> str:
        """For a person: what the server calls it."""
        text = f"{self.subfolder}/{self.filename}" if self.subfolder else self.filename
        return text if self.kind == "output" else f"{text} [{self.kind}]"


def files_of(entry: dict) -> list[Output]:
    """Every file in a /history entry, whatever it is, each once."""
    found = {}
    for node_id, shown in as_dict(entry.get("outputs")).items():
        for key, items in as_dict(shown).items():
            for item in items if isinstance(items, list) else [items]:
                if isinstance(item, dict) and isinstance(item.get("filename"), str):
                    subfolder, kind = item.get("subfolder") or "", item.get("type") or "output"
                    place = (item["filename"], str(subfolder), str(kind))
                    found.setdefault(place, Output(node_id, key, *place))
    return list(found.values())


def texts_of(entry: dict) -> dict[str, dict[str, list[str]]]:
    """Every text in a /history entry: {node id: {key: [text, ...]}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for node_id, shown in as_dict(entry.get("outputs")).items():
        for key, items in as_dict(shown).items():
            texts = [t for t in (items if isinstance(items, list) else [items]) if type(t) is str]
            if texts:
                found.setdefault(node_id, {})[key] = texts
    return found


def take_reports(texts: dict[str, dict[str, list[str]]], graph: Graph) -> dict[str, dict]:
    """The run reports among the texts, {node id: report}; they are taken out of `texts`."""
    found = {}
    for node_id, shown in texts.items():
        if graph.get(node_id, {}).get("class_type") == REPORT_CLASS and "json" in shown:
            with contextlib.suppress(ValueError):
                found[node_id] = json.loads(shown["json"][0])
                del shown["json"]
    return found


def safe_parts(output: Output, windows: bool = os.name == "nt") -> list[str]:
    """The path of a file below our folder, part by part. Previews go below "temp".

    The name comes from a server that may be anybody's, and from nodes that let a workflow choose
    it. Both kinds of slash separate, whatever we run on.

    Raises:
        UnsafeName: it would leave the folder, or can't be a file's name here.
    """

    def refuse(why: str):
        raise UnsafeName(f"the server names a file {output.name!r}: {why}")

    for text in (output.subfolder, output.filename):
        if any(ord(c) < 32 or ord(c) == 127 for c in text):
            refuse("it has control characters")
        if text[:1] in ("/", "\\") or text[1:2] == ":":
            refuse("it is an absolute path")
    place = output.filename if not output.subfolder else f"{output.subfolder}/{output.filename}"
    parts = place.replace("\\", "/").split("/")
    if output.filename.replace("\\", "/").endswith("/") or not output.filename:
        refuse("it is a folder's name")
    parts = [part for part in parts if part not in ("", ".")]
    if ".." in parts or not parts:
        refuse("it leaves the folder")
    for part in parts:
        if len(part.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
            refuse(f"a part of it is longer than {_MAX_NAME_BYTES} bytes")
        if windows:
            if any(c in '<>:"|?*' for c in part) or part.endswith((".", " ")):
                refuse("Windows does not allow it")
            if part.split(".")[0].rstrip().lower() in _DEVICES:
                refuse("on Windows that is a device")
    if output.kind != "output":
        if output.kind not in ("temp", "input"):
            refuse(f"it is of type {output.kind!r}, need output, temp or input")
        parts.insert(0, output.kind)
    return parts


def fetch(client: Client, output: Output, folder: Path) -> Path:
    """Fetch a file into `folder`; its path relative to it.

    It is written beside its place under another name and then put there in one go. A file that is
    there already is kept: if it is the same, that is the result, else ours gets a number.

    Raises:
        UnsafeName: see safe_parts(); also if a link in the folder leads out of it.
        HttpError, NoAnswer: the server does not give it, or not all of it.
        OSError: it can't be written.
    """
    target = folder.joinpath(*safe_parts(output))
    folder.mkdir(parents=True, exist_ok=True)
    root, parent = folder.resolve(), target.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.resolve().is_relative_to(root):
        raise UnsafeName(
            f"the server names a file {output.name!r}: {parent} is a link that leaves the folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            _download(client, output, file.write)
        return _put(part, target).relative_to(folder)
    finally:
        part.unlink(missing_ok=True)


def _download(client: Client, output: Output, write: Callable[[bytes], Any]) -> None:
    with client.view(output.filename, output.subfolder, output.kind) as answer:
        expected, size = answer.headers.get("Content-Length"), 0
        while chunk := answer.read(_CHUNK_BYTES):
            write(chunk)
            size += len(chunk)
        # Reading in pieces, http.client does not tell an early end from the end.
        if expected is not None and expected.isdigit() and size != int(expected):
            raise NoAnswer(f"{output.name}: {size} of {expected} bytes came")


def _put(part: Path, target: Path) -> Path:
    for place in _places(target):
        if place.exists() and _same(part, place):
            return place
        if not place.exists() and not place.is_symlink() and _move(part, place):
            return place
    raise AssertionError("unreachable")


def _places(target: Path) -> Iterator[Path]:
    yield target
    number = 1
    while True:
        yield target.with_name(f"{target.stem}_{number}{target.suffix}")
        number += 1


def _move(part: Path, place: Path) -> bool:
    """Move without replacing; False if something has come to stand there."""
    with contextlib.suppress(OSError):  # it is taken, or there are no hard links here
        os.link(part, place)
        return True
    try:
        open(place, "xb").close()
    except FileExistsError:
        return False
    os.replace(part, place)
    return True


def _same(one: Path, other: Path) -> bool:
    if not other.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    with open(one, "rb") as a, open(other, "rb") as b:
        while chunk := a.read(_CHUNK_BYTES):
            if chunk != b.read(len(chunk)):
                return False
    return True
