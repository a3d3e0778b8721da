"""Compiled loops: codecs' inner loops as machine code, made by numba in a thread beside, while numpy's own do the work.

A loop is a plain function over arrays. Whoever wants it compiled asks for `native()` each time, and has another way, to the
same bits, while that is None: until it is ready, in a child of a process that was compiling, and for good where numba is
missing or fails. Compiling waits until nobody has asked for a while, so that no first token waits for it. What it makes is kept
on disk where numba can write: beside the source, or in the user's cache folder.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, Generic, ParamSpec, cast

from kvcdn.digest import hash_bytes

P = ParamSpec("P")

QUIET_S = 0.5
"""Nobody has asked for so long: whoever asked first has what it wanted. Importing numba alone takes 0.2 s of a core."""

_MOST_PATIENCE_S = 10.0
"""Where somebody always asks, compiling begins nevertheless, and pays for itself."""

NO_USES: Mapping[str, Any] = MappingProxyType({})

_LOG = logging.getLogger(__name__)

_HELPERS: dict[tuple[Any, ...], Any] = {}
"""What loops call, for numba, by itself and what it calls: loops of several dtypes have most of it in common, and it is most of
what compiling takes. Kept, so that what it is known by stays its own."""


@dataclass(frozen=True)
class Array:
    """A parameter that is a row-major array, at any address; read only unless `written`."""

    dtype: str
    dimensions: int = 1
    written: bool = False


@dataclass(frozen=True)
class Instructions:
    """A function in machine instructions that `build` makes for numba, which does not find them by itself.

    `plain` does the same, for who reads or tests it.
    """

    plain: Callable[..., Any]
    build: Callable[[], Any]
    calls: tuple[Callable[..., Any], ...] = ()
    """The functions that make the instructions for `build`: with another of them, they are others."""

    def __call__(self, *arguments: Any) -> Any:
        return self.plain(*arguments)


Uses = Mapping[str, Callable[..., Any] | Instructions]
"""What a loop calls, by the names by which it does; each may call those before it."""


class Loop(Generic[P]):
    """A function over arrays, and its machine code where there is one. Thread-safe. It returns a number, or nothing.

    `parameters` are arrays, or numbers by numba's names of their types; `uses` are the functions that it calls, by the names by
    which it does, and which may call those before them.

    One function may be several loops, each of one signature and under a name of its own: numba's files of a function with
    several signatures can be mixed up when two processes write at once.
    """

    def __init__(
        self,
        function: Callable[P, Any],
        parameters: Sequence[Array | str],
        uses: Uses | None = None,
    ) -> None:
        self._function, self._parameters, self._uses = function, parameters, uses or {}
        kinds = (one if isinstance(one, str) else one.dtype for one in parameters)
        mark = _mark((function, *self._uses.values()))
        self.name = "_".join((function.__name__, *kinds, mark))
        self._native: Callable[P, Any] | None = None

    def native(self) -> Callable[P, Any] | None:
        """The machine code, or None: it is then asked for."""
        if self._native is None:
            _COMPILER.ask(self)
        return self._native

    def make(self) -> None:
        """Compiles it, or loads what was compiled before. Raises whatever numba does."""
        import numba  # noqa: PLC0415 - it takes a fifth of a second

        if numba.config.DISABLE_JIT:
            raise RuntimeError("numba is told to compile nothing (NUMBA_DISABLE_JIT)")
        # Without fast-math, and with numpy's idea of division: the same bits as numpy.
        options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
        plain = cast("FunctionType", self._function)
        used: dict[str, Any] = {}
        for name, one in self._uses.items():
            called = {other: used[other] for other in used if isinstance(one, FunctionType) and other in one.__code__.co_names}
            key = (one, *((other, id(each)) for other, each in called.items()))
            if key not in _HELPERS:
                if isinstance(one, Instructions):
                    _HELPERS[key] = one.build()
                else:
                    helper = cast("FunctionType", one)
                    _HELPERS[key] = numba.njit(**options)(FunctionType(helper.__code__, {**helper.__globals__, **called}, name))
            used[name] = _HELPERS[key]
        function = FunctionType(plain.__code__, {**plain.__globals__, **used}, self.name)
        function.__qualname__ = self.name
        signature = tuple(_numba_type(numba, one) for one in self._parameters)
        try:
            self._native = numba.njit(signature, cache=True, **options)(function)
        except Exception as error:  # noqa: BLE001 - no place to write, a full disk, a torn file: numba raises what it meets
            _LOG.debug("%s is compiled without a cache: %s", self.name, error)
            self._native = numba.njit(signature, **options)(function)


def _mark(functions: Sequence[Callable[..., Any] | Instructions]) -> str:
    """Digits that tell functions from what they were before a change: of the files, numba looks at the time of one alone."""
    plain = [each for one in functions for each in ((one.build, *one.calls) if isinstance(one, Instructions) else (one,))]
    codes = (cast("FunctionType", one).__code__ for one in plain)
    return hash_bytes(repr([_describe(code) for code in codes]).encode()).hex()[:16]


def _describe(code: CodeType) -> tuple[Any, ...]:
    constants = [_describe(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return code.co_code, constants, code.co_names


def wait_until_compiled() -> None:
    """Returns when all that was asked for is compiled, or cannot be. For benchmarks and tests."""
    _COMPILER.wait()


def _numba_type(numba: Any, parameter: Array | str) -> Any:
    if isinstance(parameter, str):
        return getattr(numba.types, parameter)
    return numba.types.Array(
        getattr(numba.types, parameter.dtype), parameter.dimensions, "C", readonly=not parameter.written, aligned=False
    )


class _Compiler:
    """One thread, started when something is asked for, and gone when all is done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Loop[Any]] = []
        self._seen: set[Loop[Any]] = set()
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._hurried = self._ended = False

    def ask(self, one: Loop[Any]) -> None:
        self._asked = time.monotonic()
        if one in self._seen:
            return
        with self._changed:
            if self._ended or one in self._seen:
                return
            self._seen.add(one)
            self._waiting.append(one)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvcdn-compile", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None)
            self._hurried = False

    def end(self) -> None:
        """At exit: a compiler that is pulled down with the process may crash it, so the loop at hand is finished."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is not here, and numba or its locks may be half-way for ever."""
        ended = self._ended or self._thread is not None
        self.__init__()  # type: ignore[misc]
        self._ended = ended

    def _work(self) -> None:
        self._be_patient()
        while True:
            with self._changed:
                if self._ended or not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                one = self._waiting.pop(0)
            try:
                one.make()
            except Exception as error:  # noqa: BLE001 - there is another way to the same bits, whatever went wrong
                _LOG.debug("%s is not compiled: %s", one.name, error)

    def _be_patient(self) -> None:
        begun = time.monotonic()
        with self._changed:
            while not self._hurried and not self._ended:
                now = time.monotonic()
                left = min(self._asked + QUIET_S, begun + _MOST_PATIENCE_S) - now
                if left <= 0:
                    return
                self._changed.wait(left)


_COMPILER = _Compiler()

atexit.register(_COMPILER.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_COMPILER.abandon)
