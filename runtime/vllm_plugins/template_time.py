"""Template time: interrupt chat templates, which are programs and may loop forever.

Jinja compiles a template to Python code that runs in some thread. A watcher raises TemplateTooSlow
in that thread, which a template cannot catch. It counts its own periods: a process that stood still
had no slow template. A single long step, such as a sort of millions, cannot be interrupted. vLLM's
own limit gives the request up but leaves its thread running, and with it the GIL held. Called by
server.py for requests, and by datasets/chat_template.py.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 5.0  # for a conversation, which usually takes milliseconds
_PERIOD = 0.5  # seconds between checks


class TemplateTooSlow(Exception):
    """A chat template took longer than it may."""

    def __init__(self) -> None:
        super().__init__(f"the chat template took more than {SECONDS:g} s: it may loop for ever")


class _Watcher:
    """A watcher of the threads that render a template."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._periods: dict[int, int] = {}  # by thread
        threading.Thread(target=self._watch, name="template-time", daemon=True).start()

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._periods[me] = 0
        try:
            yield
        finally:
            with self._lock:
                self._periods.pop(me, None)

    def _watch(self) -> None:
        while True:
            time.sleep(_PERIOD)
            with self._lock:  # so that an interrupted thread is still within `limit`
                for thread in list(self._periods):
                    self._periods[thread] += 1
                    if self._periods[thread] * _PERIOD > SECONDS:
                        del self._periods[thread]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(TemplateTooSlow)
                        )


@functools.cache
def _watcher(pid: int) -> _Watcher:
    return _Watcher()


def limit_template() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that ends its block by TemplateTooSlow after SECONDS."""
    return _watcher(os.getpid()).limit()


def limit_all_templates() -> None:
    """Limit every template that transformers renders in this process."""
    from transformers import processing_utils, tokenization_utils_base

    render: Callable[..., Any] = tokenization_utils_base.render_jinja_template

    @functools.wraps(render)
    def render_limited(*arguments: Any, **options: Any) -> Any:
        with limit_template():
            return render(*arguments, **options)

    tokenization_utils_base.render_jinja_template = render_limited
    processing_utils.render_jinja_template = render_limited
