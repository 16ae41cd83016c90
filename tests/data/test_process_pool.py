"""Pools of processes: what a script is told whose processes cannot import it."""

import subprocess
import sys

import pytest

USE = """from lm.data.corpus.process_pool import process_pool

if {guard}:
    with process_pool(1) as pool:
        print(pool.submit(sum, [1, 2]).result())
"""


def run(arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("place", ["a file without the guard", "the standard input"])
def test_a_script_that_a_process_cannot_import_is_told_how_to_write_it(place, tmp_path):
    script = tmp_path / "script.py"
    if place == "the standard input":
        ended = run(["-"], input=USE.format(guard="__name__ == '__main__'"))
    else:
        script.write_text(USE.format(guard="True"))
        ended = run([script])
    assert ended.returncode != 0 and not ended.stdout
    mend = 'keep the script in a file, and put what it does below `if __name__ == "__main__":`'
    assert "SettingError: a process" in ended.stderr and mend in ended.stderr
    script.write_text(USE.format(guard="__name__ == '__main__'"))
    assert run([script]).stdout == "3\n"


def test_after_an_error_what_has_not_begun_is_left_out(tmp_path):
    script = tmp_path / "script.py"
    lines = [
        "import time",
        "from pathlib import Path",
        "from lm.data.corpus.process_pool import process_pool",
    ]
    lines += ['if __name__ == "__main__":', "    with process_pool(1) as pool:"]
    lines += ["        jobs = [pool.submit(time.sleep, 0.1)]"]
    lines += [f"        jobs += [pool.submit(Path({str(tmp_path)!r}, str(n)).touch) for n in range(50)]"]
    lines += ["        raise ValueError"]
    script.write_text("\n".join(lines))
    ended = run([script])
    assert ended.stderr.splitlines()[-1] == "ValueError"
    assert len([*tmp_path.iterdir()]) < 10
