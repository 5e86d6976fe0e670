"""Files, folders and patterns of rows: found, counted, read, and refused with their place."""

from __future__ import annotations

import json
import sys

import pytest

from stackrl.runtime.data.files import DataError, count, find, fingerprint, read
from stackrl.runtime.data.rows import document

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def write(file, *rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def test_files_folders_patterns_and_lists_name_files_in_order(tmp_path):
    two, one = write(tmp_path / "chats" / "2.jsonl", CHAT), write(tmp_path / "chats" / "1.jsonl", CHAT)
    write(tmp_path / "chats" / "README.md", "not data")
    deep = write(tmp_path / "chats" / "deep" / "3.jsonl", CHAT)
    assert find(str(two)) == [two]
    assert find(str(tmp_path / "chats")) == [one, two]
    assert find(str(tmp_path / "chats" / "*.jsonl")) == [one, two]
    assert find(str(tmp_path / "**" / "*.jsonl")) == [one, two, deep]
    assert find([str(two), str(one)]) == [two, one]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "no file or folder is called"),
        ("no*.jsonl", "no file is like"),
        ("empty", "has no file that ends in .jsonl or .parquet"),
        ("rows.csv", "ends in none of .jsonl, .parquet"),
    ],
)
def test_what_names_no_rows_is_refused(tmp_path, path, said):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "rows.csv", "a,b")
    with pytest.raises(DataError, match=said) as error:
        find(str(tmp_path / path))
    assert str(tmp_path / path) in str(error.value)


def test_rows_are_counted_and_read_up_to_a_limit_over_several_files(tmp_path):
    one = write(tmp_path / "1.jsonl", {"n": 0}, "", {"n": 1})
    two = write(tmp_path / "2.jsonl", {"n": 2}, {"n": 3})
    files = [one, two]
    assert count(files) == 4 and count(files, 3) == 3 and count(files, 9) == 4
    assert [(row.values["n"], row.place) for row in read(files, 3)] == [
        (0, f"{one}:1"),
        (1, f"{one}:3"),
        (2, f"{two}:1"),
    ]
    assert [row.values["n"] for row in read(files)] == [0, 1, 2, 3]


def test_the_fingerprint_is_of_contents_and_order(tmp_path):
    one, two = write(tmp_path / "1.jsonl", {"n": 0}), write(tmp_path / "2.jsonl", {"n": 1})
    before = fingerprint([one, two])
    assert fingerprint([two, one]) != before
    moved = one.rename(tmp_path / "moved.jsonl")
    assert fingerprint([moved, two]) == before
    write(two, {"n": 2})
    assert fingerprint([moved, two]) != before


BAD = {
    "not JSON": ('{"messages": [', ":2: not JSON"),
    "no object": ("[1]", ":2: a row is an object"),
    "other keys": ({"text": "hello"}, ":2: a row has the key messages, or .* this one has: text"),
    "no messages": ({"messages": []}, ":2: messages is a list of messages .* not empty"),
    "text for messages": ({"messages": "hello"}, ":2: messages is a list"),
    "a message that is text": ({"messages": ["hello"]}, r":2: messages\[0\]: a message has role and content"),
    "a role that is none": (
        {"messages": [{"role": "human", "content": "a"}]},
        r":2: messages\[0\]: role is one of system, user, assistant, tool, not \"human\"",
    ),
    "parts for content": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        r":2: messages\[0\]: content is text",
    ),
    "an answer of nothing": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        r":2: messages\[1\]: content is text, not null",
    ),
    "a completion of numbers": ({"prompt": "a", "completion": 3}, ":2: completion is a list of messages"),
    "tools that are no JSON": (CHAT | {"tools": "x"}, ":2: tools is not JSON"),
    "tools that are no list": (CHAT | {"tools": {"a": 1}}, ":2: tools is a list of objects"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, name):
    row, said = BAD[name]
    file = write(tmp_path / "rows.jsonl", CHAT, row)
    with pytest.raises(DataError, match=said) as error:
        for each in read([file]):
            document(each)
    assert str(error.value).startswith(f"{file}:2: ")


def test_texts_and_message_lists_make_the_same_document(tmp_path):
    question, answer = CHAT["messages"]
    rows = (
        {"prompt": "a", "completion": "b"},
        {"prompt": [question], "completion": [answer]},
        {"prompt": [question], "completion": "b"},
    )
    documents = [document(row) for row in read([write(tmp_path / "rows.jsonl", *rows, CHAT)])]
    assert all(each.messages == CHAT["messages"] for each in documents)
    assert [each.given for each in documents] == [1, 1, 1, 0]


def test_tools_may_be_a_column_of_text(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    file = write(tmp_path / "rows.jsonl", CHAT | {"tools": tools}, CHAT | {"tools": json.dumps(tools)})
    assert [document(row).tools for row in read([file])] == [tools, tools]


def test_parquet_reads_as_json_lines_do(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [CHAT] * 300 + [
        {"messages": [CHAT["messages"][0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    ]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=100)
    assert count([file]) == 301 and count([file], 250) == 250
    found = list(read(find(str(tmp_path))))
    assert found[0].values == CHAT, "keys that only other rows have are not there"
    assert found[300].place == f"{file}, row 301"
    assert document(found[300]).messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet"):
        count([file])


def test_without_pyarrow_a_parquet_file_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = write(tmp_path / "rows.parquet", "PAR1")
    for use in (count, lambda files: list(read(files))):
        with pytest.raises(DataError, match=r"rows\.parquet is a Parquet file.* -m pip install 'pyarrow>="):
            use([file])
