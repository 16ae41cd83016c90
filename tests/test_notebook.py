"""The notebook's way in: the example of docs/notebook.md as it stands, and what is refused."""

import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from paths import GOLDEN, ROOT

from lm import convert
from lm.config.base import SettingError
from lm.config.layers import AttentionConfig, MlpConfig, PositionsConfig
from lm.config.model import ModelConfig, SpecialTokens
from lm.config.training import OptimizerConfig
from lm.notebook import PairTraining, load_model, make_model, text_model, train_model
from lm.sharding import named
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import EOS, PAD

DOCS = (ROOT / "docs" / "notebook.md").read_text("utf-8")
FAST = OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.01)
SMALL = ModelConfig(
    vocab_size=384,
    num_encoder_layers=1,
    num_decoder_layers=1,
    d_model=8,
    mlp=MlpConfig(d_ff=8),
    attention=AttentionConfig(d_kv=4),
)


@pytest.mark.slow
def test_the_example_of_the_docs_learns_its_pairs_and_leaves_the_first_model_as_it_was(capsys):
    made = {}
    exec(re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)[1], made)
    losses, right = made["losses"], ("grass", "green")
    assert len(losses) == 60 and losses[-1] < 0.5 < 3 < losses[0]
    assert capsys.readouterr().out.splitlines()[-1] == "['black']"
    ((after, _),) = made["trained"].log_likelihoods([right])
    ((before, _),) = made["model"].log_likelihoods([right])
    assert after > -3 > before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2"])
def test_a_published_decoder_learns_pairs_between_the_ids_of_its_own_tokenizer(name):
    config, published = convert.load(GOLDEN / name)
    model = text_model(published, load_pretrained_tokenizer(GOLDEN / "harness" / name, config.vocab_size))
    assert (config.special.eos, config.special.start) != (EOS, PAD)
    pairs = [("the cat", " sat"), ("a dog", " ran")]
    trained, losses = train_model(model, pairs, PairTraining(steps=40, optimizer=FAST))
    assert losses[-1] < 0.1 * losses[0]
    asked = [(question, {"max_gen_toks": 8}) for question, _ in pairs]
    assert [answer.strip() for answer in trained.generate(asked)] == ["sat", "ran"]


def test_an_average_of_weights_starts_as_the_model_and_its_pooling_stays():
    decoder = replace(SMALL, architecture="decoder")
    model = replace(make_model(decoder, ByteTokenizer(100), seed=0), pool="mean")
    averaged = replace(FAST, learning_rate=1e-9, ema=0.999)
    trained, _ = train_model(model, [("a", "b")], PairTraining(steps=1, optimizer=averaged))
    assert trained.pool == "mean"
    before, after = (named(each.model) for each in (model, trained))
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, atol=1e-6, err_msg=name)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(SettingError, match="vocab_size=384 is less than the vocabulary's"):
        make_model(SMALL, ByteTokenizer(1000), seed=0)
    other = replace(SMALL, special=SpecialTokens(pad=3))
    with pytest.raises(SettingError, match="model.special=.* should have pad 0 and start 0"):
        train_model(make_model(other, ByteTokenizer(100), seed=0), [("a", "b")], PairTraining())
    with pytest.raises(SettingError, match="at least one .input, answer. pair"):
        train_model(make_model(SMALL, ByteTokenizer(100), seed=0), [], PairTraining())
    encoder = make_model(replace(SMALL, architecture="encoder"), ByteTokenizer(100), seed=0)
    with pytest.raises(SettingError, match="an encoder writes no answers"):
        train_model(encoder, [("a", "b")], PairTraining())


@pytest.mark.parametrize(
    ("architecture", "longest"),
    [("encoder-decoder", 12), ("decoder", 12 + 9)],  # the longer side, or both sides, with an EOS each
)
def test_pairs_longer_than_the_positions_of_a_model_are_refused_before_training(architecture, longest):
    pairs = [("a", "b"), ("c" * 11, "d" * 20)]  # of which the second answer is cut to 9 tokens
    training = PairTraining(steps=1, targets_length=9, optimizer=FAST)
    config = replace(SMALL, architecture=architecture)
    positions = PositionsConfig(kind="learned", max_length=longest - 1)
    model = make_model(replace(config, positions=positions), ByteTokenizer(100), seed=0)
    with pytest.raises(SettingError, match=f"pair of {longest} tokens .*max_length={longest - 1}.*make inp"):
        train_model(model, pairs, training)
    positions = replace(positions, max_length=longest)
    model = make_model(replace(config, positions=positions), ByteTokenizer(100), seed=0)
    assert np.isfinite(train_model(model, pairs, training)[1]).all()


@pytest.mark.parametrize(
    ("pairs", "found"),
    [(["ab"], "'ab'"), ([("a", "b"), ("c",)], r"\('c',\)"), ([("a", 3)], r"\('a', 3\)")],
)
def test_a_pair_that_is_not_two_texts_is_named(pairs, found):
    model = make_model(SMALL, ByteTokenizer(100), seed=0)
    with pytest.raises(SettingError, match=rf"pairs\[{len(pairs) - 1}\]={found} should be \(input, answer\)"):
        train_model(model, pairs, PairTraining())


def test_a_batch_that_the_devices_cannot_share_evenly_is_refused_with_a_size_that_they_can():
    model, devices = make_model(SMALL, ByteTokenizer(100), seed=0), jax.device_count()
    with pytest.raises(SettingError, match=rf"batch_size of size {devices + 1} .*multiple of {devices}"):
        train_model(model, [("a", "b")], PairTraining(steps=1, batch_size=devices + 1))


def test_a_published_folder_without_a_tokenizer_is_refused():
    with pytest.raises(SettingError, match="has no tokenizer"):
        load_model(GOLDEN / "gpt2")


def test_the_cells_of_the_notebook_install_and_then_do_what_the_docs_do():
    """Its code is the one that the first test here runs."""
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text("utf-8"))
    install, train, ask = (c for c in notebook["cells"] if c["cell_type"] == "code")
    assert install["source"][-1] == "%pip install --quiet {SOURCE}"
    assert not any(cell["outputs"] for cell in (install, train, ask))
    code = "".join([*train["source"][1:], "\n", *ask["source"][1:], "\n"])
    assert code == re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)[1]


def test_the_backward_pass_that_a_notebook_writes_out_gives_the_gradients_of_jax():
    notebook = json.loads((ROOT / "docs" / "backward.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        for code in cells:
            exec(code.replace('jax.config.update("jax_enable_x64", True)', ""), names)
        params, x, labels = (names[name] for name in ("params", "x", "labels"))
        expected = jax.grad(names["jax_loss"])(params, x, labels)  # after training
    found = names["backward"](params, x, labels)
    assert found.keys() == params.keys()
    for name, gradient in expected.items():
        assert found[name] == pytest.approx(np.asarray(gradient), abs=1e-12)
    assert names["accuracy"] > 0.95


@pytest.mark.slow
def test_a_notebook_server_runs_the_notebook(tmp_path):
    """With what a hosted machine runs it by, where that is installed: nbclient and ipykernel."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    install = next(cell for cell in notebook.cells if cell.cell_type == "code")
    install.source = install.source.replace("%pip install --quiet {SOURCE}", "")  # it is installed here
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[0].text.splitlines()[-1] == "['black']"
