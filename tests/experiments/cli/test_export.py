"""``lm convert export``: what leaves with its head, its tokenizer and its README.md, and what is refused."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import published
import pytest
import small_corpus
import tokenizers
from drawn import drawn_state
from paths import ROOT
from safetensors.numpy import load_file
from tiny import TINY

from experiments.cli.convert import export_checkpoint, import_checkpoint
from experiments.notebook import load_run
from experiments.runs import checks, provenance
from experiments.runs.init_from import overrides_of_start
from experiments.runs.kinds.head import HeadFinetuning
from experiments.runs.model_card import model_card, training_lines
from experiments.runs.paths import save_settings, start_folder
from experiments.runs.result import fingerprint, summary
from experiments.runs.run import Run
from experiments.runs.stages import stages_of
from experiments.runs.start_origin import HUB_NAME_FILE, hub_name
from experiments.runs.vocabulary import store_vocabulary
from experiments.study.registry import build
from experiments.study.scales import SCALES
from lm.config.base import SettingError
from lm.config.training import CheckpointConfig
from lm.data.tasks.mixtures import mixture
from lm.files import json_with_checksum, lines_with_checksum, write
from lm.notebook import load_model
from lm.sharding import make_mesh
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from lm.train.runtime.checkpoints import Checkpoints

PAIR = ("the cat sat", "a dog ran")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs with a small documentation corpus."""
    folder = tmp_path_factory.mktemp("exported")
    small_corpus.prepare(folder / "cache")
    SCALES["tiny"] = SCALES["nano"] | TINY | {"tuning.inputs_length": 60, "finetuning.steps": 2}
    yield folder
    del SCALES["tiny"]


def settings_of(runs, family, **tuning):
    """The settings of a checkpoint that is tuned by a head."""
    start = overrides_of_start(str(published.write(family, runs / family)), runs)
    heads = {"tuning.mixtures": (), "tuning.heads": ("follows",)}
    return build("bert/base", "tiny", start | heads | {f"tuning.{name}": x for name, x in tuning.items()})


def tuned_run(runs, family, **tuning):
    """The folder of such a run, whose head is new."""
    experiment = settings_of(runs, family, **tuning)
    name = "-".join(map(str, tuning.values())).replace("/", "_")
    folder = runs / "tiny" / f"{family}-{name}" / "seed-0"
    save_settings(folder, experiment, runs / "cache")
    write_stage(folder, load_pretrained_tokenizer(runs / family, experiment.model.vocab_size))
    return folder


def write_stage(folder, vocabulary):
    """Write a checkpoint with drawn parameters, and the vocabulary, of the one stage of a run."""
    (stage,) = stages_of(folder)
    with Checkpoints(stage.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(drawn_state(stage.steps(make_mesh(stage.settings.mesh))))
    store_vocabulary(stage.folder, vocabulary)
    of_vocabulary = {"vocabulary": {"fingerprint": vocabulary.fingerprint}}
    provenance.record(stage.folder, dict.fromkeys(provenance.PARTS, {}) | of_vocabulary)


@pytest.mark.parametrize(
    ("family", "tuning", "exported"),
    [
        ("bert", {"pool": "mean"}, "SentenceTransformer"),
        pytest.param(
            "roberta",
            {"pool": "first", "dense": "tanh"},
            "RobertaForSequenceClassification",
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", {"pool": "last"}, "GPT2ForSequenceClassification", marks=pytest.mark.slow),
        pytest.param("llama", {"pool": "last"}, "LlamaForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_a_tuned_run_leaves_with_its_head_and_reads_texts_as_in_tuning(
    family, tuning, exported, runs, tmp_path, capsys
):
    folder = tuned_run(runs, family, **tuning)
    export_checkpoint(folder, tmp_path / "out")
    assert f": the {exported} of {folder} after follows" in capsys.readouterr().out
    (stage,) = stages_of(folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "False", "1": "True"}
    assert config["architectures"] == [exported] or config["architectures"] == ["BertModel"]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 60
    from experiments.runs.kinds.answers import reader_of

    vocabulary = load_pretrained_tokenizer(runs / family, 400)
    reader = reader_of(stage.settings, stage.task, vocabulary)
    row = {"sentence1": PAIR[0], "sentence2": PAIR[1], "label": 1}
    (example,) = reader.example(row).rows
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode(*PAIR)
    assert theirs.ids == example.tokens.tolist()
    if family in ("bert", "roberta"):
        assert theirs.type_ids == example.types.tolist()
    card = (tmp_path / "out" / "README.md").read_text()
    assert exported in card and "`False`, `True`" in card


def test_a_model_below_its_head_pools_as_the_head_did(runs, tmp_path):
    folder = tuned_run(runs, "bert", pool="mean")
    export_checkpoint(folder, tmp_path / "out", head="drop")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'SentenceTransformer("FOLDER")' in card and "a logit for each" not in card
    assert 'pipeline_tag: "sentence-similarity"' in card
    vectors = load_model(tmp_path / "out").embed(PAIR)
    np.testing.assert_allclose(vectors, load_run(folder).embed(PAIR), atol=1e-5)


@pytest.mark.parametrize("answers_inputs", (False, True))
def test_an_exported_decoder_that_is_loaded_or_imported_gives_texts_the_same_likelihood(
    answers_inputs, runs, tmp_path
):
    """A language model reads no EOS after a prompt, and a decoder that answers inputs does."""
    new = {"finetuning.steps": 0, "tuning.heads": (), "data.sentinels": 4, "model.positions.max_length": 256}
    if answers_inputs:
        new |= {"mixing.pretraining": "tasks", "tuning.mixtures": ("documentation-reading",)}
    texts = [*PAIR, "returns a list"]
    words = (ROOT / "README.md").read_text("utf-8")
    vocabulary = SentencePieceTokenizer(train_sentencepiece([words], 300, tmp_path / "a.model"), 4)
    folder = runs / "tiny" / f"decoder-{answers_inputs}" / "seed-0"
    save_settings(folder, build("gpt/llama", "tiny", new), runs / "cache")
    write_stage(folder, vocabulary)
    expected = load_run(folder).rolling_log_likelihoods(texts)
    export_checkpoint(folder, tmp_path / "out")
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    for again in (load_model(tmp_path / "out"), load_run(tmp_path / "again")):
        np.testing.assert_allclose(again.rolling_log_likelihoods(texts), expected, rtol=1e-5)
        assert again.encode_prompt("the cat") == load_run(folder).encode_prompt("the cat")


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.slow), "roberta"])
def test_the_code_in_the_card_of_a_tagger_tags_words_by_the_token_that_the_head_was_tuned_on(
    family, runs, tmp_path, monkeypatch, capsys
):
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text('{"tokens": ["the", "cat"], "tags": [0, 1]}\n')
    task_file = tmp_path / "words.toml"
    labels = [f"L{number}" for number in range(40)]
    splits = 'splits = {train = "train.jsonl", validation = "valid.jsonl"}'
    task_file.write_text(f'words = "tokens"\ntags = "tags"\nlabels = {labels}\n{splits}\n')
    folder = tuned_run(runs, family, heads=(str(task_file),))
    export_checkpoint(folder, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)

    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))

    class Inputs(dict):
        """What a tokenizer of transformers returns."""

        def __init__(self, words, is_split_into_words, **options):
            encoding = tokenizer.encode(words, is_pretokenized=is_split_into_words)
            super().__init__(input_ids=encoding.ids)
            self.encoding = encoding

        def word_to_tokens(self, word):
            span = self.encoding.word_to_tokens(word)
            return span and SimpleNamespace(start=span[0], end=span[1])

    def model(input_ids):
        """Give the token at place N the class N."""
        return SimpleNamespace(logits=np.eye(len(input_ids), 40)[None])

    model.config = SimpleNamespace(id2label=labels)
    loading = {"AutoTokenizer": Inputs, "AutoModelForTokenClassification": model}
    stub = {name: SimpleNamespace(from_pretrained=lambda _, it=it: it) for name, it in loading.items()}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**stub))
    exec(code, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if " L" in line]

    (stage,) = stages_of(folder)
    from experiments.runs.kinds.answers import reader_of

    reader = reader_of(stage.settings, stage.task, load_pretrained_tokenizer(runs / family, 400))
    words = [word for word, _ in printed]
    example = reader.example({"tokens": words, "tags": range(1, len(words) + 1)})
    assert len(words) == 6 and np.sum(example.weight) == 6
    assert [tag for _, tag in printed] == [f"L{place}" for place in np.flatnonzero(example.weight)]


def test_a_folder_that_is_there_is_left_as_it_is_before_a_model_is_read(runs, tmp_path, monkeypatch):
    folder = tuned_run(runs, "bert", pool="mean")
    monkeypatch.setattr(HeadFinetuning, "trained_with_head", None)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SettingError, match="is there already; name a new folder"):
        export_checkpoint(folder, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_what_cannot_leave_is_said_in_one_line_before_training_and_refused_with_the_same_reason(
    runs, tmp_path
):
    said = []
    experiment = settings_of(runs, "bert", layers="mixed-frozen")
    Run(experiment, runs / "tiny" / "mixed", runs / "cache").check(said.append)
    (line,) = [line for line in said if "`lm convert export` cannot write it" in line]
    assert "the head for follows" in line and "with 'last' or 'last-frozen' a head can be exported" in line
    folder = tuned_run(runs, "bert", layers="mixed-frozen")
    with pytest.raises(SettingError) as refused:
        export_checkpoint(folder, tmp_path / "out")
    reason = str(refused.value).partition("cannot be written: ")[2]
    assert reason in line and "--head drop writes the model below it" in reason
    assert not (tmp_path / "out").exists()
    export_checkpoint(folder, tmp_path / "out", head="drop")
    assert "classifier.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "The tuned head was left out, which has read `" in card
        and "import AutoTokenizer, AutoModel\n" in card
    )
    read = re.search("which has read `([^`]*)`", card)[1]
    assert "truncation=True" in card and f"print(model(**inputs).{read})" in card
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == 60


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("gpt/llama", None),
        ("t5/1-baseline/baseline", None),
        ("history/trigram", None),  # counts have no weights
        ("positions/rotary", "for gpt_neox, model.embedding.scale='sqrt' should be 'none'"),
        ("now/1-encoders/causal", None),  # EuroBERT
        ("sahoo/1-lm1b/mdlm-33b", "model.norm.kind='layer' should be 'rms'"),
    ],
)
def test_a_model_without_a_new_head_that_no_family_can_hold_is_named_before_training(row, reason):
    said: list[str] = []
    checks.report_unexportable_model(build(row, "nano"), said.append)
    assert len(said) == (reason is not None)
    for line in said:
        assert "`lm convert export` cannot write this model" in line and reason in line


def test_adapters_cannot_leave_and_low_rank_updates_can(runs):
    for tuning, count in (({"adapters": 0.5, "pool": "mean"}, 1), ({"lora.rank": 2, "pool": "mean"}, 0)):
        said = []
        Run(settings_of(runs, "bert", **tuning), runs / "tiny" / "x", runs / "cache").check(said.append)
        assert sum("cannot write it" in line for line in said) == count


def test_a_card_has_what_the_hub_reads_and_the_scores_of_the_run(runs, tmp_path):
    folder = tuned_run(runs, "bert", pool="mean")
    (stage,) = stages_of(folder)
    start = start_folder(stage.settings.start.model, runs / "cache")
    (start / HUB_NAME_FILE).write_text("owner/name\n")
    scored = {"column": "GLUE", "like": None, "half": "", "metric": "accuracy", "measure": "score"}
    scored |= {"chance": None, "step": 2, "score": 61.5, "metrics": {"accuracy": 61.5}, "rows": 130}
    values = {"columns": {"GLUE": 61.5}, "tasks": {"follows": scored}, "held_out_loss": None}
    values |= {"seconds": 1.0, "tokens": 1, "settings": fingerprint(folder)}
    (folder / "scores.json").write_text(json_with_checksum(values))
    export_checkpoint(folder, tmp_path / "out")
    (folder / "scores.json").unlink()
    (start / HUB_NAME_FILE).unlink()
    card = (tmp_path / "out" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    fields = dict(re.findall(r'(?m)^(\w+): "(.*)"$', front))
    assert fields == {
        "library_name": "sentence-transformers",
        "pipeline_tag": "text-classification",
        "base_model": "owner/name",
    }
    assert re.search(r"\| follows \| accuracy \| 61\.50 \| documentation\S* \w+ \| 130 \|", text)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) == 4 and 'SentenceTransformer("FOLDER")' in code
    assert "2 steps" in text and "Start: the checkpoint `owner/name`" in text
    assert str(ROOT) not in card and str(runs) not in card


def card_of(folder, stage):
    return model_card(folder, stage, {"model_type": "x"}, "XModel", "scored", False)


def finished_run(runs, row, new, scores):
    """The folder of a run of a row that has these scores, and its stages by name."""
    folder = runs / "tiny" / row / "seed-0"
    save_settings(folder, build(row, "tiny", new), runs / "cache")
    values = {"columns": {}, "tasks": {}, "held_out_loss": None, "seconds": 1.0, "tokens": 1}
    scores = values | scores | {"settings": fingerprint(folder)}
    (folder / "scores.json").write_text(json_with_checksum(scores))
    return folder, {stage.name: stage for stage in stages_of(folder)}


def test_a_card_has_the_scores_of_its_own_model(runs):
    scored = {"column": "GLUE", "metric": "accuracy", "step": 2, "metrics": {}, "score": 61.5}
    branches = {"follows": {"10": scored | {"score": 11.5}, "20": scored}}
    heads = {"tuning.mixtures": (), "tuning.heads": ("follows",), "tuning.branches": (0.5, 1.0)}
    new = heads | {"pretraining.steps": 20}
    scores = {"tasks": {"follows": scored}, "branches": branches, "columns": {"GLUE": 61.5}}
    folder, stages = finished_run(runs, "bert/base", new, scores)
    assert "| 61.50 |" in card_of(folder, stages["follows"])
    early = card_of(folder, stages["at-0.5/follows"])
    assert "| 11.50 |" in early and "61.50" not in early

    name = build("t5/13-scaling/ensemble", "tiny").tuning.mixtures[0]
    task = next(iter(mixture(name)))
    scores = {"tasks": {task.name: scored}, "columns": {"GLUE": 61.5}}
    folder, stages = finished_run(runs, "t5/13-scaling/ensemble", {"tuning.mixtures": (name,)}, scores)
    card = card_of(folder, stages[f"{name}/member-1"])
    assert "| 61.50 |" in card and "of the whole ensemble" in card


def test_a_score_that_rounds_to_zero_is_written_without_a_sign(runs):
    metrics = {"matthews": -0.004}
    scored = {"column": "GLUE", "metric": "matthews", "step": 2, "metrics": metrics, "score": -0.004}
    heads = {"tuning.mixtures": (), "tuning.heads": ("follows",)}
    scores = {"tasks": {"follows": scored}, "columns": {"GLUE": -0.004}}
    folder, stages = finished_run(runs, "bert/base", heads, scores)
    assert "| 0.00 |" in card_of(folder, stages["follows"])
    assert summary(folder) == "GLUE 0.00"


def test_a_card_has_the_held_out_loss_of_its_own_pretraining(runs):
    folder, stages = finished_run(runs, "t5/1-baseline/baseline", {"start.steps": 3}, {"held_out_loss": 3.25})
    for name, loss in {"start": 5.5, "pretraining": 3.25}.items():
        line = {"step": 3, "kind": "eval", "loss": loss}
        write(stages[name].folder / "metrics.jsonl", lines_with_checksum([line]))
        assert f"{loss:.3f} nats per token" in card_of(folder, stages[name])


def test_a_card_says_on_what_a_model_was_trained_by_tasks_by_text_and_by_skip_gram(runs):
    def lines(row, stage):
        folder, stages = finished_run(runs, row, {}, {})
        return training_lines(folder, stages[stage])

    mixed = lines("t5/12-multi-task/multi-task", "pretraining")[-1]
    tasks = "`documentation-reading, documentation-language`"
    assert mixed.startswith(f"Pre-training on `documentation/installed` by `replace-spans` and on {tasks}: ")
    supervised = lines("t5/12-multi-task/supervised+fine-tuning", "pretraining")[-1]
    assert supervised.startswith(f"Pre-training on {tasks}: ")
    skipgram, network = lines("vectors/lstm+vectors", "pretraining")
    settings = "passes over the text: 1, learning rate 0.025, seed 0"
    assert skipgram == f"Skip-gram on `documentation/installed`: {settings}"
    assert network.startswith("Pre-training on `documentation/installed` by `causal-lm`: ")


def test_a_card_names_the_language_of_a_model_whose_corpora_and_tasks_are_english(runs):
    row = "t5/1-baseline/baseline"
    for mixture_name, language in {
        "documentation-language": "en",
        "glue_small": "en",
        "multi30k_ende": "",
    }.items():
        folder, stages = finished_run(runs, row, {"tuning.mixtures": (mixture_name,)}, {})
        assert ('language: "en"' in card_of(folder, stages[mixture_name])) == bool(language), mixture_name
        assert 'language: "en"' in card_of(folder, stages["pretraining"])


def test_a_card_says_how_the_run_was_trained_that_training_began_with(runs):
    source = tuned_run(runs, "bert", pool="mean")
    heads = {"tuning.mixtures": (), "tuning.heads": ("follows",), "tuning.pool": "mean"}
    for more in ({}, {"model.num_encoder_layers": 1}):
        start = overrides_of_start(str(source), runs, more)
        folder = runs / "tiny" / f"again-{len(more)}" / "seed-0"
        save_settings(folder, build("bert/base", "tiny", start | heads), runs / "cache")
        (stage,) = stages_of(folder)
        card = model_card(folder, stage, {"model_type": "bert"}, "BertModel", "scored", False)
        lines = re.findall("(?m)^- (.*)$", card.partition("## Training")[2].partition("## Scores")[0])
        first = stages_of(source)[0].settings.start.model
        assert [line.partition(":")[0] for line in lines] == ["Start", "Fine-tuning on `follows`"] * 2
        assert lines[0] == f"Start: the checkpoint `{first}`"
        assert lines[2].endswith(f"`{start['start.model']}`, trained as the lines above say")


def test_the_name_on_the_hub_is_kept_of_a_checkpoint_in_its_cache(runs, tmp_path):
    made = published.write("roberta", tmp_path / "models--owner--name" / "snapshots" / "0123", seed=7)
    start = overrides_of_start(str(made), runs)["start.model"]
    assert hub_name(start_folder(start, runs / "cache")) == "owner/name"
