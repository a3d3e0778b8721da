"""The one error tree.

    KvcdnError                   exit 1   anything that went wrong and was foreseen
    +-- UsageError               exit 2   you asked for something that cannot be done as asked
    |   +-- UnsupportedModelError         the model's kind of KV cache is not one we can carry
    +-- NotFoundError            exit 3   there is no such thing where we looked
    +-- IntegrityError           exit 4   the bytes are not what they should be
    |   +-- CorruptError                  malformed, or a hash, tag or name does not match
    |   +-- UntrustedError                well signed, by a key that is not on the trust list, or no longer trusted
    |   |   +-- RevokedError              taken back by somebody on the trust list
    |   +-- MismatchError                 well signed by a trusted key, but not what this model computes from this text
    |   +-- QualityError                  sound and lossy, and its certificate is worse than what was asked for
    +-- UnavailableError         exit 5   a service or a disk did not do its part; trying again may help

Subclasses exist where a caller branches. Every message says what happened to what; `hint` says what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class KvcdnError(Exception):
    """Anything kvcdn foresaw. `str()` gives the message; `hint` the next step, or an empty string."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(KvcdnError):
    """The request itself cannot be served as it stands."""

    exit_code = 2


class UnsupportedModelError(UsageError):
    """The model keeps a kind of cache that this version does not carry; named, never guessed."""


class NotFoundError(KvcdnError):
    """Nothing is there under this name."""

    exit_code = 3


class IntegrityError(KvcdnError):
    """Bytes that must not be used."""

    exit_code = 4


class CorruptError(IntegrityError):
    """Malformed bytes, or bytes that do not match their hash, tag, signature or name."""


class UntrustedError(IntegrityError):
    """A valid signature by a publisher who is not on the trust list, or whose cache failed an audit."""


class RevokedError(UntrustedError):
    """A publisher, a model or an object that a trusted signer has revoked."""


class MismatchError(IntegrityError):
    """A cache that is not what this model computes from this text: another's, or the model is not what its files say."""


class QualityError(IntegrityError):
    """A lossy KV that its publisher measured, and that is further from the exact one than the reader accepts."""


class UnavailableError(KvcdnError):
    """A server, link or disk failed or refused; the request itself was fine."""

    exit_code = 5
