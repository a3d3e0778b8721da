"""Key files: a signing key in PKCS #8 PEM, plain, or encrypted under a passphrase.

What is encrypted is PBES2 (RFC 8018) with scrypt (RFC 7914) and AES-256-CBC, which OpenSSL reads too. The library's own
encryption of PKCS #8 stretches a passphrase by 2,048 rounds of PBKDF2, which is too few for a file that may be stolen; so the
frame is put together here, of the library's scrypt and AES. Reading is the library's, whatever standard form a file has.
"""

from __future__ import annotations

import base64
import secrets
import textwrap

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import padding, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from kvcdn.errors import UsageError

SCRYPT_N = 1 << 14
SCRYPT_R = 8
SCRYPT_P = 5
"""16 MiB and about half a second: the least that OWASP recommends, and the most memory that OpenSSL reads."""

MIN_PASSPHRASE_BYTES = 8
MAX_PASSPHRASE_BYTES = 1023
"""What the library reads at most."""

_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"

_OID_PBES2 = bytes.fromhex("2a864886f70d01050d")
_OID_SCRYPT = bytes.fromhex("2b06010401da47040b")
_OID_AES256_CBC = bytes.fromhex("60864801650304012a")

_KEY_BYTES = 32
_BLOCK_BYTES = 16
_SALT_BYTES = 16

_INTEGER, _OCTETS, _OID, _SEQUENCE = 0x02, 0x04, 0x06, 0x30


def is_encrypted(pem: bytes) -> bool:
    """Whether a key file needs a passphrase."""
    return _ENCRYPTED in pem


def read_key(pem: bytes, source: str, passphrase: bytes | None) -> Ed25519PrivateKey:
    """The key of a key file; `source` names it in errors. Raises UsageError."""
    if not is_encrypted(pem):
        passphrase = None
    elif not passphrase:
        raise UsageError(
            f"{source} is encrypted, and there is no passphrase",
            hint="set KVCDN_KEY_PASSPHRASE_FILE to a file that holds it, or KVCDN_KEY_PASSPHRASE",
        )
    key = None
    try:
        key = serialization.load_pem_private_key(pem, password=passphrase)
    except ValueError:
        if passphrase is not None:
            raise UsageError(f"{source} is damaged, or this is not its passphrase") from None
    except (TypeError, UnsupportedAlgorithm):
        pass
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{source} does not hold an Ed25519 private key", hint="make one with: kvcdn keygen")
    return key


def write_key(key: Ed25519PrivateKey, passphrase: bytes | None) -> bytes:
    """The key file of `key`. Raises UsageError for a passphrase that is too short or too long."""
    if passphrase is None:
        return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    check_passphrase(passphrase)
    plain = key.private_bytes(serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    salt, start = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_BLOCK_BYTES)
    stretched = Scrypt(salt=salt, length=_KEY_BYTES, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(passphrase)
    padder = padding.PKCS7(8 * _BLOCK_BYTES).padder()
    encryptor = Cipher(algorithms.AES(stretched), modes.CBC(start)).encryptor()
    sealed = encryptor.update(padder.update(plain) + padder.finalize()) + encryptor.finalize()
    numbers = b"".join(map(_integer, (SCRYPT_N, SCRYPT_R, SCRYPT_P, _KEY_BYTES)))
    stretching = _der(_SEQUENCE, _der(_OID, _OID_SCRYPT) + _der(_SEQUENCE, _der(_OCTETS, salt) + numbers))
    cipher = _der(_SEQUENCE, _der(_OID, _OID_AES256_CBC) + _der(_OCTETS, start))
    scheme = _der(_SEQUENCE, _der(_OID, _OID_PBES2) + _der(_SEQUENCE, stretching + cipher))
    text = base64.b64encode(_der(_SEQUENCE, scheme + _der(_OCTETS, sealed))).decode("ascii")
    lines = "\n".join(textwrap.wrap(text, 64))
    return f"{_ENCRYPTED.decode()}\n{lines}\n{_ENCRYPTED.decode().replace('BEGIN', 'END')}\n".encode("ascii")


def check_passphrase(passphrase: bytes) -> None:
    """Raises UsageError for one under which no key is put."""
    if not MIN_PASSPHRASE_BYTES <= len(passphrase) <= MAX_PASSPHRASE_BYTES:
        raise UsageError(
            f"a passphrase has {MIN_PASSPHRASE_BYTES} to {MAX_PASSPHRASE_BYTES} bytes", hint="a few random words are a good one"
        )


def _der(tag: int, content: bytes) -> bytes:
    """An element of ASN.1 in DER."""
    size = len(content)
    if size < 0x80:  # noqa: PLR2004 - X.690 8.1.3.4: the short form
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content


def _integer(value: int) -> bytes:
    return _der(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big"))
