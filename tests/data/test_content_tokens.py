"""Laws of content tokens: what counts, and what a model without context reaches on it."""

from dataclasses import replace

import numpy as np
import pytest
import toy
from golden.make_batches import VOCABULARY, OneWindow, examples, pretraining

from experiments.runs.scores import held_out, total
from lm.data.batches import Batches
from lm.data.content import unigram_baseline
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import EncodedDocuments
from lm.data.packing import DECODERS
from lm.data.pretraining import pretraining_rows
from lm.data.seq2seq import CorpusExamples, MixtureRows
from lm.files import lines_with_checksum
from lm.objectives.denoising import OBJECTIVES, Lengths

SENTINELS = VOCABULARY.vocab_size - VOCABULARY.num_sentinels
COPYING = ("copy", "copy-random")
DENOISING = [
    name for name, one in OBJECTIVES.items() if not one.is_mlm and one.has_inputs and name not in COPYING
]


def text_of(tokens):
    """The tokens of the corpus; ids above them are masks, sentinels or noise's random ones, 1 is EOS."""
    return tokens[(tokens > 2) & (tokens < 273)]


@pytest.mark.parametrize("name", DENOISING)
def test_of_an_encoder_decoder_the_tokens_that_inputs_lack_are_content(name):
    """With the unchanged tokens of the inputs, where those can be told, they make up the text."""
    objective = replace(OBJECTIVES[name], eos="each-example")
    batch = pretraining(objective, "encoder-decoder")(0, slice(None))
    targets, content = batch.decoder.targets, batch.decoder.content
    assert content.dtype == bool and content.any(1).all()
    assert not (content & ((targets == 1) | (targets >= SENTINELS) | (batch.decoder.segment_ids == 0))).any()
    moves_words = objective.noise == "none" or objective.inputs == "shuffle"
    if moves_words or objective.targets != "everything":
        words = (targets > 1) & (targets < SENTINELS)
        assert (content == words).all()
    else:  # masks, of which one in ten may be any token
        share = content.sum() / (targets > 1).sum()
        assert share == pytest.approx(objective.rate, abs=0.05)


def test_words_that_inputs_show_at_the_same_place_are_no_content():
    for name in ("mass-style", "bert-style"):
        batch = pretraining(OBJECTIVES[name], "encoder-decoder")(0, slice(None))
        width = batch.encoder.tokens.shape[1]
        same = batch.decoder.targets[:, :width] == batch.encoder.tokens
        differ = batch.decoder.content[:, :width] & same
        assert differ.sum() <= 1  # a random token may be the text's
        assert (batch.decoder.content[:, :width] | same).all()


def test_infilled_text_has_as_content_what_no_input_shows_whatever_the_order_of_sentences():
    for sentences in ("in-order", "permuted"):
        objective = replace(OBJECTIVES["text-infilling"], sentences=sentences)
        batch = pretraining(objective, "encoder-decoder")(0, slice(None))
        for row in range(6):
            shown = text_of(batch.encoder.tokens[row])
            hidden = text_of(batch.decoder.targets[row][batch.decoder.content[row]])
            everything = text_of(batch.decoder.targets[row])
            assert sorted([*shown, *hidden]) == sorted(everything)


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("name", ["baseline", "prefix-lm", "causal-lm", "deshuffling", "mass-style"])
def test_of_a_causal_decoder_every_word_is_content_once_and_a_prefix_decoder_copies_its_inputs(
    name, architecture
):
    objective = OBJECTIVES[name]
    batch = pretraining(objective, architecture)(0, slice(None))
    paired = None if name == "causal-lm" else pretraining(objective, "encoder-decoder")(0, slice(None))
    content, tokens = batch.decoder.content, batch.decoder.targets
    # 1 at the positions that see the inputs; of n inputs these are 0 to n
    prefix = np.zeros_like(content)
    prefix[:, :-1] = batch.decoder.causal_attention[:, 1:] > 0
    assert not (content & ((tokens == 1) | (tokens >= SENTINELS))).any()
    if architecture == "prefix-decoder":
        assert not (content & prefix).any()
    elif name in ("baseline", "prefix-lm", "causal-lm"):
        assert (content == ((tokens > 1) & (tokens < SENTINELS))).all()
    elif name == "deshuffling":
        assert not (content & prefix).any()
    if paired is not None and not objective.corruption.per_document:
        of_targets = (content & ~prefix).sum(1)
        assert of_targets.tolist() == paired.decoder.content.sum(1).tolist()


@pytest.mark.parametrize("name", COPYING)
def test_what_is_copied_is_no_content_and_a_causal_decoder_predicts_the_text_but_no_random_tokens(name):
    for architecture in ("encoder-decoder", "prefix-decoder"):
        assert not pretraining(OBJECTIVES[name], architecture)(0, slice(None)).decoder.content.any()
    batch = pretraining(OBJECTIVES[name], "decoder")(0, slice(None))
    prefix = np.zeros_like(batch.decoder.content)
    prefix[:, :-1] = batch.decoder.causal_attention[:, 1:] > 0
    words = prefix & (batch.decoder.targets > 1)
    assert (batch.decoder.content == (words if name == "copy" else False)).all()


def test_of_an_encoder_the_hidden_tokens_are_content():
    batch = pretraining(OBJECTIVES["masked-lm"], "encoder")(0, slice(None))
    assert (batch.encoder.content == (batch.encoder.loss_weights > 0)).all()


def test_of_mixtures_answers_but_for_eos_are_content_and_the_corpus_keeps_its_own():
    source = pretraining(OBJECTIVES["bert-style"], "encoder-decoder").row_source
    tasks = {"task": examples(9), "corpus": CorpusExamples(source)}
    batch = MixtureRows(tasks, {"task": 1.0, "corpus": 1.0}, "encoder-decoder", Lengths(0, 60, 60), 0)(
        np.arange(40)
    )
    text, targets = batch.decoder.segment_ids > 0, batch.decoder.targets
    shares = batch.decoder.content.sum(1) / (text & (targets != 1)).sum(1)
    answered = shares == 1
    assert answered.sum() == 20
    assert shares[~answered].mean() == pytest.approx(0.15, abs=0.05)
    short = MixtureRows({"task": examples(9)}, {"task": 1.0}, "decoder", Lengths(0, 6, 4), 0)(np.arange(9))
    assert (short.decoder.content == (short.decoder.targets > 1)).all()  # those that were cut too


# ---- without context


def drawn_text(objective, length=512):
    """Batches of a long text whose pieces are drawn from ``SHARES``, and the text."""
    tokens = np.random.default_rng(0).choice(np.arange(3, 273), 200_000, p=SHARES).astype(np.uint16)
    streams = CorpusSampler(OneWindow(EncodedDocuments(tokens, np.array([0, len(tokens)])), MANY), 1, 0)
    architectures = {OBJECTIVES["causal-lm"]: "decoder", MASKED_LM: "encoder", MASKS_ONLY: "encoder"}
    architecture = architectures.get(objective, "encoder-decoder")
    settings = {"architecture": architecture, "inputs_length": length, "batch_size": 64}
    rows = pretraining_rows(streams, objective, **settings)
    return [Batches(rows, 64)(step, slice(None)) for step in range(4)], tokens


SHARES = 1 / np.arange(1, 271)
SHARES /= SHARES.sum()
ENTROPY = -(SHARES * np.log(SHARES)).sum()
MANY = replace(VOCABULARY, num_sentinels=150, vocab_size=450)
MASKED_LM = OBJECTIVES["masked-lm"]
MASKS_ONLY = replace(MASKED_LM, inputs="masks")


@pytest.mark.parametrize(
    ("name", "surprise"),
    [
        ("baseline", -0.15 * np.log(0.15)),  # 0.28: the words that follow a word
        ("span-corruption", -2 / 3 * np.log(2 / 3)),  # of three words two follow a word
        ("bert-style", 0.0),
        ("prefix-lm", 0.0),
        ("deshuffling", 0.0),
        ("causal-lm", 0.0),
        ("drop-tokens", 0.0),
    ],
)
def test_without_context_a_model_knows_how_frequent_pieces_are_and_how_often_a_run_goes_on(name, surprise):
    batches, tokens = drawn_text(OBJECTIVES[name])
    loss, frequent = unigram_baseline(batches, MANY, tokens)
    assert loss == pytest.approx(ENTROPY + surprise, abs=0.02)
    assert sorted(frequent) == list(range(3, 13))


def test_without_context_a_masked_model_knows_the_tokens_that_it_is_shown_and_no_more():
    """The loss is the entropy of the target given the input at its place, from their joint distribution."""
    batches, tokens = drawn_text(MASKS_ONLY)
    assert unigram_baseline(batches, MANY, tokens).loss == pytest.approx(ENTROPY, abs=0.02)

    first, size = MANY.first_regular_id, MANY.vocab_size
    frequencies = np.zeros(size)
    frequencies[3:273] = SHARES
    is_random = (np.arange(size) >= first) / (size - first)
    joint = 0.1 * np.diag(frequencies) + 0.1 * np.outer(frequencies, is_random)  # [target, shown token]
    joint[:, MANY.mask] += 0.8 * frequencies
    given_input = joint / np.maximum(joint.sum(axis=0), 1e-12)
    expected = -(joint * np.log(np.maximum(given_input, 1e-12))).sum()
    assert expected < ENTROPY - 0.3  # more than a plateau's margin is copied
    batches, tokens = drawn_text(MASKED_LM)
    assert unigram_baseline(batches, MANY, tokens).loss == pytest.approx(expected, abs=0.03)


def test_without_content_tokens_there_is_no_loss_without_context():
    for name in COPYING:
        batches, tokens = drawn_text(OBJECTIVES[name])
        baseline = unigram_baseline(batches, MANY, tokens)
        assert baseline.loss is None and (baseline.frequent_tokens == -1).all()


def test_a_few_content_tokens_are_judged_like_many():
    """Their own entropy would be far lower than that of the text: 3.9 of 4.6 nats here."""
    batches, tokens = drawn_text(OBJECTIVES["drop-tokens"], length=60)
    few = [batches[0].map(lambda values: values[:8])]
    assert few[0].decoder.content.sum() < 100
    assert unigram_baseline(few, MANY, tokens).loss == pytest.approx(ENTROPY, abs=0.5)


def test_a_plateau_is_left_at_the_first_evaluation_a_fifth_of_a_nat_below_no_context(tmp_path):
    losses = {100: 6.0, 200: 5.79, 300: 5.95, 400: 5.5}
    lines = [{"step": step, "kind": "eval", "loss": 3.0, "content_loss": x} for step, x in losses.items()]
    lines = [line | {"reference_loss": 5.99, "top_ten_share": 0.5} for line in lines]
    counts = [{"step": step, "kind": "train", "content_tokens": n} for step, n in ((100, 7.0), (400, 9.0))]
    (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(counts + lines))
    assert held_out(tmp_path) == {
        "held_out_loss": 3.0,
        "content_loss": 5.5,
        "reference_loss": 5.99,
        "top_ten_share": 0.5,
        "exit_step": 200,
    }
    assert set(held_out().values()) == {None}
    assert total(tmp_path, "content_tokens", 0) == 100 * 7 + 300 * 9


def test_a_plateau_that_an_earlier_phase_left_is_left_there_unless_the_model_is_on_that_of_the_last(tmp_path):
    def phase(name, losses, unigram_loss):
        (tmp_path / name).mkdir()
        lines = [
            {"step": step, "kind": "eval", "content_loss": loss, "reference_loss": unigram_loss}
            for step, loss in losses.items()
        ]
        (tmp_path / name / "metrics.jsonl").write_text(lines_with_checksum(lines))
        return tmp_path / name

    stuck, left = phase("stuck", {100: 5.9, 200: 5.9}, 6.0), phase("left", {300: 4.9, 400: 4.0}, 5.0)
    last, last_stuck = phase("last", {500: 2.0}, 3.0), phase("last-stuck", {500: 2.9}, 3.0)
    assert held_out(stuck, left, last)["exit_step"] == 400
    assert held_out(stuck, last)["exit_step"] == 500
    assert held_out(stuck, left, last_stuck)["exit_step"] is None


# ---- steps


def with_content(batch, content):
    return replace(batch, decoder=replace(batch.decoder, content=content))


def test_evaluation_tells_the_loss_of_content_and_how_often_a_frequent_piece_is_likeliest():
    steps = toy.steps(model=replace(toy.MODEL, dropout=0.0))
    state, batch = steps.initial_state(0), toy.batch(0)
    assert "content_loss" not in steps.evaluate(state, [batch])
    content = np.random.default_rng(1).random(batch.decoder.loss_weights.shape) < 0.5
    batch = with_content(batch, content & (batch.decoder.loss_weights > 0))
    logits = np.asarray(state.eval_model(batch), np.float64)
    best = logits.argmax(-1)[batch.decoder.content]
    pieces = np.array([*np.unique(best)[:2], -1], np.int32)
    batch = replace(batch, frequent_tokens=np.tile(pieces, (toy.ROWS, 1)))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    due = -np.take_along_axis(logs, batch.decoder.targets[..., None], -1)[..., 0]
    values = steps.evaluate(state, [batch])
    assert values["content_loss"] == pytest.approx(due[batch.decoder.content].mean(), rel=1e-5)
    share = np.isin(best, pieces).mean()
    assert values["top_ten_share"] == pytest.approx(share) and 0 < share < 1
    halves = [batch.map(lambda x, rows=rows: x[rows]) for rows in (slice(0, 4), slice(4, None))]
    assert steps.evaluate(state, halves) == pytest.approx(values, rel=1e-5)


def test_a_step_counts_its_content_tokens_whatever_its_micro_batches():
    steps, batch = toy.steps(microbatches=4), toy.batch(0)
    batch = with_content(batch, batch.decoder.loss_weights * (np.arange(toy.LENGTH) % 2) > 0)
    _, metrics = steps.seeded_train_step(0)(steps.initial_state(0), steps.shard_batch(batch))
    assert metrics["content_tokens"] == batch.decoder.content.sum()
