"""A time limit for chat templates, which are their authors' programs and may loop for ever.

A template is rendered by Python code that jinja makes of it, in some thread; a watcher raises
TemplateTooSlow in that thread, which a template cannot catch. One thing it cannot interrupt: a
single step that is long by itself, such as a sort of millions. vLLM has a limit of its own, which
gives the request up but leaves its thread running, and with it Python's lock.
Called by vllm_server.py, for requests, and datasets/demonstrations.py.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 5.0  # for rendering a conversation: it takes milliseconds
_PERIOD = 0.5  # seconds between looks


class TemplateTooSlow(Exception):
    """A chat template took longer than it may."""

    def __init__(self) -> None:
        super().__init__(f"the chat template took more than {SECONDS:g} s: it may loop for ever")


class _Clock:
    """Who renders, and since when."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[int, float] = {}  # by thread
        threading.Thread(target=self._watch, name="template-time", daemon=True).start()

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._lock:
            self._since[me] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._since.pop(me, None)

    def _watch(self) -> None:
        while True:
            time.sleep(_PERIOD)
            with self._lock:  # so that whoever is interrupted is still within `limit`
                late = time.monotonic() - SECONDS
                for thread in [one for one, since in self._since.items() if since < late]:
                    del self._since[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(TemplateTooSlow)
                    )


@functools.cache
def _clock(pid: int) -> _Clock:
    return _Clock()


def limited() -> contextlib.AbstractContextManager[None]:
    """A block that gets SECONDS, or it is ended by TemplateTooSlow."""
    return _clock(os.getpid()).limit()


def limit_all_templates() -> None:
    """Limit every template that transformers renders in this process."""
    from transformers import processing_utils, tokenization_utils_base

    render: Callable[..., Any] = tokenization_utils_base.render_jinja_template

    @functools.wraps(render)
    def rendered(*arguments: Any, **options: Any) -> Any:
        with limited():
            return render(*arguments, **options)

    tokenization_utils_base.render_jinja_template = rendered
    processing_utils.render_jinja_template = rendered
