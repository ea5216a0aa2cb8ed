"""Kernels compiled in threads of their own."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tileattn.backends import ahead


@pytest.fixture(autouse=True)
def launchers(monkeypatch):
    """With no driver, and no threads of other tests. Returns what launchers are made of."""
    ahead.wait()
    made = []
    active = SimpleNamespace(launcher_cls=lambda *described: made.append(described))
    monkeypatch.setattr(ahead, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(ahead, "_make_ready", lambda: None)
    return made


class Compiled:
    src, metadata = "source", "metadata"


def test_a_kernel_is_compiled_and_what_launches_it_too(launchers):
    ahead.begin(torch.device("cpu"), Compiled)
    ahead.wait()
    assert launchers == [("source", "metadata")]


def test_whoever_waits_while_a_thread_is_about_to_start_is_not_disturbed(monkeypatch):
    """Another thread's backward may wait at any moment of this one's forward."""

    class Thread(threading.Thread):
        def start(self):
            ahead.wait()
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    ahead.begin(torch.device("cpu"), Compiled)
    ahead.wait()
    assert not ahead._running


def test_python_waits_at_exit_for_what_autograds_thread_began():
    """Threads of a daemon are daemons, and autograd's are to Python."""
    begun, done = [], threading.Event()

    def begin():
        ahead.begin(torch.device("cpu"), lambda: done.wait() and Compiled())
        begun.extend(ahead._running)

    daemon = threading.Thread(target=begin, daemon=True)
    daemon.start()
    daemon.join()
    done.set()
    ahead.wait()
    assert [thread.daemon for thread in begun] == [False]


def test_what_cannot_be_compiled_is_left_to_whoever_launches_it():
    begun = threading.Event()

    def fail():
        begun.set()
        raise RuntimeError("no such kernel")

    ahead.begin(torch.device("cpu"), fail)
    ahead.wait()
    assert begun.is_set()
    assert not ahead._running


def test_no_more_is_compiled_at_a_time_than_a_machine_bears():
    begun, done = [], threading.Event()

    def compile_kernel():
        begun.append(1)
        done.wait()
        return Compiled()

    for _ in range(ahead.MOST + 3):
        ahead.begin(torch.device("cpu"), compile_kernel)
    done.set()
    for thread in tuple(ahead._running):
        thread.join()
    ahead.begin(torch.device("cpu"), compile_kernel)
    assert len(ahead._running) == 1, "threads that have ended are kept"
    ahead.wait()
    assert len(begun) == ahead.MOST + 1


def test_where_no_thread_is_to_be_had_nothing_fails(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ahead.begin(torch.device("cpu"), Compiled)
    ahead.wait()
