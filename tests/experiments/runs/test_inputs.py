"""What a run reads is opened once, whether it is checked or trained; and a stage has one status."""

import gzip
import json
import shutil
import sys
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import small_runs

from experiments import __main__ as cli
from experiments.processes.progress import reporting
from experiments.runs import prepare, provenance, run, sources
from experiments.runs.checks import check_devices, check_lengths, task_lengths
from experiments.runs.kinds.counts import CountStage
from experiments.runs.kinds.finetuning import Finetuning
from experiments.runs.kinds.network import NetworkStage, pretokenize_ahead
from experiments.runs.kinds.stage import LabelledStage, Stage
from experiments.runs.run import Run
from experiments.runs.sources import Sources
from experiments.runs.stages import stages
from experiments.runs.status import is_stage_finished
from experiments.study.experiment import PretrainingPhase
from experiments.study.registry import build
from lm.config.base import SettingError
from lm.data.packing import row_length
from lm.objectives.denoising import OBJECTIVES

runs = small_runs.runs
ROW = "t5/1-baseline/baseline"


@pytest.fixture(scope="module")
def trained(runs):
    """A run that was trained, and how often it opened and made each thing."""
    counts, patch = Counter(), pytest.MonkeyPatch()

    def count(owner, name, key):
        original = getattr(owner, name)

        def counted(*arguments, **options):
            counts[name, key(*arguments)] += 1
            return original(*arguments, **options)

        patch.setattr(owner, name, counted)

    count(sources, "corpus_shards", lambda corpus, split, *_: (corpus, split))
    count(sources, "dataset_rows", lambda source, split, *_: (source, split))
    count(run, "stages", lambda *_: None)
    for kind in kinds():
        if "batches" in vars(kind) and not getattr(kind.batches, "__isabstractmethod__", False):
            count(kind, "batches", lambda stage, _: stage.name)
    experiment = build(ROW, "tiny", {"start.steps": 2, "tuning.branches": (0.5, 1.0)})
    whole = Run(experiment, runs / "tiny" / "counted" / "seed-0", runs / "cache")
    with reporting(0) as reporter:
        whole.train(reporter)
    patch.undo()
    return whole, counts


def kinds(base=Stage):
    """All kinds of stages."""
    below = (kind for each in base.__subclasses__() for kind in kinds(each))
    return [*dict.fromkeys((*base.__subclasses__(), *below))]


@pytest.mark.slow
def test_training_opens_each_corpus_and_task_and_makes_stages_and_batches_once(trained):
    whole, counts = trained
    assert {name for name, _ in counts} == {"corpus_shards", "dataset_rows", "stages", "batches"}
    assert set(counts.values()) == {1}, counts
    assert {name for what, name in counts if what == "batches"} == {stage.name for stage in whole.stages}


def test_what_check_returns_is_what_stages_train_on(runs):
    whole = Run(build(ROW, "tiny"), runs / "tiny" / "checked" / "seed-0", runs / "cache")
    inputs = whole.check(lambda line: None)
    assert inputs.batches.keys() == {stage.name for stage in whole.stages}
    assert inputs.vocabulary.fingerprint == whole.stages[0].provenance(inputs)["vocabulary"]["fingerprint"]


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("gpt/base", {"start.steps": 2}),
        ("gpt/base", {"start.steps": 2, "model.architecture": "prefix-decoder"}),
        ("gpt/base", {"pretraining.phases": (PretrainingPhase(0.5, OBJECTIVES["prefix-lm"], "prefix"),)}),
        ("gpt/base", {"finetuning.steps": 0}),
    ],
)
def test_learned_positions_are_as_many_as_the_longest_row_of_the_stages_needs_and_no_more(row, changes, runs):
    tasks = {"tuning.mixtures": ("documentation-reading",), "tuning.heads": (), "tuning.inputs_length": 60}
    if changes.get("finetuning.steps") == 0:
        tasks["tuning.inputs_length"] = 1_000  # which nothing reads

    def checked(max_length):
        positions = {"model.positions.max_length": max_length}
        whole = Run(build(row, "tiny", tasks | changes | positions), runs / "tiny" / "long", runs / "cache")
        return whole, whole.check(lambda line: None)

    whole, inputs = checked(2_000)
    assert whole.experiment.model.has_max_length
    longest = max(
        row_length(stage.settings.model.architecture, inputs.batches[stage.name].lengths)
        for stage in whole.stages
    )
    checked(longest)
    with pytest.raises(SettingError, match=f"max_length={longest - 1} is less than the {longest} of"):
        checked(longest - 1)


@pytest.mark.usefixtures("runs")  # which makes the scale ``tiny``
def test_devices_split_the_batches_that_are_trained_and_no_others():
    six = {"pretraining.batch_size": 6}
    assert check_devices(build(ROW, "tiny", six | {"finetuning.steps": 0}), 3)["data"] == 3
    check_devices(build(ROW, "tiny", six | {"tuning.mixtures": ()}), 3)
    check_devices(build("history/bigram", "tiny"), 3)
    with pytest.raises(SettingError, match=r"^finetuning\.batch_size of size 8 cannot be split over"):
        check_devices(build(ROW, "tiny", six), 3)
    with pytest.raises(SettingError, match=r"^pretraining\.batch_size of size 8 cannot be split over"):
        check_devices(build(ROW, "tiny", {"finetuning.steps": 0}), 3)


@pytest.mark.usefixtures("runs")  # which makes the scale ``tiny``
@pytest.mark.parametrize(("length", "refused"), [(24, False), (25, True)])
def test_a_mesh_splits_the_rows_of_a_task_with_a_head(length, refused):
    changes = {"tuning.heads": ("acceptability",), "tuning.inputs_length": length, "mesh.sequence": 2}
    experiment = build("bert/no-nsp", "tiny", {"tuning.mixtures": (), "pretraining.steps": 0} | changes)
    message = "longest row of size 25 cannot be split over mesh.sequence=2"
    with pytest.raises(SettingError, match=message) if refused else nullcontext():
        check_lengths(experiment, task_lengths(experiment))


@pytest.mark.slow
def test_a_stage_is_finished_by_its_status_alone_which_is_written_last(trained):
    for stage in trained[0].stages:
        steps = stage.training.steps
        status = json.loads((stage.folder / "run.json").read_text())
        saved = [*stage.folder.glob("checkpoints/**/*"), stage.folder / "metrics.jsonl"]
        last = max(path.stat().st_mtime_ns for path in saved)
        assert last <= (stage.folder / "run.json").stat().st_mtime_ns
        assert (status["status"], status["step"]) == ("finished", steps)
        assert is_stage_finished(stage.folder, steps) and not is_stage_finished(stage.folder, steps + 1)


@pytest.mark.slow
def test_a_checked_run_reads_its_result_from_its_folder(trained):
    whole, _ = trained
    result = whole.result
    assert result is not None and set(result.stages) == {stage.name for stage in whole.stages}
    folders = {name: folder.resolve() for name, folder in result.stage_folders().items()}
    assert folders == {stage.name: stage.folder.resolve() for stage in whole.stages}


@pytest.mark.slow
def test_every_module_that_trained_is_in_the_provenance_and_no_command_or_report(trained):
    code = provenance.code()
    loaded = {name.replace(".", "/") + ".py" for name in sys.modules if name.startswith("lm.train.")}
    loaded = {name for name in loaded if (provenance.ROOT / name).exists()}
    loaded.remove("lm/train/checks.py")  # it refuses settings and changes no number
    assert len(loaded) > 5 and loaded <= code.keys()
    assert {"lm/nn/mixers.py", "lm/objectives/corruption.py", "lm/evaluate/generate.py"} <= code.keys()
    others = ("experiments/cli", "experiments/report", "experiments/study", "launch", "lm/convert")
    assert not [name for name in code if name.startswith(others)]
    assert "experiments/runs/run.py" not in code and "experiments/runs/checks.py" not in code
    recorded = provenance.read(trained[0].stages[0].folder)["code"]
    assert recorded == code


def test_every_kind_of_stage_says_all_that_is_asked_of_one():
    bases = (NetworkStage, CountStage, LabelledStage, Finetuning)
    concrete = [kind for kind in kinds() if kind not in bases]
    assert len(concrete) == 7 and not [kind for kind in concrete if kind.__abstractmethods__]


@pytest.mark.parametrize(
    "row", ["t5/1-baseline/baseline", "t5/12-multi-task/multi-task", "bert/base", "gpt/base"]
)
def test_text_is_tokenized_ahead_for_every_kind_of_rows(row, runs):
    experiment = build(row, "tiny", {"start.steps": 0})
    inputs = Run(experiment, runs / "tiny" / "ahead" / row / "seed-0", runs / "cache").check()
    batches = inputs.batches["pretraining"]
    (stage,) = (each for each in stages(experiment) if each.name == "pretraining")
    assert (stage.lengths.inputs, stage.lengths.targets) == (batches.lengths.inputs, batches.lengths.targets)
    before = batches(0, slice(0, 2))
    with pretokenize_ahead(batches, [slice(0, 2)], 1):
        after = batches(0, slice(0, 2))
    assert {name: x.tolist() for name, x in before.features().items()} == {
        name: x.tolist() for name, x in after.features().items()
    }


def test_held_out_text_that_gives_no_row_is_found_before_training(runs, tmp_path):
    texts = {"train": ["The white cat saw a green rat."] * 40, "valid": ["It is one text."]}
    for name, documents in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents))
    changed = {"data.corpus": f"text:{tmp_path}", "data.vocabulary": "bytes", "start.steps": 0}
    pairs, single = (
        Run(build("bert/base", "tiny", changed | given), runs / "tiny" / name / "seed-0", runs / "cache")
        for name, given in (("pairs", {}), ("single", {"objective.pairs": "none"}))
    )
    with pytest.raises(SettingError, match="held-out text: .* two documents .* or set objective.pairs=none"):
        pairs.check()
    single.check()


def test_held_out_text_that_is_trained_on_too_is_reported_with_its_share(tmp_path):
    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(1_000)]
    documents = [" ".join(rng.choice(words, 40)) for _ in range(60)]
    (tmp_path / "train.txt").write_text("\n\n".join(documents[:40]))
    for name, held_out, is_reported in (("own", documents[40:], False), ("copied", documents[35:45], True)):
        (folder := tmp_path / name).mkdir()
        shutil.copy(tmp_path / "train.txt", folder)
        (folder / "valid.txt").write_text("\n\n".join(held_out))
        said = []
        prepare._report_copies(f"text:{folder}", Sources(tmp_path / "cache", "stop"), said.append)
        shares = [int(line.partition("% of the held-out text")[0]) for line in said]
        assert len(shares) == is_reported and all(45 <= share <= 50 for share in shares), (
            "five of ten paragraphs, without what crosses their borders"
        )


def test_the_command_that_the_report_of_copies_names_removes_copies_alone(tmp_path):
    folder, said = tmp_path / "own", []
    folder.mkdir()
    pages = [
        [f"line {line} of page {page} {{ without a full stop" for line in range(40)] for page in range(20)
    ]
    for number, page in enumerate([*pages, pages[0]]):  # enough pages for a held-out split
        (folder / f"{number:02}.txt").write_text("\n".join(page))
    (folder / "valid.txt").write_text("\n".join(pages[1]))
    prepare._report_copies(f"text:{folder}", Sources(tmp_path / "cache", "stop"), said.append)
    command = said[0].partition(": lm ")[2].replace("FOLDER", str(folder)).replace("NAME", "own")
    assert cli.dispatch([*command.split(), "--runs", str(tmp_path), "--workers", "1"]) == 0
    counts = json.loads((tmp_path / "cache/tfds/own/1.0.0/clean.json").read_text())["counts"]
    lost = {name for name, removed in counts.items() if any(removed) and name not in ("read", "kept")}
    assert lost == {"duplicates"}
    assert counts["duplicates"][1] == 80 and counts["kept"][1] == 800


def test_copies_are_looked_for_in_texts_up_to_a_size_however_small_they_are_compressed(tmp_path, monkeypatch):
    text = " ".join(f"w{number}" for number in range(40))
    lines = "".join(json.dumps({"text": f"{text} {number}"}) + "\n" for number in range(400))
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for limit, is_reported in ((2 * len(lines), True), (len(lines), False)):
        monkeypatch.setattr(prepare, "MAX_COMPARED", limit)
        said = []
        prepare._report_copies(f"jsonl:{tmp_path}", Sources(tmp_path / "cache", "stop"), said.append)
        assert bool(said) == is_reported
