"""Crafted run files: correct checksums, and documents, records, states or tables that do not fit.

`craft` changes one thing, or a few, of a run's file; the seed decides which. Some of the changed files are
valid: then commands must work. `craft_record` does the same with the record of a study.
"""

from __future__ import annotations

import copy
import json
import random
import re
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import inspect

from feddbe.runs.metadata import DOCUMENT_TYPES
from feddbe.runs.store import RUN_FILE, checksum, state_checksums
from feddbe.state import decode, encode

HOSTILE_TEXTS = [
    "", " ", "\x1b[2J\x1b[31mred", "\x9b31m", "line\nbreak\r", "\u202egnp.exe", "\x00", "\x07" * 3,
    "x" * 5000, "<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "a/b", "../../etc",
    "%s{0}", "[red]x[/red]", "$x_1^2$", "$\\frac{", "=1+1", "\ufeff", "é" * 40, "漢字",
]  # fmt: skip
BROKEN_TEXTS = [
    "", "{", "nul", "NaN", "Infinity", "[NaN]", '{"a": -Infinity}', '"\\ud800"', '["\\udfff"]', "1" * 5000,
    f"[{'2' * 5000}]", "1e999", "[" * 100_000, '{"a":' * 60_000, "'x'", "[1,]", '"\x01"', "\ufeff5",
    "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500,
]  # fmt: skip
"""Stored documents that are not JSON, or that Python alone reads."""
VALUES: list[Any] = [
    None, True, False, 0, 5, -1, 2**31, 2**63, 10**30, 0.5, -1.5, 1e300, "", "x", "5", [], [[]], [1], ["x"],
    [None], [{}], {}, {"a": 1}, {"": {}}, {"round": 1}, [[1, 2], [3]],
]  # fmt: skip


class RunFile:
    """A run's file that is changed without notice: every checksum is correct again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RUN_FILE
        self.db = sqlite3.connect(self.path, isolation_level=None)

    def names(self) -> list[str]:
        return [key for (key,) in self.db.execute("SELECT key FROM meta ORDER BY key")]

    def meta(self, key: str) -> Any:
        """Return a document; None if an earlier change has made it something else than JSON."""
        try:
            return json.loads(self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])
        except (ValueError, TypeError, RecursionError):
            return None

    def set_meta(self, key: str, text: Any) -> None:
        """Write a document as text, which need not be JSON."""
        crc = checksum((key, text))
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, text, crc))

    def records(self) -> list[tuple[Any, ...]]:
        return self.db.execute("SELECT * FROM rows").fetchall()

    def replace_record(self, old: tuple[Any, ...], new: list[Any]) -> None:
        where = "round IS ? AND client IS ? AND moment IS ? AND name IS ?"
        self.db.execute(f"DELETE FROM rows WHERE {where}", old[:4])
        self.add_record(new)

    def add_record(self, values: list[Any]) -> None:
        db = sqlite3.connect(":memory:")  # returns values as SQLite stores them
        db.execute("CREATE TABLE t (a INTEGER, b INTEGER, c TEXT, d TEXT, e REAL, f REAL)")
        db.execute("INSERT INTO t VALUES (?, ?, ?, ?, ?, ?)", values)
        (stored,) = db.execute("SELECT * FROM t")
        self.db.execute(
            "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", (*stored, checksum(stored))
        )

    def states(self) -> list[tuple[str, int, int, bytes]]:
        return self.db.execute("SELECT kind, client, round, state FROM states").fetchall()

    def set_state(self, kind: str, client: Any, round_: Any, state: Any) -> None:
        content = state if isinstance(state, bytes) else str(state).encode()
        crc = next(state_checksums(kind, client, round_, content))
        self.db.execute(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)", (kind, client, round_, crc, state)
        )

    def delete_state(self, kind: str, client: int) -> None:
        self.db.execute("DELETE FROM states WHERE kind = ? AND client = ?", (kind, client))


def craft(folder: Path, seed: int | str) -> str:
    """Change the run's file in a folder, and return a description of the change."""
    rng = random.Random(f"crafted {seed}")
    file = RunFile(folder)
    try:
        kinds = rng.choices(list(_KINDS), list(_KINDS.values()), k=rng.choice([1, 1, 1, 2]))
        kinds.sort(key=[*_KINDS].index)  # the last ones may drop a table, or close the file
        return "; ".join(change(file, rng) for change in kinds)
    finally:
        file.db.close()


def _break_document(file: RunFile, rng: random.Random) -> str:
    key = rng.choice(file.names())
    value = rng.choice(VALUES)
    file.set_meta(key, json.dumps(value))
    return f"meta {key} = {value!r}"


def _break_text(file: RunFile, rng: random.Random) -> str:
    key = rng.choice(file.names())
    text = rng.choice([*BROKEN_TEXTS, b"\xff\xfe", b'"x"', 5, 2.5])
    file.set_meta(key, text)
    return f"meta {key} = text {text!r:.40}"


def _delete_document(file: RunFile, rng: random.Random) -> str:
    key = rng.choice(file.names())
    file.db.execute("DELETE FROM meta WHERE key = ?", (key,))
    return f"meta without {key}"


def _add_document(file: RunFile, rng: random.Random) -> str:
    key = rng.choice(
        ["diverged", "new_clients", "analyses", "moment", "peak_rss_mb", "trainers", "unknown", ""]
    )
    value = rng.choice(VALUES)
    if key == "diverged":
        value = {
            "round": rng.choice([0, 2, 3, 10**7]), "client": rng.choice([-1, 0, 3, 10**9]),
            "what": rng.choice(HOSTILE_TEXTS), "value": rng.choice(["nan", "-inf", "1e+39", "x", ""]),
        }  # fmt: skip
    file.set_meta(key, json.dumps(value))
    return f"meta {key} added = {value!r}"


def _change_inside(file: RunFile, rng: random.Random) -> str:
    keys = [key for key in file.names() if isinstance(file.meta(key), dict | list) and file.meta(key)]
    key = rng.choice(keys)
    document = copy.deepcopy(file.meta(key))
    description = change_value(document, rng)
    file.set_meta(key, json.dumps(document))
    return f"meta {key}{description}"


def change_value(document: Any, rng: random.Random) -> str:
    """Replace, delete or add a value at a random container inside a document, and describe the change."""
    container, path = document, ""
    while True:
        index = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
        path += f"/{index}"
        child = container[index]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.3:
            break
        container = child
    action = rng.choice(["set", "set", "set", "delete", "text", "number"])
    if action == "delete":
        del container[index]
        return f"{path} deleted"
    numbers = [0, -1, 1, 2, 10**7, 2**62, 1e-300, 1e300]
    container[index] = rng.choice({"set": VALUES, "text": HOSTILE_TEXTS, "number": numbers}[action])
    return f"{path} = {container[index]!r:.60}"


def craft_record(path: Path, seed: int | str) -> str:
    """Change the record of a study, and return a description of the change."""
    rng = random.Random(f"crafted record {seed}")
    if rng.random() < 0.15:
        text = rng.choice(BROKEN_TEXTS)
        path.write_text(text)
        return f"text {text!r:.40}"
    document = json.loads(path.read_text())
    changes = [change_value(document, rng) for _ in range(rng.choice([1, 1, 2]))]
    path.write_text(json.dumps(document))
    return "; ".join(changes)


def _generate_document(file: RunFile, rng: random.Random) -> str:
    """Replace or add a document by another value of its type, sometimes with one change inside."""
    key = rng.choice(list(DOCUMENT_TYPES))
    document = generate_value(inspect.type_info(DOCUMENT_TYPES[key]), rng)
    change = ""
    if isinstance(document, dict | list) and document and rng.random() < 0.3:
        change = f", then {change_value(document, rng)}"
    file.set_meta(key, json.dumps(document))
    return f"meta {key} generated = {document!r:.200}{change}"


def generate_value(kind: inspect.Type, rng: random.Random) -> Any:
    """Return a random value of a type, preferably at its limits."""
    match kind:
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high):
            numbers: list[Any] = [0, 1, 2, 3, *(limit for limit in (low, high) if limit is not None)]
            if isinstance(kind, inspect.FloatType):
                numbers += [0.5, 1e-300]
            return rng.choice([number for number in numbers if high is None or number <= high])
        case inspect.StrType(pattern=pattern):
            texts = [*HOSTILE_TEXTS, "nan", "-1.5e+30", "fedavg", "digits", "2/before/tsne@z_g", "1/x/mdl"]
            return rng.choice([text for text in texts if pattern is None or re.search(pattern, text)])
        case inspect.ListType(item_type=item):
            return [generate_value(item, rng) for _ in range(rng.choice([0, 1, 3, 4]))]
        case inspect.DictType(key_type=name, value_type=value, min_length=smallest):
            count = max(smallest or 0, rng.choice([0, 1, 3]))
            return {generate_value(name, rng): generate_value(value, rng) for _ in range(count)}
        case inspect.TypedDictType(fields=fields):
            chosen = [field for field in fields if field.required or rng.random() < 0.5]
            return {field.encode_name: generate_value(field.type, rng) for field in chosen}
        case inspect.UnionType(types=kinds):
            return generate_value(rng.choice(kinds), rng)
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.NoneType():
            return None
    raise AssertionError(f"no values of {kind}")


def _change_texts(file: RunFile, rng: random.Random) -> str:
    """Replace every text in a document by a hostile one, so that its structure stays valid."""
    key = rng.choice(
        ["note", "remarks", "label_names", "client_names", "shift_labels", "versions", "machine"]
    )
    if key not in file.names():
        return f"no {key}"
    text = rng.choice(HOSTILE_TEXTS)

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"{name}{text}": replace(item) for name, item in value.items()}
        if isinstance(value, list):
            return [f"{text}{number}" for number, _ in enumerate(value)] or [text]
        return text

    file.set_meta(key, json.dumps(replace(file.meta(key))))
    return f"meta {key} has texts {text!r:.40}"


_RECORD_VALUES: dict[int, list[Any]] = {
    0: [-5, -1, 3, 7, 10**7, 10**12, 2**62, 2**63 - 1, 2.0**63, 1e30, "text", b"\x01", 1.5, None],
    1: [-1, -7, 0, 1, 5, 10**9, 2**62, "text", 0.5, b"\xff", None],
    2: [*HOSTILE_TEXTS, "before", "adapted", "after", "round", "training", "validation", 5, b"x", None],
    3: [*HOSTILE_TEXTS, "accuracy", "accuracy/mean", "accuracy/", "/", "loss", "seconds", "mdl@z_g", "@", 5,
        b"x", None],
    4: [float("inf"), float("-inf"), 1e308, -1e308, -1.0, 2.0, "text", b"\x00", None],
    5: [float("inf"), float("-inf"), 1e308, -1.0, 0.0, 2.5, "text", b"\x00", None],
}  # fmt: skip


def _change_record(file: RunFile, rng: random.Random) -> str:
    records = file.records()
    if not records:
        return "no record to change"
    over_all = [record for record in records if record[1] == -1]
    old = rng.choice(over_all if over_all and rng.random() < 0.6 else records)
    new = list(old[:6])
    field = rng.choice([0, 1, 2, 3, 4, 4, 4, 5, 5])
    new[field] = rng.choice(_RECORD_VALUES[field])
    try:
        if rng.random() < 0.7:
            file.replace_record(old, new)
        else:
            file.add_record(new)
    except sqlite3.IntegrityError:  # a key is never null
        return "no change"
    return f"record {old[:4]} -> {new!r:.80}"


def _delete_records(file: RunFile, rng: random.Random) -> str:
    condition = rng.choice(
        [
            "client = -1", "name = 'accuracy'", "name LIKE 'accuracy/%' AND client = -1", "name = 'seconds'",
            "moment = 'round'", "round = 0", "round = (SELECT max(round) FROM rows)", "moment = 'training'",
            "1", "round = 1 AND client >= 0", "name = 'bytes_up'", "client >= 0",
            "moment = 'before' AND client = -1", "moment LIKE 'newcomers%'", "name LIKE '%@%'",
            "name = 'accuracy' AND client = -1 AND round = 1",
        ]
    )  # fmt: skip
    file.db.execute(f"DELETE FROM rows WHERE {condition}")
    return f"no records with {condition}"


_STATE_BYTES: list[Any] = [
    b"", b"\x00", b"\xff" * 8, b"\x00" * 8, (10**12).to_bytes(8, "little"), b"\x02" + b"\x00" * 7 + b"{}",
    b"\x05" + b"\x00" * 7 + b"[1,2]", b"receipt ", b"receipt 1", b"receipt x y", b"receipt \xff 1",
    b"receipt 1 2 3", b"receipt 99999999999999999999999 abc", b"receipt " + b"9" * 5000 + b" a",
    b"receipt 1 abc", "text",
]  # fmt: skip


def _safetensors(header: object, values: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def _tensor(kind: str, shape: list[int], size: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [0, size]}


_STATE_BYTES += [
    _safetensors({"x": _tensor("F32", [2**62, 0], 0)}),
    _safetensors({"x": _tensor("F32", [2**63, 2, 0], 0)}),
    _safetensors({"x": _tensor("F32", [0] * 5000, 0)}),
    _safetensors({"x": _tensor("F32", [2**40], 4)}, b"abcd"),
    _safetensors({"x": _tensor("F8_E4M3", [4], 4)}, b"abcd"),
    _safetensors({"x": _tensor("C64", [1], 8)}, b"abcdefgh"),
    _safetensors({"__metadata__": {"a": "\x1b[2J" * 1000}, "\x1b[2J\0": _tensor("U16", [2], 4)}, b"abcd"),
]
"""Headers whose shapes, types or names do not fit; the first ones have no values, whatever their shape."""


def _change_state(file: RunFile, rng: random.Random) -> str:
    kind, client, round_, old = rng.choice(file.states())
    new: Any = rng.choice([*_STATE_BYTES, _other_tensors(old, rng), _other_tensors(old, rng), old[:-1]])
    file.set_state(kind, client, round_, new)
    return f"state {kind} of {client} = {new!r:.60}"


def _other_tensors(content: bytes, rng: random.Random) -> bytes:
    """Return a state with other names, shapes, types or values."""
    state = dict(decode(content))
    if not state:
        return encode({"x": torch.zeros(1)})
    name = rng.choice(sorted(state))
    tensor = state[name]
    change = rng.choice(
        ["drop", "rename", "flatten", "double", "ints", "empty", "scalar", "nan", "wide", "none"]
    )
    if change in ("drop", "rename"):
        del state[name]
    if change == "rename":
        state[rng.choice(HOSTILE_TEXTS)] = tensor
    replacement: dict[str, Callable[[], torch.Tensor]] = {
        "flatten": lambda: tensor.reshape(-1),
        "double": lambda: tensor.double(),
        "ints": lambda: tensor.to(torch.int64),
        "empty": lambda: tensor.reshape(-1)[:0],
        "scalar": lambda: torch.tensor(1.0),
        "nan": lambda: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor,
        "wide": lambda: torch.zeros(3, *tensor.shape),
    }
    if change in replacement:
        state[name] = replacement[change]()
    return encode({} if change == "none" else state)


def _move_state(file: RunFile, rng: random.Random) -> str:
    kind, client, round_, state = rng.choice(file.states())
    action = rng.choice(["delete", "round", "kind", "client", "all rounds"])
    if action == "all rounds":  # the last record is of the round of the state, as in a run
        last_round = rng.choice([10**7, 10**12, 2**62, 2**63 - 1])
        for other_kind, other_client, _, content in file.states():
            file.set_state(other_kind, other_client, last_round, content)
        last = max(file.records(), key=lambda record: record[0])
        file.replace_record(last, [last_round, *last[1:6]])
        return f"states and a record are of round {last_round}"
    if action != "round":
        file.delete_state(kind, client)
    if action == "round":
        number = rng.choice([-7, -1, 0, 1, 3, 10**7, 10**12, 2**62, "text", 1.5])
        file.set_state(kind, client, number, state)
        return f"state {kind} of {client} is of round {number}"
    if action == "kind":
        other = rng.choice(["last", "best", "private", "PRIVATE", "upload", "", "x\x1b", "1/before/tsne@z_g"])
        file.set_state(other, client, round_, state)
        return f"state {kind} of {client} is {other!r}"
    if action == "client":
        number = rng.choice([-1, -2, 0, 5, 10**9, "text"])
        file.set_state(kind, number, round_, state)
        return f"state {kind} of {client} is of {number}"
    return f"no state {kind} of {client}"


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
_TABLE_CHANGES = [
    "ALTER TABLE rows ADD COLUMN extra",
    "ALTER TABLE meta ADD COLUMN extra TEXT DEFAULT 'x'",
    "ALTER TABLE states ADD COLUMN extra",
    "ALTER TABLE rows RENAME COLUMN weight TO mass",
    "ALTER TABLE states RENAME TO conditions",
    "DROP TABLE rows",
    "DROP TABLE states",
    "DROP TABLE meta",
    "CREATE TABLE extra (x)",
    "CREATE INDEX further ON rows (name)",
    "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END",
    "CREATE TRIGGER t AFTER INSERT ON states BEGIN DELETE FROM states; END",
    f"DROP TABLE rows; CREATE VIEW rows AS {ENDLESS} SELECT i AS round, -1 AS client, 'round' AS moment, "
    "'seconds' AS name, 1.0 AS value, 1.0 AS weight, 0 AS crc FROM n",
    f"DROP TABLE meta; CREATE VIEW meta AS {ENDLESS} SELECT 'k' || i AS key, '1' AS value, 0 AS crc FROM n "
    "WHERE i < 0",
    f"DROP TABLE states; CREATE VIEW states AS {ENDLESS} SELECT 'last' AS kind, i AS client, 1 AS round, "
    "0 AS crc, x'00' AS state FROM n WHERE i < 0",
    "DROP TABLE rows; CREATE TABLE rows (round, client, moment, name, value, weight, crc)",
    "DROP TABLE meta; CREATE TABLE meta (key, value, crc)",
    "CREATE VIEW further AS SELECT * FROM rows",
    "UPDATE rows SET name = CAST(x'ff' AS TEXT) WHERE name = 'accuracy/std'",
    "UPDATE meta SET value = CAST(x'22ff22' AS TEXT) WHERE key = 'note'",
    "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET rootpage = 2",
    "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET rootpage = 10000 WHERE name = 'rows'",
    "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = '\x1b[2J'",
    "PRAGMA user_version = 2",
    "PRAGMA user_version = 99",
    "PRAGMA application_id = 7",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA encoding = 'UTF-16'; VACUUM",
    "VACUUM",
]


def _change_tables(file: RunFile, rng: random.Random) -> str:
    statements = rng.choice(_TABLE_CHANGES)
    for statement in statements.split("; "):
        if statement != "END":
            is_trigger = statement.startswith("CREATE TRIGGER")
            file.db.execute(f"{statement}; END" if is_trigger else statement)
    return statements[:70]


def share_pages(file: RunFile, rng: random.Random | None = None) -> str:
    """Let new pages between the root of a table and its leaves have the same child many times.

    The records are those of before, but one leaf is read some billion times.
    """
    file.db.execute("PRAGMA journal_mode = DELETE")
    query = "SELECT rootpage FROM sqlite_schema WHERE name = 'rows'"
    root = next((page for (page,) in file.db.execute(query)), None)
    (page_size,) = file.db.execute("PRAGMA page_size").fetchone()
    file.db.close()
    content = bytearray(file.path.read_bytes())
    start = ((root or 1) - 1) * page_size
    if root is None or content[start] != _INTERIOR:
        return "no pages to share"
    page = bytes(content[start : start + page_size])
    (cells,) = struct.unpack_from(">H", page, 3)
    pointers = struct.unpack_from(f">{cells}H", page, _INTERIOR_HEADER)
    (leaf,) = struct.unpack_from(">I", page, 8)
    count = len(content) // page_size
    struct.pack_into(">I", content, start + 8, count + 1)
    for number in range(count + 1, count + 1 + _LEVELS):
        child = leaf if number == count + _LEVELS else number + 1
        shared = bytearray(page)
        for position in (8, *pointers):
            struct.pack_into(">I", shared, position, child)
        content += shared
    struct.pack_into(">I", content, 28, count + _LEVELS)
    file.path.write_bytes(content)
    return f"a page is used {cells + 1}^{_LEVELS} times"


_INTERIOR = 2
"""First byte of a page of an index or of a table WITHOUT ROWID that has children."""
_INTERIOR_HEADER = 12
_LEVELS = 18
"""SQLite reads trees of at most 20 levels."""


_KINDS: dict[Callable[[RunFile, random.Random], str], int] = {
    _break_document: 6,
    _break_text: 4,
    _delete_document: 2,
    _add_document: 2,
    _change_inside: 8,
    _generate_document: 8,
    _change_texts: 3,
    _change_record: 8,
    _delete_records: 2,
    _change_state: 5,
    _move_state: 3,
    _change_tables: 3,
    share_pages: 1,
}
"""Kinds of changes, and how often each is chosen."""
