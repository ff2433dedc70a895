"""Damages files, by bytes and by structure; readers must succeed or raise a typed error.

Everything comes from seeds. ``SMCP_FX_FUZZ=5000`` tries that many cases per format instead of a few.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import io
import json
import os
import random
import re
import resource
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

_SECONDS = 20
_SPARE_MB = 64
_RAW = "\ue000"  # marks text that goes into JSON unescaped


def raw(text: str) -> str:
    return _RAW + text


#: Values that belong nowhere, or elsewhere.
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 0.0, -0.5, 1e-320, 2**31, 2**63, 2**64, 10**30, -(2**63), 1.5, "", " ", "nan",
    "null", "1", "[8, 8]", "{}", "x" * 200_000, "\ud800", "\0", "\x1b[2J", "[/x]", "../../../x", "/etc/hostname",
    "ä\n\t", [], [[]], [None], [1, 2, 3], {}, {"a": 1}, [1] * 5000, raw("NaN"), raw("Infinity"), raw("-Infinity"),
    raw("1e999"), raw("1e-999"), raw("[" * 100_000 + "]" * 100_000), raw('{"a":' * 5000 + "1" + "}" * 5000),
    raw("9" * 5000), raw('"\\ud800"'), raw("[" + "[]," * 50_000 + "[]]"),
)  # fmt: skip


def of_bytes(content: bytes, chance: random.Random) -> bytes:
    """Flip, cut, fill, double, remove or insert."""
    data, size = bytearray(content), len(content)
    at = chance.randrange(size) if size else 0
    length = min(chance.choice((1, 2, 8, 64, 512)), size - at)
    kind = chance.randrange(9)
    if kind <= 2:
        for _ in range(chance.choice((1, 1, 1, 4, 32))):
            place = chance.randrange(size)
            data[place] ^= 1 << chance.randrange(8)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at : at + length]
    elif kind == 5:
        data[at : at + length] = bytes([chance.choice((0, 0xFF, 0x20, 0x7F))]) * length
    elif kind == 6:
        data[at:at] = data[at : at + length]
    elif kind == 7:
        data[at:at] = chance.randbytes(length)
    else:
        data += chance.choice((b"\0", b"}", b"\xff\xfe", data[: min(size, 4096)]))
    return bytes(data)


def of_json(content: bytes, chance: random.Random) -> bytes:
    """Put something odd in the place of a value, or remove, rename or double one."""
    value = json.loads(content)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        value = _changed(value, chance)
    return json_text(value).encode("utf-8", "surrogatepass")


def json_text(value: Any) -> str:
    """Write JSON; texts of `raw` as they are, and broken characters as escapes."""
    parts = json.dumps(value, indent=1).split('"\\ue000')
    text = parts[0]
    for part in parts[1:]:
        inside, end = json.decoder.scanstring(part, 0)  # type: ignore[attr-defined]
        text += inside + part[end:]
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def _changed(value: Any, chance: random.Random) -> Any:
    value = copy.deepcopy(value)
    path = chance.choice(list(places(value)))
    if not path:
        return copy.deepcopy(chance.choice(ODD))
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, kind = path[-1], chance.randrange(6)
    if kind <= 2:
        holder[key] = copy.deepcopy(chance.choice(ODD))
    elif kind == 3:
        del holder[key]
    elif kind == 4 and isinstance(holder, dict):
        holder[chance.choice(("x", "", "fingerprint", f"{key}_", "é"))] = holder.pop(key)
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        other = chance.choice([place for place in places(value) if place])
        source = value
        for step in other:
            source = source[step]
        holder[key] = copy.deepcopy(source)
    return value


_CELLS = ("", " ", "nan", "inf", "-1", "0", "1e999", "9" * 30, "9" * 5000, "null", "[]", "8x", "x8", "8x-8",
          "1x" * 500, "x" * 200_000, "\ud800", "\0", '"', "a\nb", "[" * 20_000, "true", "TRUE",
          "2", "{}", "=1+1")  # fmt: skip


def of_csv(content: bytes, chance: random.Random) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    for _ in range(chance.choice((1, 1, 2, 5))):
        row = chance.choice(rows[1:] if chance.random() < 0.9 else rows)
        kind = chance.randrange(8)
        if kind <= 4 and row:
            row[chance.randrange(len(row))] = chance.choice(_CELLS)
        elif kind == 5 and row:
            row.pop(chance.randrange(len(row)))
        elif kind == 6:
            row.insert(chance.randrange(len(row) + 1), chance.choice(_CELLS))
        else:
            rows.append(list(row))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=chance.choice((0, 0, 1))).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


_TOML = ("nan", "inf", "-1", "0", "1e999", "9999999999999999999999", "true", '""', '"x"', "[]", "{}", "[[1, 2]]",
         "1979-05-27", "[" * 3000, '"\\u0000"', "99999999999999999999999999999999.0")  # fmt: skip


def of_toml(content: bytes, chance: random.Random) -> bytes:
    lines = content.decode().splitlines()
    for _ in range(chance.choice((1, 1, 2, 5))):
        number = chance.randrange(len(lines))
        key, equals, _ = lines[number].partition("=")
        kind = chance.randrange(6)
        if kind <= 2 and equals:
            lines[number] = f"{key}= {chance.choice(_TOML)}"
        elif kind == 3:
            lines.pop(number)
            lines = lines or [""]
        elif kind == 4:
            lines.insert(
                number, chance.choice(("[x]", "base = 3", "a.b = 1", "[training]", "= 1", lines[number]))
            )
        elif equals:
            lines[number] = f"{key.strip()}x ={lines[number].partition('=')[2]}"
    return "\n".join(lines).encode()


_CELLS_OF_A_TABLE = (
    None, 0, 1, -1, 2**31, 2**62, 1.5, -2.5, 1e300, float("inf"), "nan", "null", "", "[8, 8]", "[8,8]", "[]", "[-1]",
    "{}", "[" * 20_000, '["a"]', "a/b", "a/1/2/3", b"\xff\xfe", b"", "x" * 100_000, "\0", "[/x]",
    '{"settings": {}}', "measured", "[99999999999999999999999]", "[true, 8]", "[1e999, 8]",
)  # fmt: skip


def of_table(folder: Path) -> Mutator:
    """Damage a latency table by statements: odd values, rows without what they refer to, other tables."""

    def mutate(content: bytes, chance: random.Random) -> bytes:
        path = folder / "changed.sqlite"
        path.write_bytes(content)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            run = database.execute
            for setting in ("journal_mode = DELETE", "ignore_check_constraints = ON", "writable_schema = ON"):
                run(f"PRAGMA {setting}")
            for _ in range(chance.choice((1, 1, 1, 3))):
                with contextlib.suppress(sqlite3.Error):
                    _statement(run, chance)
        return path.read_bytes()

    return mutate


def _statement(run: Callable[..., Any], chance: random.Random) -> None:
    table = chance.choice(("latency",) * 5 + ("fingerprint", "block"))
    columns = [row[1] for row in run(f"PRAGMA table_info({table})")] or ["widths"]
    column, value = chance.choice(columns), chance.choice(_CELLS_OF_A_TABLE)
    if isinstance(value, bytes) and chance.random() < 0.5:
        run(f"UPDATE {table} SET {column} = CAST(? AS TEXT)", (value,))
        return
    limits = {"latency": "widths = (SELECT widths FROM latency ORDER BY random() LIMIT 1)"}
    kind = chance.randrange(12)
    if kind <= 7:
        where = limits.get(table, "1") if chance.random() < 0.7 else "1"
        run(f"UPDATE OR REPLACE {table} SET {column} = ? WHERE {where}", (value,))
    elif kind == 8:
        run(f"DELETE FROM {table}")
    elif kind == 9:
        run(chance.choice((f"DROP TABLE {table}", f"ALTER TABLE {table} RENAME TO other",
                           f"ALTER TABLE {table} RENAME COLUMN {column} TO other",
                           f"CREATE VIEW v AS SELECT * FROM {table}", "CREATE TABLE more (x)",
                           "DROP TABLE IF EXISTS mark", "UPDATE mark SET now = 3",
                           f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN DELETE FROM {table}; END")))  # fmt: skip
    elif kind == 10:
        run(f"PRAGMA user_version = {chance.choice((0, 2, -1, 2**31 - 1))}")
    else:
        run(f"PRAGMA application_id = {chance.choice((0, 1, -1))}")


# ---- trying -----------------------------------------------------------------------------------------------------


def cases(few: int) -> int:
    """Return the number of cases per format: a few, or as many as requested."""
    return int(os.environ.get("SMCP_FX_FUZZ", few))


def kinds_of_failure(
    content: bytes,
    mutators: tuple[Mutator, ...],
    read: Callable[[bytes], None],
    typed: tuple[type[BaseException], ...],
    count: int,
    seed: int = 0,
) -> tuple[Counter[str], Counter[str]]:
    """Read ``count`` damaged contents; return what failed, by kind, and how often it was read or refused.

    ``read`` raises ``typed`` errors to refuse. Any other error, or more time or memory than the file's size allows,
    is a failure.
    """
    failed, held = Counter[str](), Counter[str]()
    first: dict[str, int] = {}

    def fail(kind: str, number: int) -> None:
        failed[f"{kind} [case {first.setdefault(kind, number)}]"] += 1

    with contextlib.suppress(*typed):
        read(content)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        mutator = chance.choice(mutators)
        changed = mutator(content, chance)
        before = _memory_mb()
        try:
            with _limited():
                read(changed)
            held["read"] += 1
        except typed as error:
            if len(str(error)) > 4000:
                fail("a message that is too long", number)
            held["refused"] += 1
        except _TooLong:
            fail("hang", number)
        except Exception as error:
            told = re.sub("[0-9]+", "N", " ".join(str(error).split()))
            fail(f"{type(error).__name__}: {told[:50]}", number)
        grown = _memory_mb() - before
        if grown > max(_SPARE_MB, 10 * len(changed) / 2**20):
            fail("memory beyond ten times the file", number)
    return failed, held


class _TooLong(BaseException):
    pass


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
