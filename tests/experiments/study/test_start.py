"""The start is no row of a table of a paper, and the table of the start tells it from pre-training."""

import pytest

from experiments.runs.stages import stages
from experiments.study import registry, start
from experiments.study.claims import claims_to_test
from experiments.study.papers import t5
from experiments.study.registry import REGISTRY, TABLES, build, check_row, equal_rows
from experiments.study.scales import SCALES

WITH_START = [scale for scale in SCALES if build(t5.BASELINE_ROW, scale).start.steps]


def test_no_row_of_a_paper_pretrains_by_the_objective_of_the_start():
    assert WITH_START == ["nano", "mini", "mini-real", "small"]
    rows = [row.name for table in t5.TABLES for row in table.rows]
    for scale in WITH_START:
        by_start = build(t5.BASELINE_ROW, scale).start.objective
        assert by_start == start.COPYING
        assert all(build(row, scale).objective != by_start for row in rows)


@pytest.mark.parametrize("scale", WITH_START)
def test_the_start_alone_is_the_very_checkpoint_that_other_rows_go_on_from(scale):
    for seed in (0, 1):
        alone, *tuned = stages(build(start.START_ONLY_ROW, scale, {"seed": seed}))
        shared, *_ = stages(build(t5.BASELINE_ROW, scale, {"seed": seed}))
        assert shared.is_start_pretraining and not alone.is_start_pretraining
        assert (alone.folder, alone.training.steps) == (shared.folder, shared.training.steps)
        assert alone.relevant_settings == shared.relevant_settings
        assert tuned and all(stage.parent == alone for stage in tuned)


@pytest.mark.parametrize("scale", WITH_START)
def test_the_rows_of_the_start_share_runs_with_table_1(scale):
    assert t5.BASELINE_ROW in equal_rows("start/baseline", scale)
    assert "t5/1-baseline/no-pretraining" in equal_rows("start/no-pretraining", scale)


def test_the_rows_of_the_start_have_both_parts_of_training_or_one_or_none():
    names = {row.key: [stage.name for stage in stages(build(row.name, "mini"))] for row in rows()}
    parts = {key: [name for name in found if "documentation" not in name] for key, found in names.items()}
    assert parts == {
        "baseline": ["start", "pretraining"],
        "start-only": ["pretraining"],
        "no-start": ["pretraining"],
        "no-pretraining": [],
        "bert-style": ["start", "pretraining"],
    }


@pytest.mark.parametrize("scale", SCALES)
def test_where_a_scale_has_no_start_the_table_gives_it_one(scale):
    for row in rows():
        check_row(row.name, scale)
    steps = build("start/baseline", scale).start.steps
    assert steps == (build(t5.BASELINE_ROW, scale).start.steps or 200)
    assert build(start.START_ONLY_ROW, scale).pretraining.steps == steps


def test_its_hypotheses_are_the_claims_that_a_report_tests():
    claims = [(claim.better.key, claim.worse.key) for claim in claims_to_test(TABLES["start"])]
    assert ("baseline", "start-only") in claims and len(claims) == len(TABLES["start"].conclusions)
    assert REGISTRY[start.START_ONLY_ROW] in TABLES["start"].rows
    assert registry.baseline_of(start.START_ONLY_ROW) == "start/baseline"


def rows():
    return TABLES["start"].rows
