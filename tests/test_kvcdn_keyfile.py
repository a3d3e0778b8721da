"""Key files: plain and encrypted ones, who may read them, where passphrases come from, and that none is ever shown."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization

from kvcdn import keyring
from kvcdn.errors import UsageError
from kvcdn.keyfile import MAX_PASSPHRASE_BYTES, SCRYPT_N, SCRYPT_P, SCRYPT_R, is_encrypted
from kvcdn.keyring import create_signing_key, load_signing_key, signing_key_path
from kvcdn.passphrase import configured_passphrase, passphrase_in
from kvcdn.signing import SigningKey
from support.command import kvcdn

KEY = SigningKey.generate()

WORDS = b"correct horse battery"

PEM = KEY.to_pem(WORDS)


def test_an_encrypted_key_reads_back_with_its_passphrase_only() -> None:
    """The file shows neither key nor passphrase; another passphrase opens nothing, and is not repeated in the error."""
    assert (True, False) == (is_encrypted(PEM), is_encrypted(KEY.to_pem()))
    assert KEY.public == SigningKey.from_pem(PEM, "file", WORDS).public
    assert KEY.private.private_bytes_raw() not in PEM
    for wrong in (b"correct horse batterz", WORDS[:-1], b"x"):
        with pytest.raises(UsageError, match="not its passphrase") as caught:
            SigningKey.from_pem(PEM, "file", wrong)
        assert wrong.decode() not in str(caught.value) + caught.value.hint or wrong == b"x"
    for none in (None, b""):
        with pytest.raises(UsageError, match="is encrypted") as caught:
            SigningKey.from_pem(PEM, "file", none)
        assert "KVCDN_KEY_PASSPHRASE_FILE" in caught.value.hint


def test_each_file_has_salt_and_start_of_its_own() -> None:
    """The same key under the same passphrase is another file."""
    assert PEM != KEY.to_pem(WORDS)


def test_openssl_reads_it_and_tells_how_it_is_made(tmp_path) -> None:
    """A standard form: PBES2 with scrypt and AES-256-CBC, at the cost that is promised."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = tmp_path / "key.pem"
    path.write_bytes(PEM)
    shown = subprocess.run(["openssl", "asn1parse", "-in", path], capture_output=True, text=True, check=True).stdout
    for word in ("PBES2", "scrypt", "aes-256-cbc", f":{SCRYPT_N:04X}", f":{SCRYPT_R:02X}", f":{SCRYPT_P:02X}"):
        assert word in shown
    read = subprocess.run(
        ["openssl", "pkey", "-in", path, "-passin", "env:WORDS", "-pubout", "-outform", "DER"],
        env={**os.environ, "WORDS": WORDS.decode()},
        capture_output=True,
        check=True,
    )
    assert read.stdout.endswith(bytes(KEY.public))


def test_keys_that_others_encrypted_are_read() -> None:
    """The library's own form, which OpenSSL's tools write too."""
    theirs = KEY.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(WORDS)
    )
    assert KEY.public == SigningKey.from_pem(theirs, "file", WORDS).public


def test_any_cut_or_changed_file_is_no_key() -> None:
    """Ends in an error that names the file, never in another one, and never in another key."""
    for data in (PEM[:-80], PEM[:60], PEM.replace(b"MI", b"MJ", 1), PEM[:100] + b"A" + PEM[101:]):
        with pytest.raises(UsageError, match=r"key\.pem"):
            SigningKey.from_pem(data, "key.pem", WORDS)


@pytest.mark.parametrize("words", [b"", b"short", b"x" * (MAX_PASSPHRASE_BYTES + 1)], ids=len)
def test_no_key_is_put_under_a_bad_passphrase(words) -> None:
    """Too short, or longer than can be read."""
    with pytest.raises(UsageError, match="passphrase"):
        KEY.to_pem(words)
    assert (
        KEY.public == SigningKey.from_pem(KEY.to_pem(b"x" * MAX_PASSPHRASE_BYTES), "file", b"x" * MAX_PASSPHRASE_BYTES).public
    )


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o600, True), (0o400, True), (0o640, False), (0o604, False), (0o644, False), (0o620, False)]
)
def test_a_plain_key_is_its_owners_alone(mode, fine) -> None:
    """Others may neither read nor write it."""
    path = signing_key_path()
    key = create_signing_key(path)
    assert 0o600 == path.stat().st_mode & 0o777
    path.chmod(mode)
    if fine:
        assert key.public == load_signing_key(path).public
    else:
        with pytest.raises(UsageError, match="others than you") as caught:
            load_signing_key(path)
        assert "chmod 600" in caught.value.hint


def test_an_encrypted_key_may_be_read_by_others() -> None:
    """It needs the passphrase."""
    path = signing_key_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(PEM)
    path.chmod(0o644)
    assert KEY.public == load_signing_key(path, lambda: WORDS).public


def test_roots_file_may_be_readable_for_a_services_group(monkeypatch) -> None:
    """What systemd and Kubernetes hand to a service."""
    path = signing_key_path()
    create_signing_key(path)
    if path.stat().st_uid != 0:
        pytest.skip("only root makes files of root")
    monkeypatch.setattr(keyring.os, "geteuid", lambda: 1000)
    for mode, fine in ((0o440, True), (0o640, True), (0o460, False), (0o444, False)):
        path.chmod(mode)
        if fine:
            load_signing_key(path)
        else:
            with pytest.raises(UsageError):
                load_signing_key(path)


def test_where_passphrases_come_from(tmp_path, monkeypatch) -> None:
    """The first line of a file before a variable; nothing where neither is set."""
    assert configured_passphrase() is None
    monkeypatch.setenv("KVCDN_KEY_PASSPHRASE", "from the variable")
    assert b"from the variable" == configured_passphrase()
    file = tmp_path / "words"
    file.write_bytes(b"from the file \xc3\xa9\r\nand more\n")
    monkeypatch.setenv("KVCDN_KEY_PASSPHRASE_FILE", str(file))
    assert b"from the file \xc3\xa9" == configured_passphrase()
    for content in (b"", b"\nwords", b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="no passphrase"):
            passphrase_in(file)
    with pytest.raises(UsageError, match="cannot read"):
        passphrase_in(tmp_path / "nothing")


def test_commands_use_an_encrypted_key(tmp_path) -> None:
    """Made, shown, signed with; without the passphrase, code 2 and a way out. Nothing ever shows it."""
    secret, other = "twelve green bottles", "eleven green bottles"
    ran = kvcdn("keygen", "--encrypt", "--json", KVCDN_KEY_PASSPHRASE=secret)
    assert (0, "passphrase") == (ran.code, ran.json["protection"])
    public, path = ran.json["public_key"], signing_key_path()
    assert is_encrypted(path.read_bytes())
    shown = kvcdn("keygen", "--show", "--json", KVCDN_KEY_PASSPHRASE=secret)
    assert public == shown.json["public_key"]
    revoke = ("revoke", "--publisher", KEY.public.text, "--origin", tmp_path / "origin")
    done = [kvcdn(*revoke), kvcdn(*revoke, KVCDN_KEY_PASSPHRASE=other), kvcdn(*revoke, KVCDN_KEY_PASSPHRASE=secret)]
    assert [2, 2, 0] == [each.code for each in done]
    assert "KVCDN_KEY_PASSPHRASE_FILE" in done[0].complaint
    changed = {"KVCDN_KEY_PASSPHRASE": secret, "KVCDN_NEW_KEY_PASSPHRASE": other}
    assert 0 == kvcdn("keygen", "--protect", **changed).code
    done += [kvcdn(*revoke, KVCDN_KEY_PASSPHRASE=secret), kvcdn(*revoke, KVCDN_KEY_PASSPHRASE=other)]
    assert [2, 0] == [each.code for each in done[-2:]]
    assert 2 == kvcdn("keygen", "--encrypt", KVCDN_KEY_PASSPHRASE=secret).code
    assert 2 == kvcdn("keygen", "--encrypt", "--name", "short", KVCDN_KEY_PASSPHRASE="short").code
    assert 2 == kvcdn("keygen", "--encrypt", "--name", "nobody-to-ask").code
    assert not any(words in each.out + each.err for each in (ran, shown, *done) for words in (secret, other))


def test_a_key_that_is_there_is_protected(tmp_path) -> None:
    """The same key, encrypted from now on; its mode stays."""
    key = create_signing_key(signing_key_path("documents"))
    words = tmp_path / "words"
    words.write_text("nine green bottles\n")
    ran = kvcdn("keygen", "--name", "documents", "--protect", "--json", KVCDN_KEY_PASSPHRASE_FILE=str(words))
    assert (0, key.public.text) == (ran.code, ran.json["public_key"])
    path = signing_key_path("documents")
    assert key.public == load_signing_key(path, lambda: b"nine green bottles").public
    assert 0o600 == path.stat().st_mode & 0o777


def test_a_service_reads_the_passphrase_from_a_file(tmp_path) -> None:
    """Its own setting, or the environment's; the settings show the path only."""
    from kvcdn.origin.service.service_settings import ServiceSettings

    path, words = tmp_path / "key.pem", tmp_path / "words"
    path.write_bytes(PEM)
    words.write_bytes(WORDS + b"\n")
    settings = ServiceSettings(models=("m",), key_file=path, key_passphrase_file=words)
    assert KEY.public == settings.open_keys()[0].public
    with pytest.raises(UsageError, match="is encrypted"):
        ServiceSettings(models=("m",), key_file=path).open_keys()
    assert WORDS.decode() not in settings.model_dump_json()
