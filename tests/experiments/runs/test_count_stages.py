"""Runs of counts: n-grams and taggers as stages, scored by what networks are scored by."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import feeding
import numpy as np
import pytest
import small_corpus
from commands import unboxed
from tiny import TINY
from variants import with_quick

from experiments import __main__ as cli
from experiments.cli.doctor import find_damage
from experiments.cli.run_summary import suggestions
from experiments.figures import model_inspection
from experiments.plan.plans import PlanOptions, show_plans
from experiments.report.text import bound_sign
from experiments.runs.checks import check_counts, check_held_out_documents, tasks_from_files
from experiments.runs.inputs import training_streams
from experiments.runs.kinds.counts import COUNT_STAGES, Ngrams
from experiments.runs.kinds.pretraining import pretraining_batches
from experiments.runs.paths import COUNTS_FILE
from experiments.runs.prepare import prepare
from experiments.runs.result import read_result
from experiments.runs.run import Run
from experiments.runs.stages import stages, stages_of
from experiments.runs.status import saved_steps
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.classical.hmm import tag_words
from lm.classical.ngram import count_ngrams, estimate_kneser_ney, next_token_probs, token_log_probs
from lm.config.base import DataError, SettingError, change
from lm.data.documentation import corpus
from lm.data.tasks.labelled import find_labelled
from lm.files import matches_checksum
from lm.tokenizers.tokenizer import EOS
from lm.train.runtime.records import records

BIGRAM, NETWORK, TAGGER = "history/bigram", "history/rnn", "tagging/hmm-beam"
DIFFUSION = "now/4-diffusion/masked-diffusion"
SMALL = (
    SCALES["nano"] | TINY | {"pretraining.steps": 2, "finetuning.steps": 1, "pretraining.evaluate_every": 1}
)
QUIET = SimpleNamespace(
    say=print,
    complain=print,
    **dict.fromkeys(("start", "resumed", "advance", "first_step_done"), lambda *_: None),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs whose cache holds a small documentation corpus; and a scale ``tiny``."""
    folder = tmp_path_factory.mktemp("runs")
    small_corpus.prepare(folder / "cache")
    corpus.prepare_sets(folder / "cache", name="roles", packages=["asyncio", "email", "json"])
    SCALES["tiny"] = SMALL
    yield folder
    del SCALES["tiny"]


def finish(runs, name, folder="first", changes=None):
    """The folder of a run of a row, and its result."""
    path = runs / "tiny" / folder / name / "seed-0"
    Run(build(name, "tiny", changes), path, runs / "cache").train(QUIET)
    return path, read_result(path)


@pytest.fixture(scope="module")
def finished(runs):
    return {name: finish(runs, name) for name in (BIGRAM, NETWORK, TAGGER)}


def prepared_of(runs, name):
    experiment = build(name, "tiny")
    return experiment, prepare(experiment, runs / "cache", print)


def texts_of(runs, split):
    """The documents of the corpus as ids, an EOS behind each."""
    experiment, prepared = prepared_of(runs, BIGRAM)
    texts = feeding.documents(experiment.data.corpus, split, runs / "cache")
    return [[*prepared.vocabulary.encode(text), EOS] for text in texts]


def joined(texts):
    return np.concatenate([np.array(text) for text in texts]), np.cumsum([0, *map(len, texts)])


@pytest.mark.slow
def test_a_bigram_run_is_scored_as_counts_of_the_same_documents_are(runs, finished):
    changes = {"data.repeats": 0, "data.held_out_documents": 10_000}
    _, result = finish(runs, BIGRAM, "whole", changes)
    model = estimate_kneser_ney(count_ngrams(*joined(texts_of(runs, "train")), 2, SMALL["model.vocab_size"]))
    held_out = texts_of(runs, "validation")
    nats = -token_log_probs(model, *joined(held_out)).sum()
    assert result.likelihood().nats == pytest.approx(nats, rel=1e-9)
    assert result.likelihood().tokens == sum(map(len, held_out))
    assert result.parameters == sum(map(len, (*model.probs, *model.backoffs)))


def epoch_of(batches):
    """The tokens of the rows of the first epoch of each stream."""
    reader, read = batches.row_source.reader, []
    share = reader.batch_size // reader.sampler.num_streams
    for stream in range(reader.sampler.num_streams):
        index = reader.row_index(stream, batches.row_source.count_rows, batches.row_source.row_index_key)
        nth = np.arange(index.count_epoch_rows(10**6))
        rows = batches.row_source(nth // share * reader.batch_size + stream * share + nth % share)
        read.append(rows.decoder.targets[rows.decoder.segment_ids > 0])
    return np.concatenate(read)


def test_counts_and_networks_read_the_same_tokens(runs):
    experiment, prepared = prepared_of(runs, NETWORK)
    batches = pretraining_batches(experiment, prepared, "train")
    read = epoch_of(batches)
    (stage,) = stages(build(BIGRAM, "tiny"))
    _, counted_tokens = stage.estimate(prepared)
    streams = training_streams(experiment, prepared)
    text = streams.read_epoch()
    sizes = np.bincount(text.tokens, minlength=512)
    found = np.bincount(read, minlength=512)
    assert np.delete(found, EOS).tolist() == np.delete(sizes, EOS).tolist()
    ends = len(np.unique(text.offsets)) - 1
    assert counted_tokens == len(text.tokens) + ends
    assert 0 <= ends - found[EOS] <= streams.num_streams  # whose last documents are cut


def test_networks_and_counts_are_asked_about_the_same_held_out_text(finished):
    (_, bigram), (_, network) = finished[BIGRAM], finished[NETWORK]
    assert bigram.likelihood()[1:] == network.likelihood()[1:] and bigram.likelihood().tokens > 1_000
    assert len(bigram.likelihoods) == 1 < len(network.likelihoods)
    assert not network.tasks and not bigram.tasks


@pytest.mark.slow
def test_masked_diffusion_is_asked_about_the_same_text_and_its_bound_says_how_sure_it_is(runs, finished):
    path, result = finish(runs, DIFFUSION)
    bound, (_, bigram) = result.likelihood(), finished[BIGRAM]
    assert bound[1:4] == bigram.likelihood()[1:4]
    assert bigram.likelihood().variance is None and bigram.likelihood().bits_per_byte_interval == 0
    assert 0 < bound.bits_per_byte_interval < 0.05 * bound.bits_per_byte
    assert bound_sign([result]) == "≤" and bound_sign([bigram]) == ""
    # an untrained model predicts evenly
    assert bound.nats / bound.tokens == pytest.approx(np.log(SMALL["model.vocab_size"]), rel=0.1)
    first, last = result.likelihoods[0]["variance"], result.likelihoods[-1]["variance"]
    assert 3 * last < first  # from more sets of masks
    (stage,) = stages_of(path)
    evaluations = [line for line in records(stage.folder) if line["kind"] == "eval"]
    per_token = bound.nats / bound.tokens
    assert evaluations[-1]["loss"] == pytest.approx(per_token, rel=0.1)  # held-out loss is a bound as well


def test_the_likelihood_after_some_time_is_that_of_the_evaluation_then_and_lies_between_two(finished):
    _, network = finished[NETWORK]
    times, nats = ([each[name] for each in network.likelihoods] for name in ("seconds", "nats"))
    assert times == sorted(times) and times[-1] == pytest.approx(network.seconds)
    assert [network.likelihood(seconds).nats for seconds in times] == pytest.approx(nats, rel=1e-9)
    between = network.likelihood((times[0] * times[1]) ** 0.5).nats
    assert between == pytest.approx((nats[0] + nats[1]) / 2)
    assert network.likelihood().nats == nats[-1] and network.likelihood(times[0] / 2) is None


@pytest.mark.parametrize("damage", [{"likelihoods": [{"step": 1}]}, {"parameters": -1}])
def test_a_result_with_impossible_likelihoods_does_not_count(finished, damage):
    with pytest.raises(SettingError, match=next(iter(damage))):
        replace(finished[BIGRAM][1], **damage)


@pytest.mark.parametrize(
    ("name", "step"), [(BIGRAM, "estimate"), (BIGRAM, "save"), (BIGRAM, "evaluate"), (TAGGER, "evaluate")]
)
def test_interrupted_counting_ends_as_uninterrupted_counting(runs, finished, monkeypatch, name, step):
    kind = COUNT_STAGES[build(name, "tiny").counts.model]
    whole_step = getattr(kind, step)

    def interrupted(*arguments):
        whole_step(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(runs, name, step)
    path, result = finish(runs, name, step)
    whole_path, whole = finished[name]
    (stage,), (whole_stage,) = stages_of(path), stages_of(whole_path)
    assert (stage.folder / COUNTS_FILE).read_bytes() == (whole_stage.folder / COUNTS_FILE).read_bytes()
    assert result.tasks == whole.tasks and result.likelihood() == whole.likelihood()
    assert [line["step"] for line in records(stage.folder)] == [1, 1]


def test_what_was_counted_is_not_counted_again(runs, finished, monkeypatch):
    monkeypatch.setattr(Ngrams, "estimate", None)
    assert finish(runs, BIGRAM)[1] == finished[BIGRAM][1]


@pytest.mark.parametrize(
    "tagging", with_quick(("greedy", "viterbi"), ["most-frequent", "greedy", "beam", "viterbi"])
)
def test_a_tagger_run_scores_the_report_rows_as_its_model_tags_them(runs, finished, tagging):
    path, result = finish(runs, TAGGER, tagging, {"counts.tagging": tagging})
    (stage,), (_, prepared) = stages_of(path), prepared_of(runs, TAGGER)
    model, task = stage.model(), find_labelled("roles")
    rows = stage.scored_rows(task, "report", prepared)
    widths = {"greedy": 1, "beam": 4, "viterbi": len(model.tags)}
    words = [row["tokens"] for row in rows]
    tags = [
        tag_words(model, text, widths[tagging]) if tagging in widths else model.most_frequent_tags(text)
        for text in words
    ]
    right = sum(
        task.labels[k] == x
        for row, t in zip(rows, tags, strict=True)
        for k, x in zip(row["roles"], t, strict=True)
    )
    assert len(rows) == SMALL["tuning.report_examples"]
    assert result.tasks["roles"]["score"] == pytest.approx(100 * right / sum(map(len, words)))
    assert (stage.folder / "predictions" / "roles" / "1.jsonl").exists()


def test_lm_score_tags_other_rows_with_a_tagger(finished, capsys):
    path, _ = finished[TAGGER]
    assert cli.dispatch(["eval", "tasks", str(path), "roles", "--limit", "10"]) == 0
    assert "roles" in capsys.readouterr().out


def test_lm_likelihood_of_a_bigram_run_is_the_sum_of_its_probabilities_and_the_context_is_not_scored(
    runs, finished, tmp_path
):
    path, _ = finished[BIGRAM]
    (tmp_path / "texts.txt").write_text("the file\nthe \tfile is read\n")
    texts, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    assert cli.dispatch(["eval", "likelihood", str(path), str(texts), "--out", str(out)]) == 0
    plain, continued = map(json.loads, out.read_text().splitlines())
    (stage,), (_, prepared) = stages_of(path), prepared_of(runs, BIGRAM)
    model, encode = stage.model(), prepared.vocabulary.encode
    whole = token_log_probs(model, *joined([encode("the file")]))
    assert plain["log_prob"] == pytest.approx(whole.sum()) and plain["tokens"] == len(whole)
    context, text = encode("the "), encode("file is read")
    both = token_log_probs(model, *joined([context + text]))
    assert continued["log_prob"] == pytest.approx(both[len(context) :].sum())
    assert continued["tokens"] == len(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--length", "8", "--draws", "4"], "leave --draws, --length out"), (["--mixture", "squad"], "counts")],
)
def test_options_of_likelihood_that_counts_do_not_read_are_refused_by_name(
    options, named, finished, tmp_path, capsys
):
    path, _ = finished[BIGRAM]
    (tmp_path / "texts.txt").write_text("the file\n")
    assert cli.dispatch(["eval", "likelihood", str(path), str(tmp_path / "texts.txt"), *options]) == 2
    assert named in unboxed(capsys.readouterr().err)


def test_verify_tells_damaged_counts_from_good_ones(runs, capsys):
    path, _ = finish(runs, BIGRAM, "damaged")
    assert find_damage([path]) == 0 and "good" in capsys.readouterr().out
    (stage,) = stages_of(path)
    file = stage.folder / COUNTS_FILE
    file.write_bytes(file.read_bytes()[:-1])
    assert find_damage([path]) == 1 and "checksum" in capsys.readouterr().out
    assert find_damage([path, path.parent]) == find_damage([path.parent]), "each file is counted once"
    assert not saved_steps(stage.folder)
    with pytest.raises(DataError, match="damaged"):
        stage.model()
    finish(runs, BIGRAM, "damaged")  # counts again
    assert matches_checksum(file) and find_damage([path]) == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ensemble.members": 2}, "ensemble.members"),
        ({"counts.model": "tagger"}, "tuning.heads"),
        ({"counts.model": "tagger", "tuning.heads": ("cola",)}, "cola"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_the_name_of_the_setting(changes, named):
    with pytest.raises(SettingError, match=named):
        check_counts(build(BIGRAM, "nano", changes))


def test_a_file_of_tags_without_validation_rows_is_refused_before_anything_is_counted(tmp_path):
    file = tmp_path / "tags.toml"
    file.write_text('words = "w"\ntags = "t"\nlabels = ["A", "B"]\nsplits = {train = "tags.jsonl"}\n')
    (tmp_path / "tags.jsonl").write_text('{"w": ["a", "b"], "t": ["A", "B"]}\n')
    for row in ("hmm-greedy", "bi-lstm"):
        with pytest.raises(SettingError, match=r"tags\.toml: \[splits\] lacks 'validation'"):
            tasks_from_files(build(f"tagging/{row}", "nano", {"tuning.heads": (str(file),)}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective.noise": "suffix"}, "data.held_out_documents"),
        ({"counts.model": "none", "model.architecture": "encoder"}, "data.held_out_documents"),
        ({"counts.model": "none", "objective.eos": "none"}, "objective.eos='none'.*held_out_documents"),
    ],
)
def test_documents_are_scored_by_no_model_that_gives_no_likelihood_of_them(changes, named):
    experiment = build(BIGRAM, "nano", changes)
    with pytest.raises(SettingError, match=named):
        check_held_out_documents(experiment)
    check_held_out_documents(change(experiment, "data.held_out_documents", 0))


def test_what_needs_a_network_refuses_counts_by_name(finished, tmp_path, capsys):
    (ngrams, _), (tagger, _) = finished[BIGRAM], finished[TAGGER]
    for command, model in (
        (["generate", str(tagger), "--prompt", "a"], "tagger"),
        (["generate", str(tagger), "--prompt", "[MASK]"], "tagger"),
        (["draw", "next", str(tagger), "--text", "a"], "tagger"),
        (["draw", "lens", str(ngrams), "--text", "a"], "ngram"),
        (["convert", "export", str(ngrams), str(tmp_path / "out")], "ngram"),
        (["eval", "tasks", str(ngrams), "documentation-reading"], "ngram"),
        (["eval", "tasks", str(ngrams), "extract@3", "--limit", "5"], "ngram"),
    ):
        assert cli.dispatch(command) == 2
        assert f"counts.model={model!r}" in capsys.readouterr().err
    with pytest.raises(SettingError, match="history/bigram"):
        show_plans({BIGRAM: build(BIGRAM, "nano")}, PlanOptions())


def test_lm_generate_prints_what_a_bigram_run_finds_likeliest_or_samples(runs, finished, capsys):
    path, _ = finished[BIGRAM]
    (stage,), (_, prepared) = stages_of(path), prepared_of(runs, BIGRAM)
    model, vocabulary = stage.model(), prepared.vocabulary
    ids = vocabulary.encode("Return the")
    for _ in range(6):
        ids.append(int(next_token_probs(model, ids).argmax()))
    command = ["generate", str(path), "--prompt", "Return the", "--max-length", "6"]
    assert cli.dispatch(command) == 0
    out = capsys.readouterr().out
    assert f"{path} after counts\nReturn the\n" in out
    assert f"\n  {vocabulary.decode(ids[-6:])}\n" in out
    sampled = []
    for seed in "001":
        assert cli.dispatch([*command, "--temperature", "1", "--top-p", "0.99", "--seed", seed]) == 0
        sampled.append(capsys.readouterr().out.splitlines()[:-1])  # without the speed
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--beams", "4"], "leave --beams out"),
        (["--length-penalty", "0", "--top", "3"], "leave --length-penalty, --top out"),
        (["--iterations", "3", "--passes", "gibbs"], "leave --iterations, --passes out"),
        (["--prompt", "a <mask>"], "leave <mask> out of --prompt"),
        (["--mixture", "squad"], "counts"),
    ],
)
def test_options_that_counts_do_not_read_are_refused_by_name(options, named, finished, capsys):
    path, _ = finished[BIGRAM]
    prompt = [] if "--prompt" in options else ["--prompt", "a"]
    assert cli.dispatch(["generate", str(path), *prompt, *options]) == 2
    assert named in unboxed(capsys.readouterr().err)


def test_lm_draw_next_of_a_bigram_run_has_a_column_for_the_beginning_and_for_each_token(
    runs, finished, tmp_path, monkeypatch, capsys
):
    path, _ = finished[BIGRAM]
    (stage,), (_, prepared) = stages_of(path), prepared_of(runs, BIGRAM)
    drawn, draw_heat_maps = [], model_inspection.draw_heat_maps

    def draw(panels, *labels):
        drawn.extend(panels)
        return draw_heat_maps(panels, *labels)

    monkeypatch.setattr(model_inspection, "draw_heat_maps", draw)
    out = tmp_path / "next.png"
    command = ["draw", "next", str(path), "--text", "the file", "--out", str(out)]
    assert cli.dispatch([*command, "--k", "3"]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG" and f"{path} after counts" in capsys.readouterr().out
    ids = prepared.vocabulary.encode("the file")
    (panel,) = drawn
    assert panel.values.shape == (4, len(ids) + 1) and panel.column_labels[0] == "[START]"
    for end, column in enumerate(panel.values.T):
        likeliest = sorted(next_token_probs(stage.model(), ids[:end]), reverse=True)[:3]
        assert column[:3].tolist() == pytest.approx(likeliest)
    for refused, named in (((" ",), "--text"), (("a", "--k", "0"), "--k=0"), (("a b " * 40,), "40")):
        assert cli.dispatch([*command[:4], *refused]) == 2
        assert named in unboxed(capsys.readouterr().err)


def test_a_run_of_ngrams_ends_with_commands_that_write_and_draw():
    folder = Path("runs/nano") / BIGRAM / "seed-0"
    look, picture, _ = suggestions(BIGRAM, build(BIGRAM, "nano"), folder)
    assert look == f"lm generate {folder} --prompt 'The function returns' --temperature 1"
    assert picture == f"lm draw next {folder} --text 'The function returns'"


def test_a_stage_of_counts_is_shown_with_its_text_and_its_step(runs, finished, capsys):
    assert cli.dispatch(["show", BIGRAM, "--stages", "--scale", "tiny", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "counts" in out and "documentation" in out
