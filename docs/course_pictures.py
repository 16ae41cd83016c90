"""Draw the pictures of docs/course.md: each command that a picture follows, with that picture as ``--out``.

It needs ``lm data course`` in the same folder. With ``pack NAME RUN`` it makes the file of a model that comes
along, experiments/course/NAME.npz.
The five runs were trained on the built-in text by these commands, each with ``--finetuning.steps 0``:

    lm run gpt/base --scale mini --pretraining.steps 6000
    lm run gpt/base --scale nano --model.mixer.kind lstm --model.positions.kind none --pretraining.steps 8000
    lm run bart/base --scale nano --model.mixer.kind lstm --model.positions.kind none --pretraining.steps 6000
    lm run bert/base --scale nano --pretraining.steps 10000
    lm run t5/1-baseline/baseline --scale nano --pretraining.steps 8000
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image

from experiments.runs.packed import pack_model

ROOT = Path(__file__).parents[1]
COLORS = 96  # of a picture, which makes a third of the bytes
PICTURE = re.compile(r"^    (lm draw .*)\n\n!\[.*\]\((pictures/.*\.png)\)$", re.MULTILINE)


def draw_page(page: Path) -> None:
    """Draw the pictures of a page, below the folder of runs that its commands name."""
    for command, picture in PICTURE.findall(page.read_text("utf-8")):
        print(command)
        place = page.parent / picture
        words = [*shlex.split(command)[1:], "--out", str(place)]
        subprocess.run([sys.executable, "-m", "experiments", *words], check=True)
        with Image.open(place) as drawn:
            smaller = drawn.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        smaller.save(place, optimize=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["pack"]:
        pack_model(Path(sys.argv[3]), ROOT / "experiments" / "course" / f"{sys.argv[2]}.npz")
    else:
        draw_page(ROOT / "docs" / "course.md")
