"""Pages that list what can be named in a setting, or read from a file, list all of it."""

import re
from typing import get_args

import pytest
from paths import ROOT

from lm.convert.families import FAMILIES
from lm.data.tasks.labelled import LABELLED
from lm.objectives.corruption import NoiseName
from lm.objectives.denoising import DENOISER_MIXTURES, OBJECTIVES

TABLE, PARAGRAPH = r"(?m)^\|.*$", r"(?ms)^Encoders, GPT and BART answer labelled tasks.*?\n\n"
LISTS = {
    "noise": (get_args(NoiseName), "objectives.md", TABLE),
    "objective": (OBJECTIVES, "objectives.md", TABLE),
    "mixture of denoisers": (DENOISER_MIXTURES, "objectives.md", TABLE),
    "type of published model": (FAMILIES, "families.md", TABLE),
    "task of a head": (LABELLED, "families.md", PARAGRAPH),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_page_that_lists_all_of_a_kind_lacks_none(kind):
    names, page, place = LISTS[kind]
    listed = "\n".join(re.findall(place, (ROOT / "docs" / page).read_text("utf-8")))
    missing = [name for name in names if f"`{name}`" not in listed]
    assert not missing, f"docs/{page} should list each {kind}; it lacks {missing}"
