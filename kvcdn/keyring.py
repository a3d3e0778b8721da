"""The user's own keys on disk: signing keys, the trust list, namespace secrets.

With `settings` and `passphrase`, the only core module that reads files.

<config>/keys/<name>.pem          Ed25519 signing key, PKCS #8, mode 0600, perhaps encrypted (keyfile)
<config>/trust                    publishers to accept, a public key and a name a line
<config>/distrust                 publishers to refuse for all that, a public key, a time and a reason a line
<config>/revocations/<key>        the last list of what a publisher revokes that was seen, as it was signed
<config>/journals/<digest>        the last entry seen of an origin's journal; the digest is that of the origin's URL
<config>/namespaces/<name>        32 random bytes in hexadecimal, mode 0600
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
import time
from pathlib import Path

from kvcdn import canonical
from kvcdn.digest import Digest, hash_bytes
from kvcdn.errors import CorruptError, NotFoundError, UnavailableError, UsageError
from kvcdn.fields import Fields
from kvcdn.journal import MAX_NUMBER, Head
from kvcdn.keyfile import is_encrypted
from kvcdn.keys import NAMESPACE_SECRET_MIN_BYTES, Namespace
from kvcdn.passphrase import Passphrase, configured_passphrase
from kvcdn.paths import config_dir
from kvcdn.revocation import MAX_REVOCATIONS_BYTES, Revocations, open_revocations
from kvcdn.signing import PublicKey, SigningKey, TrustList

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_OWNER_ALONE = 0o077
_GROUP_READS_NOT = 0o037
"""Bits of a mode that must not be set."""

_MAX_FILE_BYTES = 1 << 20
"""No key or trust file is larger; a wrong path may be anything."""


def signing_key_path(name: str = "default") -> Path:
    """Where the signing key `name` lies. Raises UsageError for a name that is not a plain word."""
    return config_dir() / "keys" / f"{_plain(name)}.pem"


def load_signing_key(path: Path, passphrase: Passphrase = configured_passphrase) -> SigningKey:
    """Reads a signing key; `passphrase` is asked where it is encrypted. Raises NotFoundError or UsageError.

    A key that is not encrypted is refused where others than its owner may read it.
    """
    pem = _read(path, "signing key", "make one with: kvcdn keygen")
    if is_encrypted(pem):
        return SigningKey.from_pem(pem, str(path), passphrase())
    key = SigningKey.from_pem(pem, str(path))
    _require_private(path)
    return key


def signing_key_encrypted(path: Path) -> bool:
    """Whether the signing key at `path` needs a passphrase. Raises NotFoundError."""
    return is_encrypted(_read(path, "signing key", "make one with: kvcdn keygen"))


def create_signing_key(path: Path, passphrase: bytes | None = None) -> SigningKey:
    """Makes a new signing key at `path` and trusts it. Raises UsageError where a file is there already."""
    key = SigningKey.generate()
    _write_secret(path, key.to_pem(passphrase))
    trust_publisher(key.public, f"myself ({path.stem})")
    return key


def load_or_create_signing_key(path: Path, passphrase: Passphrase = configured_passphrase) -> tuple[SigningKey, bool]:
    """The key at `path`, made now if there is none, and then not encrypted; True where it was made."""
    if path.exists():
        return load_signing_key(path, passphrase), False
    return create_signing_key(path), True


def create_next_key(path: Path, passphrase: bytes | None) -> tuple[SigningKey, Path]:
    """Makes the key that is to take the place of the one at `path`, beside it; the key, and where it is for now."""
    key, beside = SigningKey.generate(), next_key_path(path)
    _write_secret(beside, key.to_pem(passphrase))
    return key, beside


def next_key_path(path: Path) -> Path:
    """Where the key that is to take the place of the one at `path` waits until every origin knows of it."""
    return path.with_name(f"{path.stem}-next.pem")


def replace_signing_key(path: Path, old: SigningKey, new: SigningKey) -> Path:
    """Puts the next key into the place of `old` and trusts it; where `old` is now. There is a key at `path` at any moment."""
    kept = path.with_name(f"{path.stem}-{str(old.public)[:8]}.pem")
    trust_publisher(new.public, f"myself ({path.stem})")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(path, kept)
        next_key_path(path).replace(path)
    except OSError as error:
        raise UnavailableError(f"cannot put {next_key_path(path)} into the place of {path}: {error.strerror}") from None
    return kept


def protect_signing_key(path: Path, key: SigningKey, passphrase: bytes) -> None:
    """Puts `key`, which was read from `path`, there anew, encrypted. Raises UsageError, UnavailableError."""
    _replace(path, key.to_pem(passphrase))


def _require_private(path: Path) -> None:
    """Raises UsageError for a key file that others than its owner may use."""
    try:
        found = path.stat()
    except OSError as error:
        raise UnavailableError(f"cannot read the signing key at {path}: {error.strerror}") from None
    # What the system hands to a service is root's, and readable for the service's group: systemd's credentials are.
    others = _GROUP_READS_NOT if found.st_uid == 0 and os.geteuid() != 0 else _OWNER_ALONE
    mode = stat.S_IMODE(found.st_mode)
    if mode & others:
        raise UsageError(
            f"{path} is a signing key that is not encrypted, and others than you may use it (mode {mode:o})",
            hint=f"chmod 600 {path}, and think of who has read it; or encrypt it: kvcdn keygen --protect",
        )


def trust_path() -> Path:
    """The user's trust list."""
    return config_dir() / "trust"


def load_trust(path: Path | None = None) -> TrustList:
    """The trust list at `path`, or the user's, which may be missing and then trusts nobody.

    Raises NotFoundError or UsageError.
    """
    if path is None:
        path = trust_path()
        if not path.exists():
            return TrustList({})
    text = _read(path, "trust list", "add publishers with: kvcdn keygen --trust KEY")
    return TrustList.from_text(text.decode("utf-8", "replace"), str(path))


def trust_publisher(key: PublicKey, name: str, path: Path | None = None) -> bool:
    """Adds `key` to the trust list; False where it was on it."""
    path = path or trust_path()
    if path.exists() and key in load_trust(path).names:
        return False
    words = " ".join(name.replace("#", " ").split())
    _append(path, f"{key.text} {words}\n", "trust list")
    return True


def distrust_path() -> Path:
    """Where the publishers lie whose caches failed an audit."""
    return config_dir() / "distrust"


def load_distrust() -> dict[PublicKey, str]:
    """Publishers to refuse, each with when and why. Raises UsageError for a damaged file: it must not be forgotten."""
    path = distrust_path()
    if not path.exists():
        return {}
    text = _read(path, "list of distrusted publishers", "").decode("utf-8", "replace")
    return dict(TrustList.from_text(text, str(path)).names)


def distrust_publisher(key: PublicKey, reason: str) -> None:
    """Refuses `key` from now on, in every process of this user. Raises UnavailableError where that cannot be written down."""
    words = " ".join(reason.replace("#", " ").split())
    _append(distrust_path(), f"{key.text} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {words}\n", "list of distrust")


def forgive_publisher(key: PublicKey) -> bool:
    """Takes back what `distrust_publisher` did; False where there was nothing. Raises UnavailableError."""
    path, refused = distrust_path(), load_distrust()
    if key not in refused:
        return False
    kept = "".join(f"{other.text} {reason}\n" for other, reason in refused.items() if other != key)
    _replace(path, kept.encode("utf-8"))
    return True


def revocations_dir() -> Path:
    """Where the last lists of revocations lie that were seen on this host, so that no older one passes for the last."""
    return config_dir() / "revocations"


def load_revocations() -> Revocations:
    """The lists that were seen, by whomever they are. Raises CorruptError for a damaged one: it must not be forgotten."""
    try:
        paths = sorted(path for path in revocations_dir().iterdir() if PublicKey.read(path.name))
    except FileNotFoundError:
        return Revocations()
    found = {}
    for path in paths:
        listed = open_revocations(_read(path, "list of revocations", "", MAX_REVOCATIONS_BYTES), str(path))
        if listed.signer is None or path.name != str(listed.signer):
            raise CorruptError(f"{path}: somebody else's list", hint="remove the file")
        found[listed.signer] = listed
    return Revocations(found)


def keep_revocations(data: bytes) -> None:
    """Keeps a sealed list in place of its signer's older one. Raises CorruptError, or UnavailableError."""
    signer = open_revocations(data, "list of revocations").signer
    _replace(revocations_dir() / str(signer), data)


def journal_head_path(url: str) -> Path:
    """Where the last entry lies that was seen of the journal of the origin at `url`."""
    return config_dir() / "journals" / str(hash_bytes(url.encode("utf-8", "surrogateescape")))


def load_journal_head(url: str) -> Head | None:
    """The last entry seen at `url`. Raises CorruptError for a damaged file: it must not be forgotten."""
    path = journal_head_path(url)
    if not path.exists():
        return None
    fields = Fields(canonical.decode(_read(path, "journal's last entry", "").strip(), str(path)), str(path))
    head = Head(fields.integer("number", 1, MAX_NUMBER), fields.fixed("digest", Digest))
    fields.string("url", _MAX_FILE_BYTES)
    fields.done()
    return head


def keep_journal_head(url: str, head: Head) -> None:
    """Keeps `head` in place of the one before it. Raises UnavailableError."""
    value = {"digest": str(head.digest), "number": head.number, "url": url.encode("ascii", "backslashreplace").decode()}
    _replace(journal_head_path(url), canonical.encode(value) + b"\n")


def forget_journal_head(url: str) -> None:
    """Forgets what was seen of the journal at `url`."""
    journal_head_path(url).unlink(missing_ok=True)


def namespace_path(name: str) -> Path:
    """Where the secret of namespace `name` lies."""
    return config_dir() / "namespaces" / _plain(name)


def create_namespace(name: str) -> Path:
    """Makes a new namespace secret and returns its path. Raises UsageError where there is one already."""
    path = namespace_path(name)
    _write_secret(path, secrets.token_hex(NAMESPACE_SECRET_MIN_BYTES).encode("ascii") + b"\n")
    return path


def namespace_names() -> list[str]:
    """The private namespaces whose secrets are on this machine, sorted."""
    try:
        return sorted(path.name for path in (config_dir() / "namespaces").iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return []


def load_namespace(name: str | None) -> Namespace:
    """The namespace `name`, or the public one for None. Raises NotFoundError or UsageError."""
    if name is None:
        return Namespace.public()
    path = namespace_path(name)
    text = _read(
        path, f"secret of namespace {name!r}", f"make one with: kvcdn keygen --namespace {name}, or copy the file here"
    )
    try:
        return Namespace.private(name, bytes.fromhex(text.decode("ascii").strip()))
    except ValueError:
        raise UsageError(f"{path} does not hold a namespace secret in hexadecimal") from None


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is not a name: use up to 64 letters, digits, dots, dashes and underscores")
    return name


def _append(path: Path, line: str, what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise UnavailableError(f"cannot write the {what} {path}: {error.strerror}") from None


def _replace(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path, what: str, hint: str, limit: int = _MAX_FILE_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except (FileNotFoundError, IsADirectoryError):
        raise NotFoundError(f"there is no {what} at {path}", hint=hint) from None
    except OSError as error:
        raise UnavailableError(f"cannot read the {what} at {path}: {error.strerror}") from None


def _write_secret(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists already and is not overwritten", hint="choose another name, or move it away") from None
    except OSError as error:
        raise UnavailableError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
