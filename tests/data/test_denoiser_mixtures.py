"""Laws of rows that a mixture of denoisers makes, and of the loss on targets alone."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from lm.batch import concatenate
from lm.config.base import SettingError
from lm.data.batches import Batches
from lm.data.corpus.sampler import CorpusSampler, WindowPosition
from lm.data.corpus.token_cache import in_memory_corpus
from lm.data.packing import ARCHITECTURES, ENCODER_DECODERS
from lm.data.pretraining import mode_tokens, pretraining_rows
from lm.objectives.denoising import DENOISER_MIXTURES, OBJECTIVES, Denoiser, Objective
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import EOS

VOCABULARY = ByteTokenizer(100)
SUITED = [
    (name, architecture)
    for name in DENOISER_MIXTURES
    for architecture in ("encoder-decoder", "decoder", "prefix-decoder")
    if name != "fill-in-the-middle-lm" or architecture not in ENCODER_DECODERS
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """60 documents of 2 to about 300 tokens."""
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(2, 300, 60)]
    return in_memory_corpus(texts, VOCABULARY, tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def batches(corpus):
    def make(objective, architecture="encoder-decoder", seed=5, batch_size=8, inputs_length=48):
        rows = pretraining_rows(
            CorpusSampler(corpus, 1, seed),
            objective,
            architecture=architecture,
            inputs_length=inputs_length,
            batch_size=batch_size,
        )
        return Batches(rows, batch_size)

    return make


@pytest.fixture
def mixture(monkeypatch):
    """Register denoisers as a mixture and return its objective."""

    def register(*denoisers):
        monkeypatch.setitem(DENOISER_MIXTURES, "of-a-test", denoisers)
        return Objective(mixture="of-a-test")

    return register


def same(one, other):
    one, other = one.features(), other.features()
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype and (values == other[name]).all(), name


@pytest.mark.parametrize(("name", "architecture"), SUITED)
def test_a_batch_depends_on_seed_and_step_alone_and_two_hosts_make_the_rows_of_one(
    batches, name, architecture
):
    objective = Objective(mixture=name)
    first, second = (
        batches(objective, architecture),
        pickle.loads(pickle.dumps(batches(objective, architecture))),
    )
    for step in (40, 2, 7):  # over several epochs, and not in order
        whole = first(step, slice(None))
        right, left = second(step, slice(4, 8)), second(step, slice(0, 4))
        same(whole, concatenate([left, right]))
    other = batches(objective, architecture, seed=6)(7, slice(None))
    assert any((value != whole.features()[key]).any() for key, value in other.features().items())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixture_of_one_denoiser_is_its_objective_bit_for_bit(batches, mixture, name, architecture):
    alone = OBJECTIVES[name]
    try:
        made = batches(alone, architecture)
    except SettingError:
        return  # they do not suit each other
    mixed = batches(mixture(Denoiser("only", alone, weight=3.0)), architecture)
    assert mixed.lengths == made.lengths
    for step in (0, 9):
        same(made(step, slice(None)), mixed(step, slice(None)))


@pytest.mark.parametrize("name", DENOISER_MIXTURES)
def test_rows_choose_denoisers_in_proportion_to_their_weights(batches, name):
    """Within three standard errors of 10,000 rows."""
    rows, count = batches(Objective(mixture=name), "prefix-decoder").row_source, 10_000
    weights = np.array([denoiser.weight for denoiser in rows.denoisers])
    shares = weights / weights.sum()
    found = np.bincount(rows.choose(np.arange(count)), minlength=len(shares)) / count
    assert (abs(found - shares) < 3 * np.sqrt(shares * (1 - shares) / count)).all()


def test_the_choice_of_a_row_says_nothing_of_its_noise(batches):
    """Both are drawn from (seed, row): by different numbers."""
    rows, numbers = batches(Objective(mixture="ul2")).row_source, np.arange(4000)
    chosen = rows.choose(numbers) > 3
    alone = batches(OBJECTIVES["bert-style"]).row_source
    first = np.concatenate([alone(numbers[i : i + 100]).encoder.tokens[:, 0] for i in range(0, 4000, 100)])
    assert abs(np.corrcoef(chosen, first == VOCABULARY.mask)[0, 1]) < 5 / np.sqrt(4000)


@pytest.mark.parametrize(("name", "architecture"), SUITED)
def test_each_row_is_that_row_of_its_denoiser_padded(batches, name, architecture):
    """Text, targets and noise are those of the denoiser alone; the mode token stands before its inputs."""
    made = batches(Objective(mixture=name), architecture)
    numbers = np.arange(16, 32)
    batch, chosen = made.row_source(numbers), made.row_source.choose(numbers)
    assert len(set(chosen)) > 1
    for row, (number, index) in enumerate(zip(numbers, chosen, strict=True)):
        alone = made.row_source.parts[index](np.array([number]))
        for key, values in alone.features().items():
            there = batch.features()[key][row]
            assert (there[: values.shape[1]] == values[0]).all() and not there[values.shape[1] :].any()


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_inputs_begin_with_the_mode_token_of_their_denoiser_and_no_other_token_is_one(batches, architecture):
    made = batches(Objective(mixture="ul2"), architecture)
    modes = mode_tokens(DENOISER_MIXTURES["ul2"], VOCABULARY)
    first = VOCABULARY.vocab_size - VOCABULARY.num_sentinels
    numbers = np.arange(64)
    batch, chosen = made.row_source(numbers), made.row_source.choose(numbers)
    read = batch.encoder.tokens if architecture == "encoder-decoder" else batch.decoder.targets
    expected = [modes[made.row_source.denoisers[index].mode] for index in chosen]
    assert read[:, 0].tolist() == expected
    is_mode = np.isin(read, [*modes.values()])
    assert is_mode.sum() == 64 and sorted(modes.values()) == [first, first + 1, first + 2]


def test_a_regular_row_worked_by_hand(batches):
    """The text under the row of a denoiser with mode [R]: mode, text with sentinels, EOS; spans, EOS."""
    made = batches(Objective(mixture="ul2"))
    number = int(np.flatnonzero(made.row_source.choose(np.arange(200)) == 0)[0])
    batch, top = made.row_source(np.array([number])), VOCABULARY.vocab_size
    inputs = batch.encoder.tokens[0][batch.encoder.segment_ids[0] > 0].tolist()
    targets = batch.decoder.targets[0][batch.decoder.segment_ids[0] > 0].tolist()
    reader = made.row_source.parts[0].reader
    alone = batches(OBJECTIVES["span-corruption"], inputs_length=47).row_source  # 48, less one for the mode
    assert reader.lengths == alone.reader.lengths
    assert inputs[0] == top - 100 and inputs[-1] == targets[-1] == EOS
    # 47 inputs at 15 % in spans of 3: 51 tokens of text, of which 8 are noise, in 3 spans
    assert reader.lengths.raw == 51 and len(targets) == 8 + 3 + 1 and len(inputs) == 48
    assert [token for token in inputs[1:] if token > top - 97] == [top - 1, top - 2, top - 3]
    assert [token for token in targets if token > top - 97] == [top - 1, top - 2, top - 3]


@pytest.mark.parametrize("architecture", ["decoder", "prefix-decoder"])
def test_rows_that_a_mode_token_fills_sooner_have_a_row_index_of_their_own(batches, mixture, architecture):
    apart = replace(OBJECTIVES["span-corruption"], documents="apart")
    denoisers = Denoiser("regular", apart, mode="[R]"), Denoiser("plain", apart)
    made = batches(mixture(*denoisers), architecture, inputs_length=400)
    with_mode, _ = made.row_source.parts
    without = replace(with_mode, mode_token=None)
    epochs = [WindowPosition(0, epoch, 0, 0, 0, 0) for epoch in range(30)]
    assert sum(map(with_mode.count_rows, epochs)) > sum(map(without.count_rows, epochs))
    assert with_mode.row_index_key != without.row_index_key
    assert without.row_index_key == f"packed {architecture}"  # as index files on disk are named


def test_encoders_mix_shares_of_masked_tokens(batches, mixture):
    few, many = (replace(OBJECTIVES["masked-lm"], rate=rate) for rate in (0.15, 0.6))
    made = batches(mixture(Denoiser("few", few), Denoiser("many", many)), "encoder")
    numbers = np.arange(200)
    shares = made.row_source(numbers).encoder.loss_weights.mean(1)
    chosen = made.row_source.choose(numbers)
    assert shares[chosen == 0].mean() == pytest.approx(0.15, abs=0.03)
    assert shares[chosen == 1].mean() == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("name", ["prefix-lm", "baseline", "fill-in-the-middle"])
@pytest.mark.parametrize("architecture", ["decoder", "prefix-decoder"])
def test_the_loss_on_targets_leaves_out_inputs_and_changes_nothing_else(batches, name, architecture):
    whole, alone = (
        batches(replace(OBJECTIVES[name], loss=loss), architecture)(3, slice(None))
        for loss in ("all-tokens", "targets")
    )
    changed = {"decoder_loss_weights", "decoder_content"}
    for key, values in whole.features().items():
        assert key in changed or (values == alone.features()[key]).all()
    side = alone.decoder
    assert (whole.decoder.loss_weights == (side.segment_ids > 0)).all()
    for row in range(8):
        for segment in range(1, side.segment_ids[row].max() + 1):
            inside = side.segment_ids[row] == segment
            ids, weights = side.targets[row][inside], side.loss_weights[row][inside]
            end_of_inputs = ids.tolist().index(EOS) + 1  # inputs, EOS, targets, EOS
            assert not weights[:end_of_inputs].any() and weights[end_of_inputs:].all()
            assert not side.content[row][inside][:end_of_inputs].any()
