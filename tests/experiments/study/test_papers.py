"""Papers as files: their numbers agree with each other, every row is built or says what it needs.

What a paper printed is a fact that no run changes: means are recomputed, rows that two tables print are
compared, and models have the parameters that the paper prints.
"""

import json
import math
import re
from statistics import mean

import pytest
from paths import ROOT, SHARED
from small_corpus import prepare
from small_runs import SMALL

from experiments import __main__ as cli
from experiments.plan.compiler import planned_step
from experiments.plan.slices import find_slice
from experiments.processes.progress import reporting
from experiments.report.report import write_report
from experiments.report.text import scores_sheet
from experiments.runs.run import Run
from experiments.study.changes import apply
from experiments.study.claims import claims_to_test, is_tested, published_rows
from experiments.study.papers import clark, glu, jo, lan, liu, narang, sahoo, tay, wang, weller
from experiments.study.registry import (
    REGISTRY,
    TABLES,
    build,
    find_buildable,
    own_changes,
    papers,
    tables_of_paper,
)
from experiments.study.scales import PAPER_SCALE, SCALES
from experiments.study.table import (
    SECOND_HAND,
    UNSURE,
    Column,
    Conclusion,
    Paper,
    Published,
    PublishedScores,
    make_table,
    missing,
)
from lm.config.base import SettingError, check_used, leaves
from lm.nn.presets import PRESETS
from lm.train.flops import costs

PAPERS = papers()
ROWS = [row for group in PAPERS for table in tables_of_paper(group) for row in table.rows]
BUILDABLE = [row for row in ROWS if not row.needs]
# file of ../shared/papers -> the name that begins the tables of the paper here
SHARED_FILES = {
    "clark-2020": "clark",
    "fedus-2021": "fedus",
    "gisserot-2025": "gisserot",
    "jo-2025": "jo",
    "lan-2019": "lan",
    "lewis-2019": "lewis",
    "liu-2019": "liu",
    "narang-2021": "narang",
    "sahoo-2024": "sahoo",
    "shazeer-2020": "glu",
    "tay-2021": "tay",
    "wang-2022": "wang",
    "weller-2025": "weller",
    "wettig-2022": "wettig",
}


def scores(table):
    """Row -> its published scores, of a table."""
    return {row.key: row.published for row in TABLES[table].rows}


# ---- the numbers


@pytest.mark.parametrize(("file", "group"), SHARED_FILES.items())
def test_scores_are_those_that_were_read_in_the_papers(file, group):
    path = SHARED / "papers" / f"{file}.json"
    if not path.exists():
        pytest.skip("needs ../shared")
    theirs = [row for table in json.loads(path.read_text())["tables"] for row in table["rows"]]
    ours = [row for table in tables_of_paper(group) for row in table.rows]
    assert len(theirs) == len(ours)

    def told(row, published, doubts):
        return sorted(published.items()), sorted(column for column in doubts if doubts[column] == UNSURE)

    said = sorted(told(row, row.published, row.doubts) for row in ours)
    assert said == sorted((sorted(row["scores"].items()), sorted(row.get("unsure", ()))) for row in theirs)
    second_hand = sum(SECOND_HAND in row.doubts.values() for row in ours)
    assert second_hand == (len(ours) if group in ("lewis", "weller") else 0)


def test_averages_of_albert_are_those_of_its_five_tasks():
    for table in lan.TABLES:
        for row in published_rows(table):
            of = row.published
            squad = (of["SQuAD1-F1"] + of["SQuAD1-EM"]) / 2, (of["SQuAD2-F1"] + of["SQuAD2-EM"]) / 2
            assert of["AVG"] == pytest.approx(mean((*squad, of["MNLI"], of["SST2"], of["RACE"])), abs=0.0601)


def test_averages_of_four_kinds_of_tasks_are_those_of_their_three_parts():
    parts = {
        "SC": ("SST2", "QQP", "MNLI"),
        "TC": ("OntoNotes", "CoNLL", "UNER"),
        "QA": ("SQuAD", "SQuAD2", "ReCoRD"),
        "IR": ("NQ", "MSMARCO", "MLDR"),
    }
    rows = [row for table in tables_of_paper("gisserot") for row in table.rows]
    assert len(rows) == 50 and all(len(row.published) == len(row.intervals) == 16 for row in rows)
    for row in rows:
        for average, names in parts.items():
            printed = row.published[average]
            assert printed == pytest.approx(mean(row.published[name] for name in names), abs=0.0101)


def test_averages_of_glue_are_those_of_its_tasks():
    for row in TABLES["sahoo/4-glue"].rows:
        parts = [score for name, score in row.published.items() if name != "GLUE"]
        assert len(parts) == 9 and row.published["GLUE"] == pytest.approx(mean(parts), abs=0.011)
    for row in TABLES["clark/2-large"].rows:
        parts = [row.published[name] for name in ("CoLA", "SST", "MRPC", "STS", "QQP", "MNLI", "QNLI", "RTE")]
        assert row.published["GLUE"] == pytest.approx(mean(parts), abs=0.06)
    of = scores("glu/2-glue")["raffel"]
    pairs = [("MRPC-F1", "MRPC-Acc"), ("STSB-P", "STSB-S"), ("QQP-F1", "QQP-Acc"), ("MNLIm", "MNLImm")]
    parts = [of[name] for name in ("CoLA", "SST2", "QNLI", "RTE")]
    assert of["GLUE"] == pytest.approx(mean([*parts, *(mean((of[a], of[b])) for a, b in pairs)]), abs=0.011)


def test_averages_of_glu_variants_lie_below_the_mean_of_their_parts():
    """As printed: presumably those of the best single checkpoint, while each task has its own best."""
    pairs = [("MRPC-F1", "MRPC-Acc"), ("STSB-P", "STSB-S"), ("QQP-F1", "QQP-Acc"), ("MNLIm", "MNLImm")]
    for key, of in scores("glu/2-glue").items():
        parts = [of[name] for name in ("CoLA", "SST2", "QNLI", "RTE")]
        excess = mean([*parts, *(mean((of[a], of[b])) for a, b in pairs)]) - of["GLUE"]
        assert (0.1 < excess < 2.2) == (key != "raffel"), (key, excess)


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        ("wang/3-pretraining", "wang/8-all"),
        ("wang/6-objectives", "wang/8-all"),
        ("wang/7-lm-adaptation", "wang/8-all"),
        ("liu/8-glue", "liu/4-data-and-length"),
        ("weller/7-glue", "weller/3-encoders"),
        ("weller/3-encoders", "weller/9-crossed"),
        ("sahoo/1-lm1b", "sahoo/8-ablation"),
    ],
)
def test_a_row_that_two_tables_print_has_the_same_scores_in_both(part, whole):
    theirs, compared = scores(whole), 0
    for key, of in scores(part).items():
        for column in of.keys() & theirs.get(key, {}).keys():
            assert of[column] == theirs[key][column], (key, column)
            compared += 1
    assert compared or part == "sahoo/1-lm1b"


def test_the_diffusion_papers_print_the_same_perplexities_of_the_models_that_both_quote():
    ours, theirs = scores("jo/2-lm1b"), scores("sahoo/1-lm1b")
    names = {"transformer": "ar-33b", "sedd": "sedd-33b", "mdlm": "mdlm-33b"}
    shared = {key: names.get(key, key) for key in ours if names.get(key, key) in theirs}
    assert len(shared) == 9
    assert all(ours[key]["PPL"] == theirs[name]["PPL"] for key, name in shared.items())
    assert jo.TABLES[1].paper is not sahoo.PAPER


# As printed, in millions, and why the model here has others.
OTHER_PARAMETERS = {
    "lan/2-sizes/albert-xxlarge": "223 here; the text of the paper has 233, its tables 235",
    "narang/2-learned-positions/block-sharing": "0.8 more here: learned positions, which are not printed",
    "narang/2-learned-positions/block-sharing+factorized+shared": "0.8 more here: learned positions",
    "sahoo/1-lm1b/ar-33b": "132 here, of which 23 are an output matrix of its own",
    "sahoo/1-lm1b/ar-327b": "132 here, of which 23 are an output matrix of its own",
    "sahoo/1-lm1b/mdlm-33b": "132 here, of which 23 are an output matrix of its own",
    "sahoo/1-lm1b/mdlm-327b": "132 here, of which 23 are an output matrix of its own",
}


@pytest.mark.slow
def test_models_have_the_parameters_that_the_papers_print():
    """To 1 %, or the printed whole number is ours rounded up or down, heads of pre-training included."""
    counted = [row for row in BUILDABLE if "PARAMS" in row.published]
    assert len(counted) >= 90
    for row in counted:
        printed = row.published["PARAMS"]
        ours = costs(build(row.name, PAPER_SCALE).model, 128).parameters / 1e6
        is_rounded = printed in (math.floor(ours), math.ceil(ours))
        heads = 1.8 if row.table.startswith("lan/") else 0.0  # pooler, and what precedes the output matrix
        is_near = abs(ours - printed) <= max(0.01 * printed, heads)
        assert (is_near or is_rounded) == (row.name not in OTHER_PARAMETERS), (row.name, printed, ours)


# ---- rows


def test_as_many_rows_and_numbers_are_listed_as_the_papers_have():
    found = {group: sum(len(table.rows) for table in tables_of_paper(group)) for group in PAPERS}
    assert found == {
        "t5": 71,
        "liu": 25,
        "lan": 29,
        "lewis": 12,
        "glu": 35,
        "clark": 25,
        "fedus": 27,
        "narang": 107,
        "tay": 42,
        "wettig": 10,
        "wang": 55,
        "sahoo": 38,
        "jo": 27,
        "gisserot": 50,
        "weller": 42,
    }
    assert len([row for row in BUILDABLE if row.published]) >= 330


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_of_every_paper_is_built_at_every_scale_or_refused_by_what_it_needs(scale):
    for row in ROWS:
        if not row.needs:
            build(row.name, scale)
            continue
        with pytest.raises(SettingError, match=r"cannot be built: it needs") as refused:
            build(row.name, scale)
        assert row.needs[0] in str(refused.value)
        assert not row.changes


@pytest.mark.parametrize("name", [table.name for group in PAPERS for table in tables_of_paper(group)])
def test_a_table_is_whole(name):
    """Rows that can be built have a baseline that can be; no setting of a row is one that nothing reads."""
    table = TABLES[name]
    rows = [row for row in table.rows if not row.needs]
    if rows:
        assert not REGISTRY[table.baseline].needs
    for row in rows:
        check_used(build(row.name, table.scale), own_changes(row.name, table.scale))
    experiments = [build(row.name, PAPER_SCALE) for row in rows]
    assert len(set(experiments)) == len(experiments), "no two rows are equal at the paper's own size"


@pytest.mark.parametrize("scale", ["nano", "mini", "small"])
def test_rows_that_are_equal_at_a_small_scale_differ_by_shares_of_few_layers_alone(scale):
    for table in (table for group in PAPERS for table in tables_of_paper(group)):
        seen = {}
        for row in (row for row in table.rows if not row.needs):
            other = seen.setdefault(build(row.name, scale), row)
            if other is not row:
                assert table.name == "tay/released-shapes", (row.name, other.name)
                paths = row.changes.keys() | other.changes.keys()
                differing = {path for path in paths if row.changes.get(path) != other.changes.get(path)}
                assert all("layers" in path for path in differing), (row.name, other.name)


def test_at_scale_base_a_row_has_the_sizes_of_its_paper():
    def shape(name):
        e = build(name, PAPER_SCALE)
        model = e.model
        layers = model.num_decoder_layers if model.has_decoder else model.num_encoder_layers
        return layers, model.d_model, model.mlp.d_ff, model.attention.num_heads, e.pretraining.batch_size

    assert shape("wettig/mask-rate/40") == (24, 1_024, 4_096, 16, 4_096)
    assert shape("wang/3-pretraining/cd-flm-168") == (24, 4_096, 10_240, 64, 2_048)
    assert shape("weller/9-crossed/dec-400m") == (28, 1_024, 2_624, 16, 4_608)
    assert shape("clark/1-small/electra-small") == (12, 256, 1_024, 4, 128)
    assert shape("lan/2-sizes/albert-xlarge") == (24, 2_048, 8_192, 32, 4_096)
    assert shape("tay/released-shapes/small-el16-dl4") == (4, 512, 2_048, 8, 128)
    assert shape("glu/1-perplexity/geglu") == (12, 768, 2_048, 12, 128)
    assert build("clark/1-small/electra-small", PAPER_SCALE).data.inputs_length == 128
    windows = build("weller/9-crossed/enc-17m", PAPER_SCALE).model.sparsity.layer_windows
    assert windows == (None, 64, 64, None, 64, 64, None)
    assert build("weller/9-crossed/enc-17m", "mini").model.sparsity.layer_windows == ()


def test_at_scale_base_a_row_trains_as_its_paper_says():
    def pretraining(name):
        return build(name, PAPER_SCALE).pretraining

    assert pretraining("sahoo/1-lm1b/ar-33b").steps == 500_000
    assert pretraining("sahoo/1-lm1b/mdlm-33b").steps == pretraining("jo/2-lm1b/mdlm").steps == 1_000_000
    assert pretraining("sahoo/1-lm1b/ar-327b").steps == 5_000_000
    assert pretraining("sahoo/1-lm1b/mdlm-327b").steps == 10_000_000
    assert pretraining("sahoo/2-owt/mdlm").steps == 2 * pretraining("sahoo/2-owt/ar").steps
    for name in ("electra-small", "bert-small", "electra-small-25"):
        assert pretraining(f"clark/1-small/{name}").optimizer.learning_rate == 5e-4
    assert pretraining("clark/1-small/electra-base").optimizer.learning_rate == 2e-4
    assert pretraining("liu/8-glue/base").optimizer.warmup_steps == 24_000
    assert pretraining("liu/8-glue/books+wiki").optimizer.warmup_steps == 30_000
    assert pretraining("fedus/3-initial-values/init-1.0").steps == 3_500
    assert build("fedus/3-initial-values/init-1.0", PAPER_SCALE).model.experts.count == 32


def test_mosaic_bert_loses_the_share_of_its_weights_per_update_that_its_optimizer_takes_at_the_peak_rate():
    """Composer's DecoupledAdamW multiplies weights by 1 - 1e-5 at its peak rate, ours by 1 - rate x decay."""
    for row in ("ar", "bert"):
        optimizer = build(f"sahoo/4-glue/{row}", PAPER_SCALE).pretraining.optimizer
        assert optimizer.learning_rate * optimizer.weight_decay == pytest.approx(1e-5)


def test_at_scale_base_the_rate_of_heads_falls_to_0():
    """As BERT's does, and that of all papers that say how encoders are fine-tuned."""
    for row in BUILDABLE:
        e = build(row.name, PAPER_SCALE)
        if e.tuning.heads:
            optimizer = e.finetuning.optimizer
            assert (optimizer.schedule, optimizer.decay_end) == ("linear", 0), row.name


@pytest.mark.parametrize(
    ("row", "warmup", "beta2", "epsilon", "decay", "clip_norm"),
    [
        # BERT's code, and that of ALBERT and ELECTRA
        ("liu/2-format/full-sentences", 0.1, 0.999, 1e-6, 0.01, 1.0),
        ("lan/2-sizes/albert-base", 0.1, 0.999, 1e-6, 0.01, 1.0),
        ("clark/5-efficiency/electra", 0.1, 0.999, 1e-6, 0.01, 1.0),
        # examples/roberta/config/finetuning of fairseq, and finetune_glue.sh of DinkyTrain
        ("liu/4-data-and-length/books+wiki", 0.06, 0.98, 1e-6, 0.1, None),
        ("wettig/mask-rate/40", 0.06, 0.98, 1e-6, 0.1, None),
        # examples/bart/README.glue.md of fairseq
        ("lewis/1-objectives/text-infilling", 0.06, 0.98, 1e-8, 0.01, None),
        # the defaults of transformers
        ("sahoo/4-glue/bert", 0.0, 0.999, 1e-8, 0.0, 1.0),
        # src/evals/glue_jobs.py of ModernBERT, which takes 1e-6 of the weights at the peak rate of 5e-5
        ("weller/9-crossed/enc-150m", 0.06, 0.98, 1e-6, 0.02, None),
    ],
)
def test_at_scale_base_heads_are_tuned_by_the_optimizer_of_the_papers_code(
    row, warmup, beta2, epsilon, decay, clip_norm
):
    stage = build(row, PAPER_SCALE).finetuning
    optimizer = stage.optimizer
    assert optimizer.warmup_steps == warmup * stage.steps
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, beta2, epsilon)
    assert (optimizer.weight_decay, optimizer.clip_norm) == (pytest.approx(decay), clip_norm)


def test_at_scale_base_the_rate_of_every_encoder_with_heads_decays_in_pretraining():
    """Only Ettin's first phase has a constant rate."""
    for row in BUILDABLE:
        e = build(row.name, PAPER_SCALE)
        if e.tuning.heads and not row.name.startswith("weller/"):
            assert e.pretraining.optimizer.decays, row.name


def test_at_scale_base_mosaic_bert_is_trained_by_its_recipe():
    """mosaic-bert-base-uncased.yaml: masks of 30 %, a rate that falls to 2 % of its peak, no clipping."""
    e = build("sahoo/4-glue/bert", PAPER_SCALE)
    assert e.objective.rate == 0.3
    for row in ("bert", "ar"):
        optimizer = build(f"sahoo/4-glue/{row}", PAPER_SCALE).pretraining.optimizer
        assert (optimizer.schedule, optimizer.decay_floor, optimizer.clip_norm) == ("linear", 0.02, None)


@pytest.mark.parametrize("row", ["sahoo/1-lm1b/ar-33b", "sahoo/2-owt/mdlm", "jo/1-text8/mdlm"])
def test_at_scale_base_masked_diffusion_has_the_biases_of_its_code(row):
    """In models/dit.py feed-forward layers and logits have biases, attention and norms have none."""
    model = build(row, PAPER_SCALE).model
    assert model.mlp_has_bias and model.output.bias
    assert not (model.bias or model.qkv_has_bias or model.norm.bias)


def test_at_scale_base_models_drop_out_as_in_the_papers_code():
    """The repository of ALBERT has no dropout in its second version alone; EuroBERT and Ettin have none."""
    for row, dropout in {
        "lan/2-sizes/albert-base": 0.1,
        "lan/8-dropout/dropout": 0.1,
        "gisserot/2-5-masks-610m/mlm-40": 0.0,
        "weller/9-crossed/enc-150m": 0.0,
        "wettig/mask-rate/40": 0.1,
    }.items():
        assert build(row, PAPER_SCALE).model.dropout == dropout, row


def test_at_scale_base_models_of_masks_or_causal_first_have_an_output_matrix_of_their_own():
    """EuroBERT's weights are not tied; the names of sizes count one of the two matrices."""
    for name, millions in {"210m": 210, "610m": 610}.items():
        model = build(f"gisserot/2-5-masks-{name}/mlm-40", PAPER_SCALE).model
        assert model.output.logits == "separate"
        embedding = model.vocab_size * model.d_model / 1e6
        assert costs(model, 128).parameters / 1e6 - embedding == pytest.approx(millions, rel=0.02)


def test_norms_of_models_that_fairseq_trains_have_the_epsilon_of_torch():
    for row in (
        "liu/1-masking/dynamic",
        "liu/8-glue/base",
        "wettig/mask-rate/15",
        "lewis/1-objectives/token-masking",
    ):
        assert build(row, PAPER_SCALE).model.norm.epsilon == 1e-5, row


@pytest.mark.parametrize("size", weller.SIZES)
def test_a_size_of_ettin_trains_by_its_recipe(size):
    path = SHARED / "papers/weller-2025.json"
    if not path.exists():
        pytest.skip("needs ../shared")
    recipe = json.loads(path.read_text())["setup"]["recipe"][size]
    tokens = int(recipe["batch"]) * 1_024
    for kind in ("enc", "dec"):
        optimizer = build(f"weller/9-crossed/{kind}-{size}", PAPER_SCALE).pretraining.optimizer
        assert optimizer.learning_rate == pytest.approx(float(recipe["lr"]))
        # StableAdamW of optimi multiplies weights by 1 - decay at its peak rate, ours by 1 - rate x decay
        share = optimizer.learning_rate * optimizer.weight_decay
        assert share == pytest.approx(float(recipe["weight_decay"]))
        ramp = int(recipe["warmup_tokens"].removesuffix("tok"))
        assert optimizer.warmup_steps * tokens == pytest.approx(ramp, rel=0.01)
    for kind in ("enc-from-dec", "dec-from-enc") if size in weller.CROSSED else ():
        pretraining = build(f"weller/9-crossed/{kind}-{size}", PAPER_SCALE).pretraining
        optimizer = pretraining.optimizer
        assert optimizer.learning_rate == pytest.approx(float(recipe["crossed_lr"]))
        share = optimizer.learning_rate * optimizer.weight_decay
        assert share == pytest.approx(float(recipe["weight_decay"]))
        steps = pretraining.steps - pretraining.phase_ends[0]
        crossed = int(recipe["crossed_tokens"].removesuffix("tok"))
        assert steps * tokens == pytest.approx(crossed, rel=0.01)


@pytest.mark.parametrize("scale", ["mini", PAPER_SCALE])
@pytest.mark.parametrize("size", weller.CROSSED)
def test_a_crossed_model_begins_as_the_other_kind_and_goes_on_at_half_its_rate(size, scale):
    for kind, first in (("enc-from-dec", "dec"), ("dec-from-enc", "enc")):
        row, other = (build(f"weller/9-crossed/{name}-{size}", scale) for name in (kind, first))
        (phase,) = row.pretraining.phases
        assert (phase.optimizer, phase.objective) == (other.pretraining.optimizer, other.objective)
        assert row.pretraining.phase_ends[0] == other.pretraining.steps
        assert row.pretraining.optimizer.learning_rate == phase.optimizer.learning_rate / 2
        told = REGISTRY[f"weller/9-crossed/{kind}-{size}"].derivation
        assert told("pretraining.optimizer.learning_rate") == "", "half of the size's is no multiple"
        assert told("pretraining.steps").startswith("x 1.0")


@pytest.mark.parametrize("scale", SCALES)
def test_a_row_named_by_its_dropout_has_that_at_every_scale(scale):
    def dropout(name):
        model = build(f"fedus/4-expert-dropout/{name}", scale).model
        return model.dropout, model.experts.dropout

    assert dropout("t5-base-d0.1")[0] == 0.1
    assert [dropout(f"switch-d{rate}")[0] for rate in (0.1, 0.2, 0.3)] == [0.1, 0.2, 0.3]
    assert dropout("switch-d0.1-ed0.4") == (0.1, 0.4)


@pytest.mark.parametrize("name", ["enc-150m", "dec-150m"])
def test_ettin_has_the_layers_of_modernbert(name):
    """What differs is of its first phase, whose rows are short, and of this code's vocabularies."""
    modernbert, ettin = (
        dict(leaves(PRESETS["modernbert-base"])),
        build(f"weller/9-crossed/{name}", PAPER_SCALE),
    )
    differing = {path for path, value in leaves(ettin.model) if value != modernbert[path]}
    rotary = {"positions.rotary.base", "positions.rotary.window_base"}
    causal = {"architecture"} if name == "dec-150m" else set()
    ours = {"special.pad", "special.eos", "special.start", "dtype", "dropout"}
    assert differing == rotary | causal | ours and ettin.model.dropout == 0.0


def test_mosaic_bert_has_the_parameters_that_the_paper_prints():
    for row in ("ar", "bert"):
        model = build(f"sahoo/4-glue/{row}", PAPER_SCALE).model
        assert round(costs(model, 128).parameters / 1e6) == 137


def test_no_paper_has_a_privilege():
    """Tables say what concerns them; nothing asks how a name begins."""
    for path in (ROOT / "experiments").rglob("*.py"):
        text = path.read_text("utf-8")
        assert 'startswith("t5' not in text and "startswith('t5" not in text, path
    for group, paper in PAPERS.items():
        assert paper.question.endswith("?") and paper.source, group
        assert paper.noise is not None or all(column.std is None for column in paper.columns), group


# ---- conclusions


def test_a_conclusion_is_in_the_direction_of_the_published_scores():
    """Where a text disagrees with the table's numbers, or a row has none, it is one of these."""
    other = set()
    for table in (table for group in PAPERS for table in tables_of_paper(group)):
        by_key = {row.key: row for row in table.rows}
        for each in (each for each in table.conclusions if each.relation == "better"):
            names = [each.column] if each.column else list(table.columns)
            better, worse = (
                [
                    by_key[key].published.get(name, math.nan)
                    * (1 if table.paper.column(name).higher_is_better else -1)
                    for name in names
                ]
                for key in (each.better, each.worse)
            )
            if not sum(better) >= sum(worse):
                other.add((table.name, each.better, each.worse))
    assert other == set()


def test_a_conclusion_about_a_kind_of_score_that_is_not_compared_is_not_tested():
    table = TABLES["lewis/1-objectives"]
    untested = [each.column for each in table.conclusions if not is_tested(each, table)]
    assert untested == ["ELI5", "XSum", "XSum", "XSum", "CNNDM"]
    narang_table = TABLES["narang/1-modifications"]
    losses = [each for each in narang_table.conclusions if is_tested(each, narang_table)]
    assert {each.column for each in losses} == {"FINAL"}, "held-out loss, as the compared column is"


def test_modifications_are_claimed_against_the_baseline_alone_and_beyond_the_noise_of_five_runs():
    table = TABLES["narang/1-modifications"]
    claims = [claim for claim in claims_to_test(table) if not claim.conclusion]
    assert claims and all(table.baseline in claim.names for claim in claims)
    assert {row.published_runs for row in table.rows} == {5}
    assert narang.PAPER.noise.num_runs == 5 and glu.PAPER.noise.num_runs == 4


# ---- rows that need what is not there


@pytest.fixture
def own_table(restored_registry):
    """A table of a paper with one row that cannot be built, registered."""
    paper = Paper("Own", "Somebody 2026", (Column("F1", "%"), Column("EM", "%", higher_is_better=False)))
    table = make_table(
        "own/1-parts",
        "Parts",
        {"base": {"tuning.mixtures": (), "start.steps": 0}, "experts": missing("mixture of experts")},
        paper=paper,
        columns=["F1"],
        published={
            "base": Published("Base", {"F1": 80.0, "EM": 7.0}),
            "experts": Published("Experts", {"F1": 90.25}, second_hand=True, unsure=("F1",)),
        },
        conclusions=[Conclusion("experts", "base", "experts help")],
    )
    TABLES[table.name] = table
    REGISTRY.update({row.name: row for row in table.rows})
    return table


def test_a_row_that_needs_a_part_is_listed_and_refused_by_its_name(own_table, capsys):
    assert cli.dispatch(["list", "own/*"]) == 0
    listed = capsys.readouterr().out
    assert "needs mixture of experts" in listed and "not run" in listed
    for command in ("run", "sweep", "show"):
        assert cli.dispatch([command, "own/1-parts/experts"]) == 2
        assert "it needs mixture of experts" in " ".join(capsys.readouterr().err.split())
    assert [row.key for row in find_buildable("own/*")] == ["base"]


def test_a_sweep_leaves_out_what_cannot_be_built_and_says_so(own_table, monkeypatch, capsys):
    wanted = []
    monkeypatch.setattr("experiments.cli.sweep.train_unfinished", lambda runs, *_: wanted.extend(runs) or 0)
    monkeypatch.setattr("experiments.report.report.print_report", lambda *_: None)
    assert cli.dispatch(["sweep", "own/1-parts", "--scale", "nano", "--seeds", "1"]) == 0
    assert [run.name for run in wanted] == ["own/1-parts/base"]
    assert "left out: row 'own/1-parts/experts'" in " ".join(capsys.readouterr().out.split())


def test_published_scores_have_to_be_numbers_in_columns_of_the_paper():
    paper = Paper("Own", "Somebody 2026", (Column("F1", "%"),))
    for published, said in (
        (Published("a", {"EM": 1.0}), "has no column 'EM'; did you mean|has no column 'EM'"),
        (Published("a", {"F1": "90"}), "its score in F1 is '90', which should be a number"),
        (Published("a", {"F1": float("nan")}), "its score in F1 is nan, which should be a number"),
        (Published("a", {"F1": 1.0}, runs=0), "runs=0 of its paper should be at least 1"),
    ):
        with pytest.raises(SettingError, match=said):
            make_table("own", "", {"a": {}}, paper=paper, published={"a": published})
    with pytest.raises(SettingError, match="should say what a row needs"):
        missing()
    for std in (0.0, -1.0):
        with pytest.raises(SettingError, match=f"column 'F1': std={std} should be above 0"):
            Column("F1", "%", std)


def test_a_table_finds_its_scores_by_its_name_and_its_baseline_among_its_rows(tmp_path):
    file = tmp_path / "own_scores.json"
    row = {"label": "B", "scores": {"F1": 1.5}, "unsure": ["F1"]}
    file.write_text(json.dumps({"columns": {"F1": {"unit": "%"}}, "tables": {"own/1": {"b": row}}}))
    scores = PublishedScores(file)
    paper = Paper("Own", "Somebody 2026", scores.columns)
    rows = {"a": {}, "b": {}}
    table = make_table("own/1", "", rows, baseline="b", paper=paper, published=scores)
    assert table.baseline == "own/1/b"
    assert [(row.published, row.doubts) for row in table.rows] == [({}, {}), ({"F1": 1.5}, {"F1": "unsure"})]
    assert make_table("own/2", "", rows, baseline="own/1/b").baseline == "own/1/b"
    with pytest.raises(SettingError, match="no published scores of table 'own/2'; did you mean 'own/1'"):
        make_table("own/2", "", rows, paper=paper, published=scores)


# ---- training


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    """A folder of runs whose cache holds a small documentation corpus."""
    folder = tmp_path_factory.mktemp("papers")
    prepare(folder / "cache")
    return folder


def test_the_report_has_the_published_scores_of_a_row_that_cannot_be_built(
    own_table, small_corpus, monkeypatch
):
    monkeypatch.setitem(SCALES, "tiny", SMALL)
    experiment = build("own/1-parts/base", "tiny")
    folder = small_corpus / "tiny/own/1-parts/base/seed-0"
    with reporting(experiment.pretraining.steps, quiet=True) as reporter:
        Run(experiment, folder, small_corpus / "cache").train(reporter)
    made = write_report([own_table], "tiny", small_corpus)
    sheet = scores_sheet(made.tables["own/1-parts"].comparison)
    texts = {head: [cell.text for cell in cells] for head, cells in sheet.items()}
    assert texts["seeds"] == ["1", "not run: needs mixture of experts"]
    assert [text.split("\N{NO-BREAK SPACE}")[0] for text in texts["paper's F1"]] == ["80.00", "90.25?"]
    assert "90.25?" in made.path.read_text()


TEN_STEPS = {
    "start.steps": 0,
    "pretraining.steps": 10,
    "pretraining.save_every": 10,
    "pretraining.evaluate_every": 0,
    "finetuning.steps": 0,
    "tuning.branches": (1.0,),
    "pretraining.batch_size": 8,
    "tuning.mixtures": (),
    "tuning.heads": (),
}


@pytest.fixture(scope="module")
def trained():
    """The experiments that were trained here, since rows may differ in what ten steps do not show."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("row", BUILDABLE, ids=lambda row: row.name)
def test_every_row_trains_ten_steps_at_nano(row, small_corpus, trained):
    experiment = build(row.name, "nano")
    if not experiment.pretraining.steps or experiment.mixing.pretraining != "corpus":
        pytest.skip("it is not pre-trained on the corpus alone")
    short = apply(experiment, TEN_STEPS | _small_corpus(experiment))
    if short in trained:
        pytest.skip("it differs from a row before in what ten steps do not show")
    trained.add(short)
    run = Run(short, small_corpus / "nano" / row.name / "seed-0", small_corpus / "cache")
    with reporting(short.pretraining.steps, quiet=True) as reporter:
        run.train(reporter)
    assert run.result.held_out_loss is not None and math.isfinite(run.result.held_out_loss)


def _small_corpus(experiment):
    """The change to the text of the installed packages, of which a small part is prepared here."""
    corpora = experiment.data.corpus.split(" + ")
    if all(name.startswith("documentation") for name in corpora):
        return {
            "data.corpus": "documentation/installed",
            "data.vocabulary": experiment.data.vocabulary.partition(":")[0],
        }
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("group", PAPERS)
def test_every_row_is_planned_at_the_size_of_its_paper(group):
    for row in (row for table in tables_of_paper(group) for row in table.rows if not row.needs):
        experiment = build(row.name, PAPER_SCALE)
        if experiment.pretraining.steps:
            step = planned_step(experiment, find_slice("v5p:4x4x4", experiment.mesh.slice))
            assert step.flops(experiment.pretraining.batch_size, step.lengths) > 1e12, row.name


def test_settings_of_a_setup_are_those_that_its_rows_may_change():
    for table in (*clark.TABLES, *liu.TABLES, *tay.TABLES, *wang.TABLES, *weller.TABLES):
        paths = {path for path, _ in leaves(build(table.baseline, PAPER_SCALE))}
        for changes in (table.setup.changes, table.setup.at_base):
            assert all(path in paths or path == "objective" for path in changes), table.name


def test_the_pages_of_the_papers_are_those_that_the_tables_make(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from paper_pages import outdated

    assert outdated() == [], "make the pages anew: python docs/paper_pages.py"


def test_no_zero_on_a_page_has_a_sign():
    pages = {path.name: path.read_text() for path in (ROOT / "docs/papers").glob("*.md")}
    assert {name for name, page in pages.items() if re.search(r"[-+]0\.00 ±", page)} == set()
    assert any("| 0.00 ±" in page for page in pages.values())


def test_every_module_of_a_paper_is_registered_and_its_page_is_in_the_navigation_of_the_site():
    files = (ROOT / "experiments/study/papers").glob("*.py")
    modules = {file.stem for file in files if re.search("(?m)^PAPER = ", file.read_text("utf-8"))}
    assert modules == PAPERS.keys()
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [name for name in modules if f" papers/{name}.md\n" not in navigation] == []


def test_the_readme_has_the_number_of_papers():
    others = {14: "fourteen", 15: "fifteen", 16: "sixteen"}[len(PAPERS) - 1]
    assert f"and {others} others are" in (ROOT / "README.md").read_text("utf-8")
