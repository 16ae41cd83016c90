"""What a stage was started with: anything else is shown and refused unless it is allowed; and who trains it
now.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_runs
from paths import ROOT
from small_runs import SMALL

from experiments.cli.convert import export_checkpoint
from experiments.cli.run_names import name_run
from experiments.cli.run_options import Options
from experiments.cli.train import train_row
from experiments.processes.progress import reporting
from experiments.report.results import find_results
from experiments.runs import provenance, status
from experiments.runs.kinds.stage import Stage
from experiments.runs.result import check_settings
from experiments.runs.run import Run
from experiments.runs.sources import Sources
from experiments.runs.stages import stages, stages_of
from experiments.runs.trained import generative_stages, open_run
from experiments.runs.vocabulary import find_vocabulary
from experiments.study.experiment import BASELINE
from experiments.study.registry import REGISTRY, build
from experiments.study.scales import SCALES
from experiments.study.settings_diff import result_settings
from lm.config.base import SettingError, change
from lm.files import json_with_checksum
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import train_sentencepiece
from lm.train.runtime.records import records

runs = small_runs.runs

NOW = {
    "settings": result_settings(BASELINE),
    "vocabulary": {"fingerprint": "v"},
    "data": {"corpus": "c"},
    "code": {"lm/config/base.py": "1", "lm/old.py": "1"},
    "packages": {"jax": "0.10"},
}
OTHER = {
    "settings": NOW["settings"] | {"model.mlp.d_ff": 9},
    "vocabulary": {"fingerprint": "w"},
    "data": {"corpus": "d"},
    "code": {"lm/config/base.py": "2", "lm/new.py": "1"},
    "packages": {"jax": "0.11"},
}
SAID = {
    "settings": ["settings: model.mlp.d_ff: 3072 -> 9"],
    "vocabulary": ["vocabulary: fingerprint: v -> w"],
    "data": ["data: corpus: c -> d"],
    "packages": ["packages: jax: 0.10 -> 0.11"],
    "code": ["code: lm/config/base.py: 1 -> 2", "code: lm/new.py: none -> 1", "code: lm/old.py: 1 -> none"],
}
NONE = frozenset()
ROW = "t5/1-baseline/baseline"
CODE = "experiments/runs/kinds/pretraining.py"


@pytest.mark.parametrize("name", provenance.PARTS)
def test_what_has_changed_is_shown_and_refused_unless_it_is_allowed_which_is_kept(tmp_path, name):
    told, now = [], NOW | {name: OTHER[name]}
    provenance.check(tmp_path, NOW, "new", NONE)
    provenance.check(tmp_path, NOW, "begun", NONE)
    others = frozenset(provenance.PARTS) - {name}
    with pytest.raises(SettingError, match=f"started with other {name}:\n(.|\n)*--allow {name}") as refused:
        provenance.check(tmp_path, now, "begun", others)
    assert all(f"\n  {line}" in str(refused.value) for line in SAID[name])
    for _ in range(2):  # the second time nothing has changed
        provenance.check(tmp_path, now, "begun", frozenset({name}), told.append)
    kept = json.loads((tmp_path / "origin.json").read_text())
    assert len(told) == 1 and kept[name] == OTHER[name]
    assert [each["changed"] for each in kept["allowed"]] == [SAID[name]]
    provenance.check(tmp_path, NOW, "begun", frozenset({name}), told.append)
    assert len(json.loads((tmp_path / "origin.json").read_text())["allowed"]) == 2


MODULE = b"""
class Step(Base, rate=1.5, **options):
    def __call__(self, *x: "int", scale=-0.5, **others) -> None:
        y, *_ = [f"{each!r:>{self.w}}%" for each in x if each not in {1, None}] or (b"", "", "\\u00fc")
        return lambda z, /: z @ y[1:, ..., ::2] ** scale
"""
WRITTEN_OTHERWISE = b"""# Says what it is.
class Step(Base, rate=1.50, **options):
    '''Makes a step.'''

    def __call__(
        self,
        *x: 'int',
        scale=-0.5,  # of the exponent
        **others,
    ) -> None:
        '''Return \xc3\xbc.'''
        (y, *_) = [(f'{each!r:>{self.w}}' "%") for each in x if each not in {1, None}] or (
            b'', u"", "\\u00fc"
        )
        '''Said in between.'''
        return lambda z, /: (z @ (y[1:, ..., ::2] ** scale))
"""


def test_comments_docstrings_layout_and_the_version_of_python_change_no_digest_of_code():
    assert provenance.parse_module(MODULE).digest == provenance.parse_module(WRITTEN_OTHERWISE).digest
    assert provenance.parse_module(MODULE).digest == "d4bca64f52f8"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"1.5", b"1.25"),
        (b"{1, None}", b"{True, None}"),
        (b'(b"", "",', b'(b"",'),
        (b'(b"", "",', b'("", "",'),
        (b"-0.5", b"0.5"),
        (b"!r", b"!s"),
        (b"%", b"%%"),
        (b"z @ y", b"y @ z"),
        (b"1:,", b":1,"),
        (b"z, /:", b"z:"),
        (b"not in", b"in"),
    ],
)
def test_a_module_that_does_something_else_has_another_digest(old, new):
    assert old in MODULE
    assert provenance.parse_module(MODULE.replace(old, new)).digest != provenance.parse_module(MODULE).digest


@pytest.mark.parametrize("name", provenance.PARTS)
def test_of_what_is_finished_code_and_packages_may_be_others_and_what_it_was_trained_with_stays(
    tmp_path, name
):
    provenance.check(tmp_path, NOW, "new", NONE)
    text = (tmp_path / "origin.json").read_text()
    if name in provenance.PARTS_OF_FINISHED:
        with pytest.raises(SettingError, match=f"trained with other {name}"):
            provenance.check(tmp_path, NOW | {name: OTHER[name]}, "finished", NONE)
    provenance.check(
        tmp_path,
        NOW | {name: OTHER[name]},
        "finished",
        frozenset({name} & {*provenance.PARTS_OF_FINISHED}),
        str,
    )
    assert (tmp_path / "origin.json").read_text() == text


EDITED = json_with_checksum({**NOW, "allowed": []}).replace('"w"', '"v"').replace("0.10", "0.11")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is missing"),
        ("", "is not JSON"),
        ("[]", "has no checksum"),
        (json.dumps({**NOW, "allowed": []}), "has no checksum"),
        (EDITED, "was edited or damaged"),
        (
            json_with_checksum({"settings": {}, "allowed": {}}),
            "lacks vocabulary, data, code, packages, allowed",
        ),
        (
            json_with_checksum({**NOW, "vocabulary": {}, "data": {"": "f"}, "allowed": []}),
            "lacks vocabulary, data:",
        ),
        (json_with_checksum({**NOW, "code": {"lm/files.py": 1}, "allowed": [{}]}), "lacks code, allowed"),
    ],
)
def test_a_record_that_is_missing_edited_or_damaged_is_not_taken_for_the_same(tmp_path, text, said):
    if text is not None:
        (tmp_path / "origin.json").write_text(text)
    with pytest.raises(SettingError, match=f"code: not known: .*origin.json {said}"):
        provenance.check(tmp_path, NOW, "begun", NONE)
    provenance.check(tmp_path, NOW, "begun", frozenset(provenance.PARTS), str)
    provenance.check(tmp_path, NOW, "begun", NONE)


def test_a_finished_stage_whose_record_is_damaged_is_accepted_on_request_and_keeps_its_vocabulary(tmp_path):
    stage = SimpleNamespace(folder=tmp_path, provenance=lambda inputs: NOW)
    (tmp_path / "origin.json").write_text(EDITED)
    said = []
    with pytest.raises(SettingError, match="was edited or damaged"):
        Stage.check_provenance(stage, None, True, NONE, said.append)
    Stage.check_provenance(stage, None, True, frozenset(provenance.PARTS), said.append)
    assert "allowed:" in said[0] and [path.name for path in tmp_path.iterdir()] == ["origin.json"]


def test_an_unknown_name_is_refused_with_the_nearest():
    assert provenance.allowed("") == NONE and provenance.allowed("code,data") == {"code", "data"}
    with pytest.raises(SettingError, match="--allow 'pakages'.*'packages'"):
        provenance.allowed("code,pakages")


def test_a_run_goes_on_on_another_mesh_and_with_settings_that_came_since(tmp_path):
    settings = asdict(BASELINE)
    del settings["generator_share"]
    (tmp_path / "settings.json").write_text(json_with_checksum(settings))
    check_settings(change(change(BASELINE, "mesh.fsdp", 4), "data.workers", 2), tmp_path)
    with pytest.raises(SettingError, match="generator_share: 0.25 -> 0.5"):
        check_settings(replace(BASELINE, generator_share=0.5), tmp_path)
    told = []
    check_settings(replace(BASELINE, generator_share=0.5), tmp_path, told.append)
    assert "generator_share: 0.25 -> 0.5" in told[0]


TEXT = {
    "finetuning.steps": 0,
    "pretraining.steps": 2,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "data.vocabulary_size": 150,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A finished run on text, its settings, its phase and the folder of all runs."""
    home = tmp_path_factory.mktemp("written")
    (home / "text").mkdir()
    for split, module in {"train": provenance, "valid": status}.items():
        (home / "text" / f"{split}.txt").write_text(Path(module.__file__).read_text())
    SCALES["written"] = SMALL | TEXT | {"data.corpus": f"text:{home / 'text'}"}
    experiment = build(ROW, "written")
    train_row(ROW, experiment, Options("written", home / "runs"), check=False)
    (folder,) = home.glob("runs/written/**/seed-0")
    yield (
        home,
        experiment,
        folder,
        stages_of(folder)[0].folder,
    )
    del SCALES["written"]


@contextmanager
def changed(path, text):
    """The file says this for a while; None: it is gone."""
    whole = path.read_bytes()
    path.write_text(text) if text is not None else path.unlink()
    yield
    path.write_bytes(whole)


def test_a_run_reads_nothing_that_its_settings_do_not_ask_for(written):
    home, *_ = written
    assert not (home / "runs" / "cache" / "tfds").exists()


@pytest.mark.parametrize("split", ["train", "valid"])
def test_of_a_finished_run_whose_text_is_another_it_is_said_which(written, split, capsys):
    home, experiment, *_ = written
    with changed(home / "text" / f"{split}.txt", "other words " * 50):
        name = {"train": "train", "valid": "validation"}[split]
        with pytest.raises(
            SettingError, match=f"trained with other data:\n  data: corpus {name}: .*\nchoose"
        ):
            train_row(ROW, experiment, Options("written", home / "runs"), check=False)
        train_row(ROW, experiment, Options("written", home / "runs", "data"), check=False)
    train_row(ROW, experiment, Options("written", home / "runs"), check=False)
    assert capsys.readouterr().out.count("already finished") == 2


def test_a_finished_run_that_is_refused_gets_no_name(written):
    home, experiment, *_ = written
    runs = home / "runs"
    with changed(home / "text" / "train.txt", "other words " * 50), pytest.raises(SettingError):
        train_row(ROW, experiment, Options("written", runs), check=False, run_name="refused")
    assert not (runs / "refused").exists()
    train_row(ROW, experiment, Options("written", runs), check=False, run_name="accepted")
    assert (runs / "accepted").exists()


def test_a_run_that_takes_the_name_of_another_says_which_before_and_when_it_does(written, tmp_path, capsys):
    home, experiment, *_ = written
    options = Options("written", home / "runs")
    name_run(options.runs, "moved", tmp_path)
    other = os.path.relpath(tmp_path)
    for check, line in (
        (True, "@moved will name this run; now: "),
        (False, "@moved names this run from now"),
    ):
        train_row(ROW, experiment, options, check=check, run_name="moved")
        said = capsys.readouterr().out
        assert line in said and other in said.replace("\n", "")
    for check in (True, False):
        train_row(ROW, experiment, options, check=check, run_name="moved")
        said = capsys.readouterr().out
        assert "@moved names" not in said and "@moved will" not in said


def test_held_out_text_that_is_replaced_while_a_run_is_unfinished_is_noticed(written):
    home, experiment, _, place = written
    before = provenance.read(place)
    with changed(home / "text" / "valid.txt", "other words " * 50):
        now = before | {"data": stages(experiment)[0].fingerprints(Sources(home / "runs" / "cache"))}
    with pytest.raises(SettingError, match=r"data: corpus validation: \S+ -> \S+\n[^\n]*$"):
        provenance.check(place, now, "begun", NONE)


def test_a_run_is_read_with_its_own_vocabulary_when_text_and_cache_are_gone_or_it_is_refused(
    written, tmp_path
):
    home, experiment, folder, place = written
    due = find_vocabulary(experiment, Sources(home / "runs" / "cache"), print).encode("words and more")
    (home / "runs" / "cache").rename(tmp_path / "cache")
    (home / "text").rename(tmp_path / "text")
    (home / "runs" / "cache").mkdir()
    try:
        assert open_run(folder, generative_stages(folder)).vocabulary.encode("words and more") == due
        export_checkpoint(folder, tmp_path / "out")
        model = place / "tokenizer" / "vocabulary.model"
        assert load_pretrained_tokenizer(tmp_path / "out", 10**6).encode("words and more") == due
        train_sentencepiece(["others words"] * 99, 12, tmp_path / "other.model")
        whole = model.read_bytes()
        for other, said in (
            ((tmp_path / "other.model").read_bytes(), "is not the vocabulary"),
            (None, "no tokenizer"),
        ):
            model.unlink()
            if other:
                model.write_bytes(other)
            with pytest.raises(SettingError, match=said):
                open_run(folder, generative_stages(folder))
            if other is None:
                model.write_bytes(whole)
    finally:
        (home / "runs" / "cache").rmdir()
        (tmp_path / "cache").rename(home / "runs" / "cache")
        (tmp_path / "text").rename(home / "text")


def test_settings_or_a_record_that_were_edited_are_obeyed_by_nobody(written, tmp_path):
    home, experiment, folder, place = written
    path = folder / "settings.json"
    with changed(
        path, path.read_text().replace('"relative_max_distance": 128', '"relative_max_distance": 129')
    ):
        for use in (
            lambda: open_run(folder, generative_stages(folder)),
            lambda: export_checkpoint(folder, tmp_path / "out"),
            lambda: train_row(ROW, experiment, Options("written", home / "runs"), check=False),
            lambda: find_results(REGISTRY[ROW], "written", home / "runs"),
        ):
            with pytest.raises(SettingError, match="settings.json"):
                use()
        assert not (tmp_path / "out").exists()
    path = place / "origin.json"
    with changed(path, path.read_text().replace('"fingerprint": "', '"fingerprint": "0')):
        for use in (
            lambda: open_run(folder, generative_stages(folder)),
            lambda: train_row(ROW, experiment, Options("written", home / "runs"), check=False),
        ):
            with pytest.raises(SettingError, match="origin.json"):
                use()


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("process 7 on far", file=file, flush=True)
print("has it", flush=True)
time.sleep(60)
"""


def test_who_waits_is_told_for_whom_and_a_killed_one_leaves_no_lock(tmp_path, monkeypatch):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path / "lock"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "has it\n"
    told = []
    with status.locked(tmp_path, SimpleNamespace(say=lambda line: told.append(line) or holder.kill())):
        assert told[0].startswith("process 7 on far")
        assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()

    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with status.locked(tmp_path, SimpleNamespace(complain=told.append)):
        assert "the file system of --runs has no flock" in told[1]


TWICE = """
import sys, time
from pathlib import Path
from experiments.runs import run as module
from experiments.processes.progress import reporting
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.objectives.denoising import Objective  # in the settings
SCALES["tiny"] = eval(sys.argv[3])
locked = module.locked
def after_a_moment(folder, reporter):
    Path(sys.argv[2], "here-" + sys.argv[4]).touch()
    while len(list(Path(sys.argv[2]).glob("here-*"))) < 2:
        time.sleep(0.1)
    return locked(folder, reporter)
module.locked = after_a_moment
new = {"finetuning.steps": 0, "tuning.mixtures": ()}
with reporting(0) as reporter:
    experiment = build("t5/1-baseline/baseline", "tiny", new)
    module.Run(experiment, Path(sys.argv[2]), Path(sys.argv[1], "cache")).train(reporter)
"""


@pytest.mark.slow
def test_two_processes_of_one_run_train_it_once(runs, tmp_path):
    tiny = {name: value for name, value in SMALL.items() if not name.startswith("tuning.mix")}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TWICE, runs, tmp_path, repr(tiny), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for turn in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    waiting = [text for text in said if "; waiting for it" in text]
    assert len(waiting) == 1 and f"process {both[said.index(waiting[0]) - 1].pid} on " in waiting[0]
    experiment = build("t5/1-baseline/baseline", "tiny", {"finetuning.steps": 0, "tuning.mixtures": ()})
    folder = stages_of(tmp_path)[0].folder
    lines = [(line["step"], line["kind"]) for line in records(folder)]
    assert len(lines) == len(set(lines)) and {step for step, _ in lines} == {1, 2, 3, 4}
    assert len(json.loads((folder / "run.json").read_text())["starts"]) == 1
    about = json.loads((folder / "origin.json").read_text())
    assert about.keys() == {*provenance.PARTS, "allowed", "sha256"}
    assert about["code"].keys() >= {"lm/config/base.py", "lm/nn/stack.py", CODE}
    provenance.record(folder, about | {"data": about["data"] | {"corpus train": "other"}})
    said = "trained with other data:\n  data: corpus train: other"
    with reporting(0) as reporter, pytest.raises(SettingError, match=said):
        Run(experiment, tmp_path, runs / "cache").train(reporter)


def test_a_stage_of_a_release_that_read_its_corpus_in_another_order_is_refused_with_that_word(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "number {i}"}}\n' for i in range(50)))
    changes = {"data.corpus": f"jsonl:{tmp_path}/a.jsonl", "tuning.mixtures": (), "finetuning.steps": 0}
    *_, stage = stages(build(ROW, "nano", changes))
    now = NOW | {"data": stage.fingerprints(Sources(tmp_path))}
    earlier = NOW | {"data": {name: value for name, value in now["data"].items() if " train" in name}}
    for state in ("begun", "finished"):
        folder = tmp_path / state
        provenance.check(folder, earlier, "new", NONE)
        with pytest.raises(SettingError, match="corpus is read: none ->"):
            provenance.check(folder, now, state, NONE)
