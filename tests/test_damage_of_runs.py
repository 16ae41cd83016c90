"""A small file that was changed since it was written is named; what it said is not believed."""

import json
from pathlib import Path

import numpy as np
import pytest

from lm.config import SettingError
from lm.files import seal, seal_line, unseal, unseal_lines

VALUE = {"name": "ä\n\u2028", "numbers": [1, -0.0, 1e308, None, True], "in": {"deep": {}}, "steps": {1: 2, 10: 3, 2: 4}}
PATH = Path("folder/file.json")
HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a": ' + b"9" * 5000 + b"}",
    b"\xff\xfe",
    b"\0",
]


def lines(count: int) -> list[bytes]:
    made, before = [], ""
    for step in range(count):
        line, before = seal_line({"step": step, "loss": step / 7}, before)
        made.append(line.encode())
    return made


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit is another, or one digit."""
    if rng.random() < 0.5:
        place = int(rng.integers(len(data)))
        return data[:place] + bytes([data[place] ^ 1 << int(rng.integers(8))]) + data[place + 1 :]
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    place = int(rng.choice(digits))
    other = (data[place] - 48 + int(rng.integers(1, 10))) % 10 + 48
    return data[:place] + bytes([other]) + data[place + 1 :]


def test_what_is_sealed_comes_back_and_no_change_of_it_passes():
    text = seal(VALUE).encode()
    whole = json.loads(json.dumps(VALUE))
    assert unseal(text, PATH) == whole
    assert unseal(json.dumps(json.loads(text)).encode(), PATH) == whole, "laid out otherwise it says the same"
    rng = np.random.default_rng(0)
    for _ in range(500):
        try:
            assert json.dumps(unseal(damaged(text, rng), PATH)) == json.dumps(whole)
        except SettingError as error:
            assert str(PATH) in str(error) and "put back" in str(error)


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:8]))
def test_a_hostile_file_is_one_error_that_names_it(data):
    for read in (unseal, unseal_lines):
        if data not in (b"", b"\0") or read is unseal:
            with pytest.raises(SettingError, match="folder/file.json"):
                read(data if read is unseal else data + b"\n", PATH)


def test_of_lines_a_lost_one_a_moved_one_and_a_changed_one_are_named():
    made = lines(5)
    assert [each["step"] for each in unseal_lines(b"".join(made), PATH)] == [0, 1, 2, 3, 4]
    for place in range(4):
        with pytest.raises(SettingError, match=rf"line {place + 1} of 4"):
            unseal_lines(b"".join(made[:place] + made[place + 1 :]), PATH)
        with pytest.raises(SettingError, match=rf"line {place + 1} of 5"):
            unseal_lines(b"".join([*made[:place], made[place + 1], made[place], *made[place + 2 :]]), PATH)


def test_a_last_line_that_a_kill_cut_short_is_legal_and_one_that_was_changed_is_not():
    *whole, last = lines(3)
    for end in range(len(last)):
        found = unseal_lines(b"".join(whole) + last[:end] + b"\0" * (end % 3), PATH)
        assert len(found) == (3 if end == len(last) - 1 else 2)
    for wrong in (last[:-1] + b"\x0b", last[:-3] + b'0"}\n', last[:40] + b"\n"):
        with pytest.raises(SettingError, match="line 3 of 3"):
            unseal_lines(b"".join(whole) + wrong, PATH)
