"""Sources of documents: text, and only text."""

from __future__ import annotations

import io
import sys

import pytest

from kvcdn.errors import KvcdnError, NotFoundError, UnavailableError, UsageError
from kvcdn.origin.publishing.sources import list_documents, read_document

BAD = {
    "empty": (b"", UsageError, "is empty"),
    "blank": (b" \n\t\n", UsageError, "is empty"),
    "binary": (b"\x7fELF\x00\x01", UsageError, "binary"),
    "latin-1": ("Stra\xdfe".encode("latin-1"), UsageError, "not UTF-8"),
    "utf-16": ("text".encode("utf-16"), KvcdnError, "binary|not UTF-8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_text_is_refused_by_name(tmp_path, kind):
    """One clear line that names the file and the fault."""
    data, error, words = BAD[kind]
    path = tmp_path / f"{kind}.txt"
    path.write_bytes(data)
    with pytest.raises(error, match=words) as caught:
        read_document(str(path))
    assert path.name in str(caught.value)


def test_a_text_is_taken_as_it_is(tmp_path):
    """No byte of the text is changed, but for a byte order mark."""
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffZeile\r\nzwei \u00fc\n".encode())
    assert "Zeile\r\nzwei \u00fc\n" == read_document(str(path)).text


def test_a_folder_lists_its_texts_in_order(tmp_path):
    """Other files are left alone."""
    for name in ("b.txt", "a.md", "sub/c.py", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [str(tmp_path / name) for name in ("a.md", "b.txt", "sub/c.py")] == list_documents(str(tmp_path))


def test_standard_input_is_a_document(monkeypatch):
    """`kvcdn publish -` reads a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert "from a pipe" == read_document("-").text


@pytest.mark.parametrize("call", [list_documents, read_document])
def test_nothing_there_is_not_found(tmp_path, call):
    """A wrong path is told from an empty document."""
    with pytest.raises(NotFoundError, match="nowhere"):
        call(str(tmp_path / "nowhere.txt"))


def test_a_chat_file_holds_messages(tmp_path):
    """With --chat a JSON list is the opening of a conversation, any other text its system message."""
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user", "content": "hi"}]')
    assert [{"role": "user", "content": "hi"}] == read_document(str(chat)).messages()
    assert [] == read_document(str(chat)).tools()
    chat.write_text('{"role": "user"}')
    with pytest.raises(UsageError, match="not a chat"):
        read_document(str(chat)).messages()
    plain = tmp_path / "plain.txt"
    plain.write_text("rules")
    assert [{"role": "system", "content": "rules"}] == read_document(str(plain)).messages()


def test_a_request_holds_messages_and_tools(tmp_path):
    """As clients send it; tools that are none are refused."""
    request = tmp_path / "request.json"
    request.write_text('{"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}')
    read = read_document(str(request))
    assert ([{"role": "user", "content": "hi"}], [{"type": "function"}]) == (read.messages(), read.tools())
    for broken in ('{"messages": []}', '{"messages": [{"role": "user", "content": "hi"}], "tools": ["x"]}', "[" * 100_000):
        request.write_text(broken)
        with pytest.raises(UsageError):
            read_document(str(request)).tools()


def test_a_closed_port_is_unavailable():
    """A URL that nobody answers is no stack trace."""
    with pytest.raises(UnavailableError, match="cannot download"):
        read_document("http://127.0.0.1:9/doc.txt")
