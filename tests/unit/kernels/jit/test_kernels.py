"""From a kernel's description to its callable."""

import logging
import multiprocessing
import os
import signal
import threading

import pytest

from hopper_sol.kernels import jit
from hopper_sol.kernels.jit import kernels as module
from hopper_sol.kernels.jit import store as store_module
from hopper_sol.kernels.jit.store import Store


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.DEBUG, logger="hopper_sol")

    def at(level):
        return [r.getMessage() for r in caplog.records if r.levelno == level]

    return at


# --- Hit and miss


def test_miss_then_memory_then_disk(process, toolchain, kernel, folder, messages):
    first = process()
    function = first.load(kernel())
    assert function() == b"code"
    assert toolchain.compiled == ["scale_fp8"]
    assert messages(logging.INFO) == [f"compiling scale_fp8 for SM90, about 5 s, kept in {folder}"]
    assert first.load(kernel()) is function
    assert len(toolchain.linked) == 1  # nothing was read again

    again = process().load(kernel(build=None))  # would fail if it were called
    assert again() == b"code"
    assert toolchain.compiled == ["scale_fp8"]
    assert len(messages(logging.INFO)) == 1
    assert messages(logging.DEBUG) == ["scale_fp8: loaded a kept object"]
    assert messages(logging.WARNING) == []


def test_message_names_architecture_and_time(process, kernel, messages):
    process().load(kernel(name="gemm", arch="sm_100a", seconds=12))
    assert messages(logging.INFO)[0].startswith("compiling gemm for SM100, about 12 s, kept in ")


def test_what_runs_is_what_is_kept(process, toolchain, kernel):
    """The first process links the object as later ones do, and so meets their problems."""
    process().load(kernel())
    process().load(kernel())
    assert toolchain.linked == [b"code", b"code"]


def test_options_reach_the_compiler(process, kernel):
    seen = []
    process().load(kernel(build=lambda options: seen.append(options) or b"code"))
    assert seen == ["--some --options"]


def test_importing_starts_nothing(folder):
    assert module.default_kernels.__module__ == jit.load.__globals__["default_kernels"].__module__
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "a b", "../a", "a-b", "a.b", "a\n"])
def test_names_that_are_refused(kernel, name):
    with pytest.raises(ValueError, match="need letters, digits and underscores"):
        kernel(name=name)


# --- Key


def of_version(key, value):
    return lambda change: change.toolchain.versions.update({key: value})


CHANGES = {
    "source": lambda change: change.arguments.update(sources=(change.source(text="x = 2\n"),)),
    "another source": lambda change: change.arguments.update(
        sources=(change.source(), change.source("other.py"))
    ),
    "name of a source": lambda change: change.arguments.update(sources=(change.source("b.py"),)),
    "compiler": of_version("compiler", "fake 1.1"),
    "flavour": of_version("flavour", "cu13"),
    "ffi": of_version("ffi", "ffi 2"),
    "machine": of_version("machine", "n"),
    "architecture": lambda change: change.arguments.update(arch="sm_100a"),
    "name": lambda change: change.arguments.update(name="scale_bf16"),
    "settings": lambda change: change.arguments.update(settings="Variant(lse=True)"),
    "format": lambda change: change.monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1),
}


class Change:
    def __init__(self, toolchain, source, monkeypatch):
        self.toolchain, self.source, self.monkeypatch = toolchain, source, monkeypatch
        self.arguments = {}


@pytest.mark.parametrize("what", CHANGES)
def test_key_holds(what, process, toolchain, kernel, source, monkeypatch):
    before = kernel()
    process().load(before)
    change = Change(toolchain, source, monkeypatch)
    with monkeypatch.context() as undone:
        change.monkeypatch = undone
        versions = dict(toolchain.versions)
        CHANGES[what](change)
        process().load(kernel(build=lambda options: b"other", **change.arguments))
        assert len(toolchain.compiled) == 2
    toolchain.versions = versions
    source()
    # ... and what was kept before is still there.
    assert process().load(before)() == b"code"
    assert len(toolchain.compiled) == 2


def test_key_leaves_out_where_and_when(process, toolchain, kernel, tmp_path, source):
    """Two checkouts with the same text share what is kept."""
    process().load(kernel())
    path = tmp_path / "elsewhere" / "kernel.py"
    path.parent.mkdir()
    path.write_bytes(source().read_bytes())
    os.utime(path, (2_000, 2_000))
    process().load(kernel(sources=(path,)))
    assert len(toolchain.compiled) == 1


def test_sources_newer_than_the_process(process, toolchain, kernel, source, folder, messages):
    """What was imported is not what the file says: nothing is read and nothing is kept."""
    process().load(kernel())
    kept = sorted(path.name for path in folder.iterdir())
    path = source()
    os.utime(path, (module._STARTED + 10, module._STARTED + 10))
    assert process().load(kernel(build=lambda options: b"imported"))() == b"imported"
    assert len(toolchain.compiled) == 2
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert any("sources changed" in text for text in messages(logging.INFO))


# --- Damaged entries


def payload(content):
    return content[content.index(b"\n") + 1 :]


SPOILED = {
    "empty": lambda content: b"",
    "header only": lambda content: content[: -len(payload(content))],
    "no header": payload,
    "cut in the header": lambda content: content[:40],
    "cut by one byte": lambda content: content[:-1],
    "one byte more": lambda content: content + b"\0",
    "one bit of the object": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "one letter of the header": lambda content: content.replace(b"kernel ", b"kernel x", 1),
    "zeros of the same length": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("what", SPOILED)
def test_damaged_entry_is_made_again(what, process, toolchain, kernel, folder, messages):
    process().load(kernel())
    (path,) = folder.glob("*.kernel")
    good = path.read_bytes()
    path.write_bytes(SPOILED[what](good))
    assert path.read_bytes() != good
    assert process().load(kernel())() == b"code"
    assert toolchain.compiled == ["scale_fp8"] * 2
    assert toolchain.linked == [b"code"] * 2  # the damaged one never got there
    assert path.read_bytes() == good
    (text,) = messages(logging.WARNING)
    assert "is damaged and is made again" in text


@pytest.mark.parametrize("what", ["name", "settings", "arch"])
def test_entry_of_another_kernel_is_refused(what, process, toolchain, kernel, folder):
    process().load(kernel(**{what: "a"}))
    (of_a,) = folder.glob("*.kernel")
    process().load(kernel(**{what: "b"}))
    (of_b,) = set(folder.glob("*.kernel")) - {of_a}
    of_b.write_bytes(of_a.read_bytes())
    new = kernel(build=lambda options: b"new", **{what: "b"})
    assert process().load(new)() == b"new"


def test_entry_that_does_not_link_is_made_again(process, toolchain, kernel, messages):
    process().load(kernel(build=lambda options: b"old"))
    link = toolchain.link

    def refuse(kernel, data):
        if data == b"old":
            raise ValueError("of another runtime")
        return link(kernel, data)

    toolchain.link = refuse
    assert process().load(kernel())() == b"code"
    assert process().load(kernel(build=None))() == b"code"
    (text,) = messages(logging.WARNING)
    assert "can't be loaded and is made again: of another runtime" in text


# --- Failures


def test_failing_compile(process, toolchain, kernel):
    def build(options):
        raise ValueError("\n\x1b[91m\x1b[1merror:\x1b[0m no such layout\nwith a long story")

    kernels = process()
    with pytest.raises(jit.KernelBuildError) as caught:
        kernels.load(kernel(build=build))
    error = caught.value
    assert (error.kernel, error.what) == ("scale_fp8", "compile")
    assert isinstance(error.__cause__, ValueError)
    first, second = str(error).splitlines()
    assert first == (
        "can't compile scale_fp8: ValueError: error: no such layout; "
        "choose another backend, the others do without it"
    )
    assert second == "with a long story"
    # The same compiler says the same of the same source: not asked for every call.
    with pytest.raises(jit.KernelBuildError) as again:
        kernels.load(kernel(build=build))
    assert toolchain.compiled == ["scale_fp8"]
    assert str(again.value) == str(error)
    # Other kernels are not touched by it.
    assert kernels.load(kernel(name="other"))() == b"code"


@pytest.mark.parametrize("passing", [OSError(28, "No space left"), MemoryError()])
def test_failure_that_may_pass_is_tried_again(process, toolchain, kernel, passing):
    outcomes = iter([passing, b"code"])

    def build(options):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    kernels = process()
    with pytest.raises(jit.KernelBuildError):
        kernels.load(kernel(build=build))
    assert kernels.load(kernel(build=build))() == b"code"


def test_missing_compiler(process, toolchain, kernel):
    def identity():
        raise ModuleNotFoundError("No module named 'fake'")

    toolchain.identity = identity
    with pytest.raises(jit.KernelBuildError) as caught:
        process().load(kernel())
    assert str(caught.value) == (
        "can't find the compiler of scale_fp8: ModuleNotFoundError: No module named 'fake'; "
        "run pip install fake, or choose another backend"
    )
    assert toolchain.compiled == []


def test_failing_link_of_a_new_object(process, toolchain, kernel, folder):
    def link(kernel, data):
        raise ValueError("unknown symbol")

    toolchain.link = link
    with pytest.raises(jit.KernelBuildError, match="can't load scale_fp8: ValueError: unknown"):
        process().load(kernel())
    assert list(folder.glob("*.kernel")) == []  # what does not load is not kept


def test_cancelling_is_no_failure(process, toolchain, kernel):
    def build(options):
        raise KeyboardInterrupt

    kernels = process()
    with pytest.raises(KeyboardInterrupt):
        kernels.load(kernel(build=build))
    assert kernels.load(kernel())() == b"code"


# --- Folders that can't be written


def test_nothing_can_be_written(process, toolchain, kernel, tmp_path, messages):
    (tmp_path / "file").write_text("not a folder")
    kernels = process(folders=(tmp_path / "file", tmp_path / "file" / "below"))
    assert kernels.load(kernel())() == b"code"
    assert kernels.load(kernel(settings="b"))() == b"code"
    (text,) = messages(logging.WARNING)  # once, not for every kernel
    assert "compiled kernels can't be kept, every process makes them again" in text
    assert str(tmp_path / "file") in text and "HOPPER_SOL_CACHE" in text
    assert messages(logging.INFO)[0].endswith("about 5 s, not kept")
    assert process(folders=()).load(kernel())() == b"code"


def test_disk_that_fills_up(process, toolchain, kernel, folder, monkeypatch, messages):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_replace", full)
    assert process().load(kernel())() == b"code"
    assert len(messages(logging.WARNING)) == 1
    assert list(folder.glob("*.kernel")) == []


def test_folder_that_can_only_be_read(process, toolchain, kernel, folder, tmp_path, monkeypatch):
    """Such as one in an image: what it holds is used, the rest goes elsewhere."""
    process().load(kernel())

    def only_second(path, content, replace=store_module._replace):
        if path.parent == folder:
            raise PermissionError(13, "read-only")
        replace(path, content)

    monkeypatch.setattr(store_module, "_replace", only_second)
    monkeypatch.setattr(store_module, "can_be_written", lambda path: path != folder)
    second = tmp_path / "second"
    kernels = process(folders=(folder, second))
    kernels.load(kernel(build=None))
    kernels.load(kernel(settings="b"))
    assert len(list(folder.glob("*.kernel"))) == len(list(second.glob("*.kernel"))) == 1


# --- Threads and processes


def test_threads_compile_once(process, toolchain, kernel):
    started, go_on = threading.Event(), threading.Event()

    def build(options):
        started.set()
        assert go_on.wait(30)
        return b"code"

    kernels, results = process(), []
    threads = [
        threading.Thread(target=lambda: results.append(kernels.load(kernel(build=build))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(results) == 4 and len(set(results)) == 1
    assert toolchain.compiled == ["scale_fp8"]


def test_fork_while_another_thread_compiles(process, kernel):
    """The child has no such thread, and nobody to give the lock back."""
    kernels = process()
    with kernels._lock:
        child = fork(lambda: kernels.load(kernel())() == b"code")
        assert finished(child)


def test_two_processes_compile_once(process, kernel, folder, tmp_path):
    both_missed = multiprocessing.get_context("fork").Barrier(2)
    record = tmp_path / "record"

    class WaitingStore(Store):
        waited = False

        def read(self, entry):
            found = super().read(entry)
            if not self.waited:
                self.waited = True
                both_missed.wait(30)
            return found

    def build(options):
        with record.open("ab") as file:
            file.write(b"x")
        return b"code"

    def work():
        kernels = process()
        kernels._store = WaitingStore([folder])
        return kernels.load(kernel(build=build))() == b"code"

    children = [fork(work) for _ in range(2)]
    assert all(finished(child) for child in children)
    assert record.read_bytes() == b"x"


def test_two_processes_without_locks(process, kernel, folder, monkeypatch):
    """Locks only save work: both compile, and what is kept is one of the two, whole."""
    monkeypatch.setattr(store_module, "fcntl", None)
    ready = multiprocessing.get_context("fork").Barrier(2)

    def work():
        def build(options):
            ready.wait(30)  # both are here before either writes
            return os.getpid().to_bytes(8, "little") * 100_000

        return len(process().load(kernel(build=build))()) == 800_000

    children = [fork(work) for _ in range(2)]
    assert all(finished(child) for child in children)
    kept = process().load(kernel(build=None))()
    assert kept in [child.pid.to_bytes(8, "little") * 100_000 for child in children]
    assert len(list(folder.iterdir())) == 1


def test_a_killed_process_holds_nobody_up(process, toolchain, kernel, folder, monkeypatch):
    ready = multiprocessing.get_context("fork").Event()

    def work():
        def build(options):
            ready.set()
            signal.pause()

        process().load(kernel(build=build))

    child = fork(work)
    assert ready.wait(30)
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)
    assert list(folder.glob("*.kernel-lock"))  # its file is still there
    got = []

    def lock(descriptor, timeout, lock=store_module._lock):
        got.append(lock(descriptor, 0))
        return got[-1]

    monkeypatch.setattr(store_module, "_lock", lock)
    assert process().load(kernel())() == b"code"
    assert got == [True]
    assert [path.suffix for path in folder.iterdir()] == [".kernel"]


def test_a_process_that_takes_too_long_is_not_waited_for(process, kernel, folder, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_SECONDS", 0.0)
    entry = process()
    entry._store = Store((folder,))
    with entry._store.compiling(entry._entry(kernel())):
        assert process().load(kernel())() == b"code"


def fork(work):
    """A child that ends with 0 if ``work()`` is True."""

    def run():
        # Not through the rest of pytest, whatever happens.
        code = 1
        try:
            code = 0 if work() is True else 1
        finally:
            os._exit(code)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    return child


def finished(child):
    """Whether ``child`` ended by itself, and well."""
    child.join(60)
    if child.is_alive():
        child.kill()
        return False
    return child.exitcode == 0
