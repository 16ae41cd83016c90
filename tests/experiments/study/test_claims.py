"""Claims follow from published scores and their noise in any table; a replication would find most of them."""

from dataclasses import replace

import pytest

from experiments.study.claims import (
    claims_to_test,
    contradicted_conclusions,
    simulate_replication,
    standardized,
)
from experiments.study.papers import t5
from experiments.study.registry import TABLES
from experiments.study.table import Column, Conclusion, Paper, Published, make_table
from lm.config.base import SettingError

T5 = t5.TABLES
PAIRS = {"2": (42, 45), "4": (3, 3), "5": (4, 6), "6": (4, 6), "7": (6, 10), "9": (9, 10), "10": (15, 15)}
PAIRS |= {"11": (52, 55), "12": (9, 10), "13": (18, 21)}


def test_the_paper_claims_the_pairs_that_its_noise_tells_apart_in_the_direction_of_its_scores():
    for table in T5:
        number, listed = table.name.split("/")[1].split("-")[0], claims_to_test(table)
        if number in PAIRS:
            count = len(table.rows) * (len(table.rows) - 1) // 2
            assert (len(listed), count) == PAIRS[number], table.name
    (claim,) = claims_to_test(TABLES["t5/1-baseline"])
    assert (claim.better.name, claim.worse.name) == ("t5/1-baseline/baseline", "t5/1-baseline/no-pretraining")
    assert claim.conclusion == "pre-training helps" and claim.z > 50
    assert claims_to_test(TABLES["t5/8-data"]) == claims_to_test(TABLES["bert"]) == ()


def test_every_conclusion_is_one_of_the_claims():
    for table in T5:
        named = {claim.conclusion for claim in claims_to_test(table)} - {""}
        assert named == {conclusion.text for conclusion in table.conclusions}, table.name


def test_a_repeat_of_the_paper_confirms_nearly_all_that_is_clear_and_contradicts_nothing():
    clear, close = (
        simulate_replication(TABLES[f"t5/{name}"]) for name in ("10-fine-tuning", "7-span-length")
    )
    assert clear.confirmed == pytest.approx(15, abs=0.1)
    assert sum(close) == pytest.approx(6) and close.contradicted < 0.01
    assert close.confirmed == pytest.approx(4.7, abs=0.1), "the baseline is a mean of ten runs"


PAPER = Paper("Own", "Somebody 2026", (Column("accuracy", "%", 1.0), Column("perplexity", "", 2.0, False)))
SCORES = {
    "best": Published("best", {"accuracy": 60.0, "perplexity": 10.0}),
    "worse": Published("worse", {"accuracy": 59.0, "perplexity": 20.0}),
    "also-worse": Published("also worse", {"accuracy": 54.0, "perplexity": 11.0}),
}
SAID = [Conclusion("best", "worse", "perplexity counts"), Conclusion("ours", "best", "ours is better")]


def own_table(paper):
    rows = dict.fromkeys([*SCORES, "ours"], {})
    published = SCORES if paper else {}
    return make_table("own", "", rows, paper=paper, published=published, conclusions=SAID)


def pairs(table):
    return {(claim.better.key, claim.worse.key): claim.conclusion for claim in claims_to_test(table)}


def test_any_table_whose_paper_gives_its_noise_has_the_claims_of_its_published_rows_and_its_conclusions():
    assert pairs(own_table(PAPER)) == {
        ("best", "worse"): "perplexity counts",
        ("best", "also-worse"): "",
        ("ours", "best"): "ours is better",
    }
    assert sum(simulate_replication(own_table(PAPER))) == pytest.approx(2)


def test_a_conclusion_about_a_half_of_the_tasks_stays_so_where_the_papers_noise_tells_its_rows_apart():
    said = replace(SAID[0], tasks="language")
    table = replace(own_table(PAPER), conclusions=(said, SAID[1]))
    (claim,) = (each for each in claims_to_test(table) if each.conclusion == said.text)
    assert (claim.tasks, claim.z is None) == ("language", False)


@pytest.mark.parametrize("paper", [PAPER, None], ids=["with noise", "without"])
def test_conclusions_about_each_half_of_the_tasks_are_two_claims_on_one_pair(paper):
    halves = [replace(SAID[0], tasks=half, text=f"better at {half}") for half in ("reading", "language")]
    table = replace(own_table(paper), conclusions=tuple(halves))
    claims = [claim for claim in claims_to_test(table) if claim.conclusion]
    assert [(claim.tasks, claim.conclusion) for claim in claims] == [
        ("reading", "better at reading"),
        ("language", "better at language"),
    ]
    assert {claim.pair for claim in claims} == {"best > worse"}
    assert {claim.z is None for claim in claims} == {paper is None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"conclusions": [replace(SAID[0], tasks="readng")]}, "tasks='readng' should be 'reading'"),
        ({"conclusions": [replace(SAID[0], relation="worse")]}, "relation='worse' should be 'better'"),
        ({"conclusions": [replace(SAID[0], worse="best")]}, "a conclusion compares 'best' with itself"),
        ({"conclusions": SAID[:1] * 2}, "the conclusion 'perplexity counts' is given twice"),
        ({"pairs": "with_baseline"}, "pairs='with_baseline' should be one of"),
    ],
)
def test_a_table_with_a_word_that_is_no_choice_is_refused(given, words):
    with pytest.raises(SettingError, match=words):
        make_table("own", "", dict.fromkeys([*SCORES, "ours"], {}), **given)


def test_less_is_better_in_a_column_that_says_so():
    scores = {
        row.key: standardized(row, own_table(PAPER)).tolist()
        for row in own_table(PAPER).rows
        if row.published
    }
    assert scores["best"] == [60.0, -5.0] and scores["worse"] == [59.0, -10.0]


@pytest.mark.parametrize("paper", [None, replace(PAPER, columns=(Column("accuracy", "%"), PAPER.columns[1]))])
def test_without_published_noise_the_claims_are_the_conclusions(paper):
    table = own_table(paper)
    assert pairs(table) == {(each.better, each.worse): each.text for each in SAID}
    assert {claim.z for claim in claims_to_test(table)} == {None} and not any(simulate_replication(table))


def test_a_table_with_some_of_its_rows_has_the_claims_about_those():
    table = own_table(None)
    assert pairs(replace(table, rows=table.rows[1:])) == {}


def test_nothing_is_claimed_where_other_data_replace_those_of_the_paper():
    assert claims_to_test(replace(own_table(PAPER), surrogate_data=True)) == ()


def test_less_is_better_in_a_held_out_column_unless_it_says_otherwise():
    """A negative log perplexity is a held-out column of which more is better."""
    assert not Column("PPL", "perplexity", held_out=True).higher_is_better
    assert Column("LOGPERP", "negative nats/token", held_out=True, higher_is_better=True).higher_is_better
    assert Column("accuracy", "%").higher_is_better


def perplexities(conclusion, **column):
    paper = Paper("Own", "Somebody 2026", (Column("PPL", "perplexity", **column),))
    published = {key: Published(key, {"PPL": score}) for key, score in {"a": 19.7, "b": 20.1}.items()}
    rows = dict.fromkeys(published, {})
    return make_table("own", "", rows, paper=paper, published=published, conclusions=[conclusion])


def test_the_better_row_of_a_conclusion_about_a_loss_is_the_one_with_less():
    (claim,) = claims_to_test(perplexities(Conclusion("a", "b", "a is better"), std=0.1, held_out=True))
    assert claim.better.key == "a" and claim.conclusion == "a is better"


def test_a_conclusion_that_the_published_scores_contradict_beyond_their_noise_is_told_with_the_mend():
    said = Conclusion("a", "b", "a is better")
    (note,) = contradicted_conclusions(perplexities(said, std=0.1))
    assert "a > b" in note and "z = -2.8" in note and "higher_is_better=False" in note
    (note,) = contradicted_conclusions(perplexities(replace(said, column="PPL"), std=0.1))
    assert "z = -2.8" in note and "in PPL" in note
    for table in (
        perplexities(said, std=0.1, held_out=True),  # the scores say the same
        perplexities(said, std=0.3),  # within noise
        perplexities(said),  # noise unknown
        perplexities(replace(said, relation="equivalent"), std=0.1),
    ):
        assert contradicted_conclusions(table) == []


def test_no_conclusion_of_a_paper_is_contradicted_by_its_published_scores():
    assert [note for table in TABLES.values() for note in contradicted_conclusions(table)] == []
